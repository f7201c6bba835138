"""Sizes that change: one dynamic graph serves every size from 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perfopt
from tests.perfopt.comparing import compare, compare_module


def compilations(compiled: Any) -> int:
    return len({graph.number for graph in perfopt.report(compiled).graphs})


def network(x: Tensor) -> Tensor:
    return (F.gelu(x) * 2 + x.shape[0]).softmax(-1) * x.sum(0, keepdim=True)


def test_one_dynamic_graph_serves_every_size() -> None:
    ours = perfopt.compile(network, fullgraph=True)
    for rows in (4, 7, 2, 16, 33):
        compare(network, [torch.randn(rows, 5, requires_grad=True)], ours)
    assert compilations(ours) == 2  # the first size by itself, then any


def test_dynamic_from_the_start_in_every_dimension() -> None:
    ours = perfopt.compile(network, fullgraph=True, dynamic=True)
    for shape in ((4, 5), (7, 3), (2, 17), (65, 66)):
        compare(network, [torch.randn(shape, requires_grad=True)], ours)
    assert compilations(ours) == 1


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda x: (x.flatten() * 2, x.view(x.shape[0], -1).sum(1)),
    "transpose": lambda x: (x.transpose(0, 1) + 1).contiguous() * x.transpose(0, 1),
    "halves": lambda x: x[: x.shape[0] // 2] * 2 + x[0] * x.shape[1],
    "cat": lambda x: F.gelu(torch.cat([x, x], 0)) * (x.shape[0] % 3),
    "range": lambda x: x + torch.arange(x.shape[1]) * 2,
    "rows": lambda x: F.layer_norm(x, (6,)) + x.mean(0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_dynamic_sizes(name: str) -> None:
    ours = perfopt.compile(VIEWS[name], fullgraph=True)
    for rows in (4, 10, 5, 8):
        compare(VIEWS[name], [torch.randn(rows, 6, requires_grad=True)], ours)
    assert compilations(ours) == 2


def test_a_module_with_changing_batch_and_length() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    ours = perfopt.compile(model, dynamic=True)
    for batch, length in ((2, 5), (3, 7), (4, 4)):
        compare_module(model, [torch.randn(batch, length, 8, requires_grad=True)], ours)


def test_sizes_that_only_the_data_knows() -> None:
    def chosen(x: Tensor) -> Tensor:
        return x[x > 0].exp() * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = perfopt.compile(chosen, fullgraph=True)
        for sign in (1.0, -1.0):
            with torch.no_grad():
                compare(chosen, [torch.randn(40) + sign * 3], ours)
                compare(chosen, [torch.full((7,), sign)], ours)

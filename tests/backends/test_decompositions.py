"""Our own decompositions beside the operators, and what must stay whole."""

from __future__ import annotations

import pytest
import torch

from perfopt.backends.decompositions import decompositions

aten = torch.ops.aten


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_nll_loss_backward(weighted: bool, reduction: int, ignored: int) -> None:
    x = torch.randn(5, 4).log_softmax(-1)
    target = torch.tensor([0, 1, 3, 3, 1])
    weight = torch.rand(4) if weighted else None
    _, total = aten.nll_loss_forward(x, target, weight, reduction, ignored)
    grad = torch.randn(5) if reduction == 0 else torch.randn(())
    given = (grad, x, target, weight, reduction, ignored, total)
    ours = decompositions()[aten.nll_loss_backward.default](*given)
    torch.testing.assert_close(ours, aten.nll_loss_backward(*given))


def test_nll_loss_backward_of_one_row_and_of_nothing_but_ignored() -> None:
    rule = decompositions()[aten.nll_loss_backward.default]
    one = (torch.tensor(2.0), torch.randn(4), torch.tensor(2), None, 1, -100, torch.tensor(1.0))
    torch.testing.assert_close(rule(*one), aten.nll_loss_backward(*one))
    x, none = torch.randn(2, 4), torch.tensor([-100, -100])
    empty = (torch.tensor(2.0), x, none, None, 1, -100, torch.tensor(0.0))
    assert not rule(*empty).any()


def test_split_with_sizes_gives_views() -> None:
    x = torch.randn(2, 7)
    pieces = decompositions()[aten.split_with_sizes.default](x, [3, 0, 4], 1)
    for ours, theirs in zip(pieces, x.split([3, 0, 4], 1), strict=True):
        assert torch.equal(ours, theirs) and ours._base is x


@pytest.mark.parametrize(
    "name",
    ["mm", "addmm", "bmm", "convolution", "native_dropout", "embedding", "native_batch_norm",
     "_scaled_dot_product_flash_attention_for_cpu", "max_pool2d_with_indices", "index_put",
     "embedding_dense_backward", "gelu", "silu"],
)  # fmt: skip
def test_library_calls_stay_whole(name: str) -> None:
    table = decompositions()
    packet = getattr(aten, name)
    assert not [o for o in packet.overloads() if getattr(packet, o) in table]

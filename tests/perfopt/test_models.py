"""Two transformers models from their configurations: three training steps beside eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import perfopt

transformers = pytest.importorskip("transformers")


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(61, (2, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32, num_labels=3,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    given = {"input_ids": torch.randint(61, (2, 16)), "attention_mask": mask}
    return transformers.BertForSequenceClassification(config), {
        **given,
        "labels": torch.tensor([0, 2]),
    }


def steps(run: Any, model: nn.Module, given: dict[str, torch.Tensor]) -> list[Any]:
    """Losses and gradients of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for step in range(3):
        torch.manual_seed(step)
        loss = run(**given).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.item(), grads))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("make", [gpt2, bert])
def test_three_training_steps(make: Any) -> None:
    model, given = make()
    other = copy.deepcopy(model)
    compiled = perfopt.compile(model)
    ours, eager = steps(compiled, model, given), steps(other, other, given)
    report = perfopt.report(compiled)
    assert report.kernels > 0
    for (loss, grads), (expected, wanted) in zip(ours, eager, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert set(grads) == set(wanted)
        for name, grad in grads.items():
            scale = wanted[name].abs().max().clamp_min(1e-6)
            off = ((grad - wanted[name]).abs().max() / scale).item()
            assert off < 1e-3, f"{name} is {off:.2g} off"

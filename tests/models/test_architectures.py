"""Architectures of the transformers library, small and from their configurations alone.

Each trains three steps in float32 through eager and through perfopt, and in float64. The gradients
of every step may be four times as far from float64 as eager's are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perfopt

transformers = pytest.importorskip("transformers")

Given = dict[str, Any]
LOOSE = 4.0
ULPS = 16.0
WORDS = 61


def _words(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(1, WORDS, (batch, length))


def _padding(batch: int = 2, length: int = 12) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - 3 :] = 0
    return mask


def llama() -> tuple[nn.Module, Given]:
    """A decoder: RMS norm, rotary positions, grouped queries, gated feed-forward."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    words = _words()
    return transformers.LlamaForCausalLM(config), {
        "input_ids": words, "labels": words, "attention_mask": _padding(),
    }  # fmt: skip


def deberta() -> tuple[nn.Module, Given]:
    """An encoder: attention to content and to relative positions."""
    config = transformers.DebertaV2Config(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=32, relative_attention=True,
        pos_att_type=["c2p", "p2c"], position_biased_input=False, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pooler_dropout=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.DebertaV2ForSequenceClassification(config), {
        "input_ids": _words(), "attention_mask": _padding(), "labels": torch.tensor([0, 2]),
    }  # fmt: skip


def t5() -> tuple[nn.Module, Given]:
    """An encoder and a decoder: relative position biases, cross attention."""
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": _words(), "attention_mask": _padding(), "labels": _words(2, 7),
    }  # fmt: skip


def vit() -> tuple[nn.Module, Given]:
    """A vision transformer: patches by convolution, a class token."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = torch.randn(2, 3, 16, 16)
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": images, "labels": torch.tensor([1, 4])}


def convnext() -> tuple[nn.Module, Given]:
    """Convolutions by channel and layer norm over channels."""
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 1, 1], image_size=32, num_labels=5,
        drop_path_rate=0.0,
    )  # fmt: skip
    images = torch.randn(2, 3, 32, 32)
    model = transformers.ConvNextForImageClassification(config)
    return model, {"pixel_values": images, "labels": torch.tensor([1, 4])}


def resnet() -> tuple[nn.Module, Given]:
    """Convolutions with batch norm, whose statistics change with every step."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    images = torch.randn(4, 3, 32, 32)
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": images, "labels": torch.tensor([1, 4, 0, 1])}


def mamba() -> tuple[nn.Module, Given]:
    """A state-space model: a scan along time, one step after the other."""
    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=1, conv_kernel=3,
        expand=2, time_step_rank=2, use_cache=False,
    )  # fmt: skip
    words = _words(2, 6)
    return transformers.MambaForCausalLM(config), {"input_ids": words, "labels": words}


def patchtst() -> tuple[nn.Module, Given]:
    """Time series by patches: scaling by each series' own statistics."""
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=24, patch_length=6, patch_stride=6,
        prediction_length=4, d_model=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24,
        attention_dropout=0.0, positional_dropout=0.0, path_dropout=0.0, ff_dropout=0.0,
        head_dropout=0.0, norm_type="layernorm",
    )  # fmt: skip
    return transformers.PatchTSTForPrediction(config), {
        "past_values": torch.randn(2, 24, 3), "future_values": torch.randn(2, 4, 3),
    }  # fmt: skip


def wav2vec2() -> tuple[nn.Module, Given]:
    """Audio: convolutions over samples, group norm, weight norm, positions by convolution."""
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, activation_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
        num_labels=3, classifier_proj_size=8, num_feat_extract_layers=2,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    return model, {"input_values": torch.randn(2, 200), "labels": torch.tensor([0, 2])}


def whisper() -> tuple[nn.Module, Given]:
    """Audio to text: an encoder of spectra and a decoder."""
    config = transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=10, max_target_positions=16, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, use_cache=False, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 20), "labels": _words(2, 7),
    }  # fmt: skip


def mixtral() -> tuple[nn.Module, Given]:
    """A decoder with a mixture of experts: routing by the largest scores."""
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32, use_cache=False, experts_implementation="eager",
    )  # fmt: skip
    words = _words()
    return transformers.MixtralForCausalLM(config), {"input_ids": words, "labels": words}


def gemma() -> tuple[nn.Module, Given]:
    """A decoder: scaled embeddings, soft caps of logits, local and global attention."""
    config = transformers.Gemma2Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=4,
        max_position_embeddings=32, use_cache=False, attn_implementation="eager",
        final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
    )  # fmt: skip
    words = _words()
    return transformers.Gemma2ForCausalLM(config), {"input_ids": words, "labels": words}


MODELS: list[Callable[[], tuple[nn.Module, Given]]] = [
    llama, deberta, t5, vit, convnext, resnet, mamba, patchtst, wav2vec2, whisper, mixtral, gemma,
]  # fmt: skip


def steps(run: Any, model: nn.Module, given: Given) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(3):
        loss = run(**given).loss
        loss.backward()
        grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.item(), grads))
        optimizer.step()
        optimizer.zero_grad()
    return found


def doubled(given: Given) -> Given:
    return {
        key: value.double() if value.is_floating_point() else value for key, value in given.items()
    }


def distances(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((grad - exact[name]).norm()) for name, grad in grads.items()}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_three_training_steps_and_inference(make: Callable[[], tuple[nn.Module, Given]]) -> None:
    model, given = make()
    model.train()
    eager, double = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = perfopt.compile(model)
    ours = steps(compiled, model, given)
    theirs, exact = steps(eager, eager, given), steps(double, double, doubled(given))
    assert perfopt.report(compiled).kernels > 0
    unit = torch.finfo(torch.float32).eps
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert abs(mine[0] - true[0]) <= LOOSE * abs(other[0] - true[0]) + ULPS * unit * true[0]
        assert set(mine[1]) == set(other[1]) == set(true[1])
        size = max(float(grad.norm()) for grad in true[1].values())
        off, allowed = distances(mine[1], true[1]), distances(other[1], true[1])
        for name, value in off.items():
            limit = LOOSE * allowed[name] + ULPS * unit * size
            assert value <= limit, f"{name} is {value:.3g} off, eager {allowed[name]:.3g}"
    for each in (model, eager, double):
        each.load_state_dict(eager.state_dict())
        each.eval()
    with torch.no_grad():
        mine, other = compiled(**given), eager(**given)
        true = double(**doubled(given))
    for key, value in mine.items():
        if isinstance(value, Tensor):
            off, allowed = ((x - true[key]).abs().max() for x in (value, other[key]))
            assert off <= LOOSE * allowed + ULPS * unit * true[key].abs().max(), key

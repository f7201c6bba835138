"""`--hf`: models of transformers from a configuration, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfopt.explanation import explain_made
from perfopt.factory import FactoryError
from perfopt.huggingface import from_config

pytest.importorskip("transformers")
SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 61,
        "max_position_embeddings": 64,
    },
    "vit": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "image_size": 16, "patch_size": 4,
    },
    "t5": {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 61,
    },
}  # fmt: skip


def written(folder: Path, kind: str, **more: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **SMALL.get(kind, {}), **more}))
    return str(path)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("train", [False, True])
def test_models_are_explained_from_their_configuration(
    kind: str, train: bool, tmp_path: Path
) -> None:
    make = from_config(written(tmp_path, kind), batch=2, length=16, train=train)
    found = explain_made(make, kind, train=train, device="h100")
    kinds = [part.kind for part in found.graphs]
    assert ("backward" in kinds) == train
    assert found.cost.seconds > 0 and found.regions


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_one_factory_gives_the_same_model_again(kind: str, tmp_path: Path) -> None:
    make = from_config(written(tmp_path, kind), batch=2, length=16)
    first, second = (explain_made(make, kind, device="h100") for _ in range(2))
    assert first == second
    model, *_ = make()
    assert not model.config.use_cache and not model.config.get_text_config(True).use_cache


def test_twice_the_batch_is_twice_the_products(tmp_path: Path) -> None:
    path = written(tmp_path, "llama")
    one, two = (
        explain_made(from_config(path, batch, 16), "llama", device="h100") for batch in (1, 2)
    )
    assert two.cost.product_seconds == pytest.approx(2 * one.cost.product_seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no model_type"),
        ("[", "not JSON"),
        ('{"model_type": "lama"}', "unknown model_type 'lama'; nearest: .*llama"),
    ],
)
def test_what_is_no_configuration_is_said(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(FactoryError, match=message):
        from_config(str(path))


def test_bad_sizes_and_dtypes_are_said(tmp_path: Path) -> None:
    path = written(tmp_path, "llama")
    with pytest.raises(FactoryError, match="'bf61'; did you mean 'bf16'"):
        from_config(path, dtype="bf61")
    with pytest.raises(FactoryError, match="--batch is 0"):
        from_config(path, batch=0)
    with pytest.raises(FactoryError, match="room for 64 positions"):
        from_config(path, length=65)
    with pytest.raises(FactoryError, match="No such file"):
        from_config(str(tmp_path / "none.json"))

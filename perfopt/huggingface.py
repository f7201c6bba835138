"""Models of the transformers library, from a configuration alone: what `--hf` explains."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from perfopt.factory import FactoryError, Made

DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16,
    "float16": torch.float16, "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip
LENGTH = 2048  # of a sequence, unless told otherwise or the model takes less
_FRAMES = 3000  # of a spectrogram, as Whisper takes them
# Automatic classes, the first whose task the model's kind is known for.
_TASKS = (
    "CausalLM", "Seq2SeqLM", "MaskedLM", "SpeechSeq2Seq", "ImageClassification", "CTC",
    "SequenceClassification",
)  # fmt: skip
_PER_WORD = ("CausalLM", "LMHeadModel", "MaskedLM", "Seq2SeqLM", "ConditionalGeneration",
             "TokenClassification", "PreTraining")  # fmt: skip
_PER_SAMPLE = ("SequenceClassification", "ImageClassification", "AudioClassification")


def from_config(
    path: str, batch: int = 1, length: int | None = None, dtype: str = "bf16", train: bool = False
) -> Callable[[], Made]:
    """A factory of the model that a `config.json` describes, and of inputs for it.

    Sequences have `length` tokens, samples of sound or positions, `batch` of them; `train` adds
    labels where the model takes them. Raises `FactoryError`: no such file, no configuration of a
    known kind, a dtype or size that is none, or transformers missing.
    """
    if dtype not in DTYPES:
        near = difflib.get_close_matches(dtype, DTYPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise FactoryError(f"--dtype is {dtype!r}{hint} Allowed: {', '.join(DTYPES)}")
    for name, size in (("--batch", batch), ("--seq", length)):
        if size is not None and size < 1:
            raise FactoryError(f"{name} is {size}, not a number from 1")
    table = _read(path)
    config = _config(table, path)
    longest = getattr(config, "max_position_embeddings", None)
    if length is None:
        length = min(LENGTH, longest or LENGTH)
    elif isinstance(longest, int) and length > longest > 0:
        raise FactoryError(f"--seq is {length}; {Path(path).name} has room for {longest} positions")

    def make() -> Made:
        with _uninitialised():
            model = _model(_stateless(config), table).to(DTYPES[dtype])
        model.train(train)
        inputs = _inputs(model, batch, length, DTYPES[dtype])
        labels = _labels(model, batch, length, inputs) if train else {}
        if model.config.is_encoder_decoder and not labels:
            most = getattr(model.config, "max_target_positions", length)
            words = torch.zeros(batch, min(length, most), dtype=torch.int64)
            labels = {"decoder_input_ids": words}
        return model, (), inputs | labels

    return make


def _read(path: str) -> dict[str, Any]:
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FactoryError(f"--hf {path}: {error.strerror}") from error
    except ValueError as error:
        raise FactoryError(f"--hf {path} is not JSON: {error}") from error
    if not isinstance(table, dict) or not isinstance(table.get("model_type"), str):
        raise FactoryError(f"--hf {path} has no model_type: not a configuration of transformers")
    return table


def _config(table: dict[str, Any], path: str) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise FactoryError("--hf needs transformers: pip install transformers") from error
    kind = table["model_type"]
    known = list(CONFIG_MAPPING)
    if kind not in known:
        near = difflib.get_close_matches(kind, known, n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise FactoryError(f"--hf {path}: unknown model_type {kind!r}{hint}")
    try:
        return AutoConfig.for_model(kind, **{k: v for k, v in table.items() if k != "model_type"})
    except Exception as error:
        raise FactoryError(f"--hf {path}: {type(error).__name__}: {error}") from error


def _stateless(config: Any) -> Any:
    """A copy for a model of one step: it keeps no keys and values for a next one."""
    made = copy.deepcopy(config)  # models change theirs
    for each in {id(part): part for part in (made, made.get_text_config())}.values():
        each.use_cache = False
    if made.is_encoder_decoder and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0
    return made


def _uninitialised() -> AbstractContextManager[Any]:
    """Weights stay as they are made: some ways to initialise them look at values."""
    for name in ("transformers.initialization", "transformers.modeling_utils"):
        with suppress(ImportError, AttributeError):
            return import_module(name).no_init_weights()
    return nullcontext()


def _model(config: Any, table: dict[str, Any]) -> Any:
    """A model of the class that the configuration names, else of the first task that fits."""
    import transformers

    for name in table.get("architectures") or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found(config)
    for task in _TASKS:
        automatic = getattr(transformers, f"AutoModelFor{task}", None)
        if automatic is not None and type(config) in automatic._model_mapping:
            return automatic.from_config(config)
    return transformers.AutoModel.from_config(config)


def _inputs(model: Any, batch: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    config, main = model.config, model.main_input_name
    if main == "pixel_values":
        side = getattr(config, "image_size", 224)
        sides = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
        return {main: torch.randn(batch, getattr(config, "num_channels", 3), *sides, dtype=dtype)}
    if main == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        frames = 2 * getattr(config, "max_source_positions", _FRAMES // 2)
        return {main: torch.randn(batch, bins, frames, dtype=dtype)}
    if main == "input_values":
        return {main: torch.randn(batch, length, dtype=dtype)}
    if main != "input_ids":
        raise FactoryError(f"{type(model).__name__} takes {main!r}, which --hf cannot make up")
    return {main: torch.randint(0, config.get_text_config().vocab_size, (batch, length))}


def _labels(model: Any, batch: int, length: int, inputs: dict[str, Any]) -> dict[str, Any]:
    name = type(model).__name__
    taken = inspect.signature(model.forward).parameters
    if "labels" not in taken:
        return {}
    if name.endswith(_PER_SAMPLE):
        return {"labels": torch.zeros(batch, dtype=torch.int64)}
    if name.endswith(_PER_WORD):
        words = inputs.get("input_ids")
        if words is None:  # a decoder's: as many as it has positions
            most = getattr(model.config, "max_target_positions", length)
            words = torch.zeros(batch, min(length, most), dtype=torch.int64)
        return {"labels": words}
    return {}

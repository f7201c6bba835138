"""The entry point: what `torch.compile(..., backend="perfopt")` calls with each captured graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from perfopt.compiler import compile_graph
from perfopt.options import OptionError, Options, cache_limit, switched_off
from perfopt.pipelines import check_pipeline
from perfopt.records import COMPILATIONS_CACHE

log = logging.getLogger(__name__)


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs; raises `OptionError` for options that do not exist.

    The error is logged too: with `torch._dynamo.config.suppress_errors` it would otherwise turn a
    misspelt option into silent eager execution.
    """
    try:
        chosen = Options.from_user(mode, options)
        check_pipeline(chosen)
        cache_limit()
    except OptionError as error:
        log.error("perfopt: %s", error)
        raise
    if switched_off():
        return gm.forward
    return compile_graph(gm, example_inputs, chosen)


def _reset() -> None:
    """Forget what was compiled; `torch.compiler.reset` calls this."""
    COMPILATIONS_CACHE.clear()


backend.reset = _reset  # type: ignore[attr-defined]

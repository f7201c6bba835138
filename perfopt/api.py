"""`perfopt.compile` and `perfopt.disable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import nn

from perfopt.backend import backend
from perfopt.disabling import DISABLED_MODULES_CACHE
from perfopt.options import Options
from perfopt.pipelines import check_pipeline

Target = TypeVar("Target", bound=Callable[..., Any])
Module = TypeVar("Module", bound=nn.Module)


@overload
def compile(
    model: Target,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Target: ...


@overload
def compile(
    model: None = None,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[[Target], Target]: ...


def compile(
    model: Any = None,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Any:
    """`torch.compile` with this backend, and with options that are checked at once.

    `mode` and `options` are those of `perfopt.Options`; raises `perfopt.OptionError`. `fullgraph`
    and `dynamic` are torch.compile's own. Without a model it returns a decorator.
    """
    check_pipeline(Options.from_user(mode, options))
    given = dict(options) if mode is None else {"mode": mode, **options}
    return torch.compile(
        model, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options=given or None
    )


def disable(module: Module) -> Module:
    """Run the operations of `module`, forward and backward, through ATen; returns it.

    Call it before the first compiled call. It holds for this very module and those inside it, not
    for copies; the option `disable` names modules by path instead.
    """
    DISABLED_MODULES_CACHE.add(module)
    return module

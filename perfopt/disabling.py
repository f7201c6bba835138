"""Modules that the user keeps out of generated kernels: their operations run through ATen."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import fx, nn

from perfopt.backends.oracle import DISABLED

DISABLED_MODULES_CACHE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules given to `perfopt.disable`."""


def is_disabled(root: object) -> bool:
    """Whether `root`, whose method is compiled, is itself a disabled module."""
    return isinstance(root, nn.Module) and root in DISABLED_MODULES_CACHE


def mark_disabled(gm: fx.GraphModule, patterns: Sequence[str]) -> None:
    """Mark the operations of disabled modules, forward and backward.

    `patterns` are module paths as in `named_modules`, with `*` and `?` as in file names.
    """
    if not patterns and not DISABLED_MODULES_CACHE:
        return
    identities = {str(id(module)) for module in DISABLED_MODULES_CACHE}
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        for key, (path, _) in stack.items():
            # The key is the module's id, followed by @n from its second call on.
            if str(key).split("@")[0] in identities or _matches(path, patterns):
                node.meta[DISABLED] = True
                break


def _matches(path: str, patterns: Sequence[str]) -> bool:
    plain = re.sub(r"^[LG]\[['\"]\w+['\"]\]\.?", "", path)
    plain = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", plain)
    return any(fnmatchcase(plain, pattern) for pattern in patterns)

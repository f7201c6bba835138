"""What each kind of device needs for its kernels: a compiler, prices, text to look at."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from perfopt.backends.ir import Kernel
from perfopt.backends.mlir.compile import compile_kernels, host_has_bf16, host_lanes
from perfopt.backends.mlir.module import print_kernel, print_module
from perfopt.backends.oracle import DEVICES
from perfopt.backends.region import LoweredRegion
from perfopt.backends.show import describe
from perfopt.backends.triton.printer import print_kernel as print_triton
from perfopt.backends.triton.source import module_text, symbol
from perfopt.caching import compiled_objects, triton_directory
from perfopt.calibrations import named
from perfopt.cost_model.decision import Decision, Verdict
from perfopt.cost_model.device import Device, UnknownDeviceError, device_named
from perfopt.records import Compilation

log = logging.getLogger(__name__)

_PACKAGES = {"cpu": ("torch_mlir", "torch-mlir", "cpu"), "cuda": ("triton", "triton", "gpu")}
_SUPPOSED = "a100"  # whose figures stand for those of a GPU that no table has
Kernels = Mapping[str, tuple[Kernel, ...]]


def can_generate(kind: str) -> bool:
    """Whether kernels for devices of this type can be compiled; says once that they cannot."""
    if kind not in DEVICES:
        return False
    module, package, extra = _PACKAGES[kind]
    if find_spec(module) is not None:
        return True
    _say_what_is_missing(package, extra)
    return False


@cache
def _say_what_is_missing(package: str, extra: str) -> None:
    where = "" if extra == "cpu" else " for GPUs"
    warnings.warn(
        f"perfopt generates no kernels{where}, because {package} is not installed: everything "
        f"{'there ' if where else ''}runs through ATen. `pip install perfopt[{extra}]` brings it.",
        stacklevel=2,
    )


def devices(gm: fx.GraphModule) -> list[torch.device]:
    """The devices of Dynamo's graph, GPUs first; numbers on the CPU do not count beside a GPU."""
    found: dict[torch.device, int] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.Tensor):
            found[value.device] = max(found.get(value.device, 0), value.ndim)
    used = [d for d, rank in found.items() if rank or d.type != "cpu" or len(found) == 1]
    return sorted(used, key=lambda device: device.type == "cpu") or [torch.device("cpu")]


def generates(gm: fx.GraphModule) -> bool:
    """Whether kernels can be generated for Dynamo's graph; says once where they cannot."""
    kinds = dict.fromkeys(device.type for device in devices(gm))
    if any(kind not in DEVICES for kind in kinds):
        return False
    able = [can_generate(kind) for kind in kinds]
    return any(able)


def price(job: Compilation, device: torch.device) -> None:
    """Have a compilation priced for a GPU, with a note where no table has it."""
    if device.type != "cuda":
        return
    job.device, known = priced(device)
    if not known:
        job.decisions.append(_unknown(job.device))


def priced(device: torch.device) -> tuple[Device, bool]:
    """A GPU by the cost model; and False where another's figures stand for its."""
    name = torch.cuda.get_device_name(device)
    try:
        if name == torch.cuda.get_device_name():
            return named("cuda"), True  # as measured, where it was
        return device_named(name), True
    except UnknownDeviceError:
        return _supposed(name, device.index or 0), False


@cache
def _supposed(name: str, index: int) -> Device:
    shape = torch.cuda.get_device_properties(index)
    base = device_named(_SUPPOSED)
    cache_bytes = float(getattr(shape, "L2_cache_size", 0)) or base.cache_bytes
    return dataclasses.replace(
        base,
        name=name,
        memory_bytes=float(shape.total_memory),
        cores=shape.multi_processor_count,
        cache_bytes=cache_bytes,
        aliases=(),
    )


def _unknown(device: Device) -> Decision:
    values = MappingProxyType({"device": device.name, "like": _SUPPOSED})
    reason = "no table has {device}: prices are those of {like}; perfopt calibrate measures it"
    return Decision("price", Verdict.NOTE, (), reason, values)


def compile_regions(
    job: Compilation,
    kind: str,
    lowered: dict[str, LoweredRegion],
    kernels: Kernels,
    decisions: list[Decision],
    sources: Counter[str],
) -> dict[str, Callable[..., Any]]:
    """The entries of all kernels, those of one device together.

    `sources` counts where they came from. Should compiling fail, each region is compiled by
    itself, and those that fail leave `lowered`, with a decision that says why.
    """
    entries: dict[str, Callable[..., Any]] = {}
    for device in dict.fromkeys(region.device for region in lowered.values()):
        names = [name for name, region in lowered.items() if region.device == device]
        compiled = _compiler(job, kind, device, lowered, sources)
        every = [kernel for name in names for kernel in kernels[name]]
        try:
            entries |= compiled(every)
            continue
        except Exception:
            log.warning("perfopt: compiling %d kernels failed", len(every), exc_info=True)
        for name in names:
            try:
                entries |= compiled(kernels[name])
            except Exception as error:
                reason = "runs through ATen, its kernel does not compile: {why}"
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                values = MappingProxyType({"why": text})
                decisions.append(Decision("lower", Verdict.FAILED, (name,), reason, values))
                del lowered[name]
    return entries


def _compiler(
    job: Compilation,
    kind: str,
    device: torch.device,
    lowered: Mapping[str, LoweredRegion],
    sources: Counter[str],
) -> Callable[[Sequence[Kernel]], dict[str, Callable[..., Any]]]:
    if device.type == "cpu":
        objects = compiled_objects(job, kind)
        return lambda group: compile_kernels(group, None, objects, sources)
    from perfopt.backends.triton import launch

    labels = kernel_labels(lowered)
    return lambda group: launch.compile_kernels(
        group, device.index or 0, triton_directory(), labels, sources
    )


def kernel_labels(lowered: Mapping[str, LoweredRegion]) -> dict[str, str]:
    """The user's line behind each kernel, as `model.py:12`, by the kernel's name."""
    return {
        call.entry: region.source.split("  ")[0]
        for region in lowered.values()
        for call in region.calls
    }


def dump_kernels(
    folder: Path, stem: str, lowered: Mapping[str, LoweredRegion], kernels: Kernels
) -> None:
    """Write every kernel: a GPU's as files that run alone, a CPU's as operations and as MLIR."""
    labels, text, printed = kernel_labels(lowered), [], {}
    for name, region in lowered.items():
        for kernel in kernels[name]:
            if region.device.type == "cpu":
                text.append(f"# {region.source}\n" * bool(region.source) + describe(kernel))
                printed[kernel.name] = print_kernel(kernel, host_lanes())
                continue
            shown = symbol(kernel.name, labels[kernel.name])
            module = module_text(print_triton(kernel), shown)
            (folder / f"{stem}_{shown}.py").write_text(module)
    if printed:
        (folder / f"{stem}_kernels.txt").write_text("\n".join(text))
        (folder / f"{stem}_kernels.mlir").write_text(print_module(printed, host_has_bf16()))

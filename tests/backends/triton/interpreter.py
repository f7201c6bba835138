"""Triton's interpreter, mended and made strict, for the generated kernels.

Kernels run on CPU tensors without a GPU, an environment variable or a compiler, beside compilations
in the same process. Mended: bf16 (rounded to nearest even, computed in f32) and `libdevice`, whose
functions are those of numpy and torch. Strict: an access outside of the tensors that a launch was
given, a write to one that the kernel only reads, and an element that two programs write, or that
one writes and another reads, are errors; so is a failing device assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

Array = NDArray[Any]


class MemoryFault(Exception):
    """A kernel touched memory that it must not touch, or in an order that is not defined."""


# ---- bf16 ---------------------------------------------------------------------------------------


def _widened(bits: Array) -> Array:
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrowed(values: Array) -> Array:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)


def _cast(builder: Any, source: TensorHandle, type: Any) -> TensorHandle:
    """A conversion by eager's rules, with bf16 as what it is."""
    before, after = source.dtype.scalar, type.scalar
    data = _widened(source.data) if before == tl.bfloat16 else source.data
    if after == tl.bfloat16:
        if before == tl.bfloat16:
            return source
        return TensorHandle(_narrowed(data), after)
    return TensorHandle(data.astype(interpreter._get_np_dtype(type)), after)


# ---- libdevice ----------------------------------------------------------------------------------


def _by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    """A function of torch on arrays, computed in f64 and rounded once."""

    def call(*arrays: Array) -> Array:
        wide = [torch.from_numpy(np.array(a, dtype=np.float64)) for a in arrays]
        return function(*wide).numpy().astype(arrays[0].dtype)

    return call


_NAMES = [
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "rsqrt", "pow",
    "atan2", "hypot",
]  # fmt: skip
LIBRARY: dict[str, Callable[..., Array]] = {n: _by_torch(getattr(torch, n)) for n in _NAMES}
# These are exact, signs of zero and NaN included.
LIBRARY |= {"copysign": np.copysign, "trunc": np.trunc, "fmod": np.fmod, "rint": np.rint}


def _library_call(function: Callable[..., Array]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, tl.tensor))
        arrays = [
            arg.handle.data if isinstance(arg, tl.tensor) else np.array([arg], first_type)
            for first_type in (first.handle.data.dtype,)
            for arg in args
        ]
        result = np.asarray(function(*np.broadcast_arrays(*arrays)))
        scalar = first.dtype.scalar
        shaped = max(
            (arg for arg in args if isinstance(arg, tl.tensor)), key=lambda t: len(t.shape)
        )
        type = tl.block_type(scalar, list(result.shape)) if len(shaped.shape) else scalar
        return tl.tensor(TensorHandle(result, scalar), type)

    return call


# ---- reductions ---------------------------------------------------------------------------------

_FOLDS = {"largest": np.maximum, "smallest": np.minimum, "product": np.multiply}


def _generic_reduce(ops: Any, input: Any) -> Any:
    """Reductions by the functions of generated kernels, which Triton's own walks one by one."""
    (value,) = input
    name = ops.combine_fn.fn.__name__
    data = value.handle.data
    folded = _FOLDS[name].reduce(data, axis=ops.axis, keepdims=ops.keep_dims, dtype=data.dtype)
    return ops.to_tensor(folded, value.dtype)


# ---- memory -------------------------------------------------------------------------------------


class Memory:
    """The tensors of one launch, and which program has touched which of their bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor], written: Sequence[bool]) -> None:
        self.regions = []
        for tensor, may_write in zip(tensors, written, strict=True):
            start = tensor.data_ptr()
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            size = (reach + 1) * tensor.element_size() if tensor.numel() else 0
            owners = np.full(size, -1, np.int64)
            readers = np.full(size, -1, np.int64)
            self.regions.append((start, start + size, may_write, owners, readers))
        self.loads = self.stores = 0

    def touch(self, kind: str, pointers: TensorHandle, mask: TensorHandle | None) -> None:
        """Check the accesses of one operation; raises `MemoryFault`."""
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        addresses = np.asarray(pointers.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)]
        addresses = addresses.reshape(-1).astype(np.int64)
        x, y, z = interpreter.interpreter_builder.grid_idx
        program = x + (y + z * 65536) * 2**31
        left = len(addresses)
        for start, stop, may_write, owners, readers in self.regions:
            inside = addresses[(addresses >= start) & (addresses + width <= stop)] - start
            left -= len(inside)
            if not len(inside):
                continue
            if kind == "store":
                self._store(program, inside, width, may_write, owners, readers)
            else:
                held = owners[inside]
                if ((held >= 0) & (held != program)).any():
                    raise MemoryFault(f"program {program} reads what another writes")
                others = (readers[inside] >= 0) & (readers[inside] != program)
                readers[inside] = np.where(others, -2, program)
        if left:
            raise MemoryFault(f"{left} lanes {kind} out of bounds in program {program}")
        if kind == "store":
            self.stores += width * len(addresses)
        else:
            self.loads += width * len(addresses)

    def _store(
        self, program: int, inside: Array, width: int, may_write: bool, owners: Array,
        readers: Array,
    ) -> None:  # fmt: skip
        if not may_write:
            raise MemoryFault("a buffer that is only read was written")
        if len(np.unique(inside)) < len(inside):
            raise MemoryFault(f"program {program} writes one element by several lanes at once")
        held = owners[inside]
        if ((held >= 0) & (held != program)).any():
            raise MemoryFault(f"programs {held.max()} and {program} write the same element")
        seen = readers[inside]
        if ((seen != -1) & (seen != program)).any():
            raise MemoryFault(f"program {program} writes what another reads")
        for k in range(width):
            owners[inside + k] = program


@contextmanager
def _patched(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def _builder_patches(memory: Memory) -> dict[str, Any]:
    real = InterpreterBuilder
    load, store = real.create_masked_load, real.create_masked_store
    names = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc")
    patches: dict[str, Any] = {f"create_{name}": _cast for name in names}

    def masked_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        memory.touch("load", pointers, mask)
        return load(builder, pointers, mask, *rest)

    def masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.touch("store", pointers, mask)
        return store(builder, pointers, value, mask, *rest)

    def check(builder: Any, condition: Any, message: str) -> None:
        if not np.asarray(condition.data).all():
            raise IndexError(message)

    def to_float(builder: Any, source: Any, type: Any, mode: Any) -> Any:
        return _cast(builder, source, type)

    def integer(builder: Any, source: Any, type: Any, signed: bool) -> Any:
        return _cast(builder, source, type)

    def binary(builder: Any, left: Any, right: Any, function: Any) -> TensorHandle:
        # Triton's own takes the truth value of two scalars for a number of their type.
        result = np.asarray(function(left.data, right.data))
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        wanted = interpreter._get_np_dtype(left.dtype.scalar)
        return TensorHandle(result.astype(wanted, copy=False), left.dtype.scalar)

    return patches | {
        "binary_op": binary, "cast_impl": _cast, "create_fp_to_fp": to_float,
        "create_int_cast": integer,
        "create_assert": check, "create_masked_load": masked_load,
        "create_masked_store": masked_store,
    }  # fmt: skip


_REWRITTEN_CACHE: dict[Any, Any] = {}


def _device_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of one jitted function by another."""
    if function.fn not in _REWRITTEN_CACHE:
        _REWRITTEN_CACHE[function.fn] = InterpretedFunction(function.fn).rewrite()
    return _REWRITTEN_CACHE[function.fn](*args, **kwargs)


_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, *rest: Any) -> None:
    """What Triton does to its tensors, whose 3.6 cannot loop over sizes with numpy 2.4."""
    _patch_lang_tensor(tensor, *rest)
    tensor.__index__ = lambda self: int(self.handle.data.squeeze())


@contextmanager
def _interpreting(memory: Memory) -> Iterator[None]:
    options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    library = {name: _library_call(function) for name, function in LIBRARY.items()}
    # Functions that are called see `tl.core`, which Triton patches for the kernel's module alone.
    modules = type("Modules", (), {"__globals__": {"tl": tl, "core": tl.core}})
    with (
        _patched(InterpreterBuilder, _builder_patches(memory)),
        _patched(interpreter.interpreter_builder, {"options": options}),
        _patched(interpreter, {"_patch_lang_tensor": _patch_tensor}),
        _patched(interpreter.ReduceOps, {"generic_reduce": _generic_reduce}),
        _patched(libdevice, library),
        _patched(JITFunction, {"__call__": _device_call}),
        _patched(InterpretedFunction, {"__call__": _device_call}),
        np.errstate(all="ignore"),
    ):
        scope = interpreter._patch_lang(modules)
        try:
            yield
        finally:
            scope.restore()


def interpret(
    function: JITFunction[Any],
    grid: int,
    tensors: Sequence[torch.Tensor],
    written: Sequence[bool],
    sizes: Sequence[int],
    constants: Mapping[str, int],
) -> Memory:
    """Run a kernel over `grid` programs; raises `MemoryFault`, or `IndexError` where it asserts.

    The first parameters are `tensors`, of which the kernel may write those so marked, then `sizes`.
    """
    memory = Memory(tensors, written)
    kernel = InterpretedFunction(function.fn)
    with _interpreting(memory):
        try:
            kernel[(grid,)](*tensors, *sizes, **constants)
        except interpreter.InterpreterError as error:
            cause = error.__cause__
            raise cause if isinstance(cause, (MemoryFault, IndexError)) else error from cause
    return memory

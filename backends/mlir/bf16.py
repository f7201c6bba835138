"""Rounding f32 to the bits of bf16, to nearest even, as an MLIR function that is inlined."""

from __future__ import annotations

from perfopt.backends.mlir.expressions import AVX512_LANES, Maker, V

NAME = "to_bf16"
_DENORMAL = 0x20  # the class of `vfpclassps`


def to_bf16(m: Maker, x: V, native: bool) -> V:
    """`x` rounded; by the instruction of AVX512-BF16 where `native` and a vector is as long.

    The instruction flushes denormals, which are looked for and rounded in integers.
    """
    if not native or m.lanes != AVX512_LANES:
        return _in_integers(m, x)
    ty = m.type("f32")
    m.lines.append(f"%denormal = llvm.mlir.constant({_DENORMAL} : i32) : i32")
    tiny = m.emit_as(
        f'llvm.call_intrinsic "llvm.x86.avx512.fpclass.ps.512"({x.name}, %denormal) : '
        f"({ty}, i32) -> {m.type('i1')}",
        "i1",
    )
    usual = m.emit_as(
        f'llvm.call_intrinsic "llvm.x86.avx512bf16.cvtneps2bf16.512"({x.name}) : '
        f"({ty}) -> {m.type('bf16')}",
        "bf16",
    )
    bits = m.emit_as(f"arith.bitcast {usual.name} : {m.type('bf16')} to {m.type('i16')}", "i16")
    return m.unless(tiny, bits, lambda: _in_integers(m, x))


def _in_integers(m: Maker, x: V) -> V:
    bits, i32 = x.bits(), m.type("i32")

    def high(value: V) -> V:
        return m.emit(f"arith.shrui {value.name}, {m.integer(16, 'i32').name}", "i32")

    rounded = bits + ((high(bits) & m.integer(1, "i32")) + m.integer(0x7FFF, "i32"))
    ordered = x.equals_value(x)
    top = high(ordered.select(rounded, m.integer(0x7FC00000, "i32")))
    return m.emit_as(f"arith.trunci {top.name} : {i32} to {m.type('i16')}", "i16")

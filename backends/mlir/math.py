"""Elementary functions of generated CPU kernels, as MLIR functions that are inlined.

In f32 the functions that decide the speed of models (`exp`, `log`, `erf`, `tanh`, `sigmoid`) are
polynomials on f32 vectors. The others widen to f64 and round once, so that simple formulas are
exact enough. In f64 the C library computes every lane. `ULP` states the largest error in f32, in
units in the last place of the true result. The polynomials are minimax fits (Remez, 40 digits);
NaN, infinities, signed zeros and denormals come out as C99 says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from perfopt.backends.mlir.bf16 import NAME as TO_BF16
from perfopt.backends.mlir.bf16 import to_bf16
from perfopt.backends.mlir.expressions import Maker, V

LN2, LOG2E, PI = math.log(2), 1 / math.log(2), math.pi
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6
SHIFTER64 = 1.5 * 2**52  # adding it rounds to an integer in the low bits

_EXP32 = (1.0, 1.0, 0.4999999305, 0.1666651479, 0.04166845678, 0.00836941886, 0.001381314515)
_EXP2_32 = (1.000000076, 0.693146954, 0.2402209838, 0.05550725535, 0.009676688193,
            0.00132753232)  # fmt: skip
_EXP2_LONG32 = (1.0, 0.6931472172, 0.2402265292, 0.05550306274, 0.009617674421, 0.001340818351,
                0.0001559870659)  # fmt: skip
_LOG32 = (0.3333331254, -0.2500000952, 0.2000212341, -0.16668005, 0.1421945374, -0.1240534342,
          0.1188869586, -0.1167749712, 0.06747709938)  # fmt: skip
_ERF32 = (0.12837915, -0.3761249646, 0.1128184596, -0.02676772011, 0.004994830596,
          -0.0005999407198)  # fmt: skip
# log2(erfc(x)) for x from 0.84 to 4
_LOG2_ERFC = (-0.0001354931123, -1.627514627, -0.9181849093, -0.1509072936, 0.03254259435,
              -0.00451233052, 0.0002953470999)  # fmt: skip
_TANH32 = (-0.3333327806, 0.1333133104, -0.05373000972, 0.02060618347, -0.00566698347)
_EXP64 = (1.0, 1.0, 0.4999999999999814911, 0.16666666666607011547, 0.04166666666825816551,
          0.0083333333731698725729, 0.0013888888493327318035, 0.00019841181812231749201,
          2.4801945676922734269e-5, 2.7636548255842969819e-6, 2.747518709838818308e-7)  # fmt: skip
_LOG64 = (0.6666666666666734622, 0.39999999999413123687, 0.2857142874276693413,
          0.22222198531044164146, 0.18183566673894883681, 0.15313986650304823209,
          0.14796625770517420323)  # fmt: skip
_SIN64 = (-0.16666666666666627687, 0.0083333333333212852702, -0.00019841269828870004936,
          2.7557313355977011391e-6, -2.5050704034320929547e-8,
          1.5893583631244346753e-10)  # fmt: skip
_COS64 = (0.041666666666666591058, -0.0013888888888872598161, 2.4801587288491707309e-5,
          -2.755731405647064262e-7, 2.0875681865774952822e-9,
          -1.1357447975478031445e-11)  # fmt: skip
_ATAN64 = (-0.3333333333326040181, 0.19999999982719714412, -0.14285712873709553956,
           0.11111054387246899742, -0.090896138593194277398, 0.076742983638692026971,
           -0.065100818265653067556, 0.050367503883912791848,
           -0.025463577063774218994)  # fmt: skip
# erfc(x) * exp(x * x) * (1 + 2 * x) in t = (x - 4) / (x + 4), for x from 0 to 10.5
_ERFC64 = (1.2329951186120604199, -0.13962111720652515993, 0.015379654967599325583,
           0.068097082779426879586, -0.10103914752839841192, 0.093732164283434670984,
           -0.066329875838744105038, 0.037174155332946676126, -0.016194340977237773413,
           0.0050046251994751613126, -0.00079725327264764915529, -0.00017493978826499009283,
           0.00024212582751606678302, 4.4311167619027013587e-5)  # fmt: skip


# ---- f32 ----------------------------------------------------------------------------------------


def _exp32(m: Maker, x: V) -> V:
    x = x.at_least(-104.0).at_most(89.0)
    k = (x * LOG2E).round()
    r = m.fma(k, -LN2_LOW, m.fma(k, -LN2_HIGH, x))
    return m.scaled(m.polynomial(r, _EXP32), k)


def _exp2_32(m: Maker, x: V) -> V:
    x = x.at_least(-151.0).at_most(129.0)
    k = x.round()
    return m.scaled(m.polynomial(x - k, _EXP2_LONG32), k)


def _log32(m: Maker, x: V) -> V:
    tiny = x < 1.17549435e-38
    wide = tiny.select(x * 2.0**24, x)
    bits = wide.bits() - m.integer(0x3F3504F3, "i32")  # sqrt(1/2): mantissas around 1
    k = bits >> 23
    f = (wide.bits() - (k << 23)).floats() - 1.0
    e = k.to_float() - tiny.select(m.number(24.0), m.number(0.0))
    square = f * f
    low = m.fma(square * f, m.polynomial(f, _LOG32), e * LN2_LOW)
    result = m.fma(e, LN2_HIGH, f + m.fma(square, -0.5, low))
    result = (x < math.inf).select(result, x)  # infinity and NaN
    result = x.equals(0.0).select(m.number(-math.inf), result)
    return (x < 0.0).select(m.number(math.nan), result)


def _erf32(m: Maker, x: V) -> V:
    a = x.abs()
    square = x * x
    near = m.fma(x, m.polynomial(square, _ERF32), x)
    q = m.polynomial(a.at_most(4.0), _LOG2_ERFC)
    k = q.round()
    far = (1.0 - m.scaled_little(m.polynomial(q - k, _EXP2_32), k)).copysign(x)
    return a.less_or_nan(0.92).select(near, far)


def _tanh32(m: Maker, x: V) -> V:
    a = x.abs().at_most(9.2)
    square = x * x
    near = m.fma(x * square, m.polynomial(square, _TANH32), x)
    k = (a * (2 * LOG2E)).round()
    r = m.fma(k, -LN2_LOW, m.fma(k, -LN2_HIGH, a + a))
    far = 1.0 - 2.0 / (m.scaled_little(m.polynomial(r, _EXP32), k) + 1.0)
    return a.less_or_nan(0.625).select(near, far).copysign(x)  # -0.0 too


def _sigmoid32(m: Maker, x: V) -> V:
    e = _exp32(m, -x.abs())
    below = x < 0.0
    total = 1.0 + e
    lost = e - (total - 1.0)
    # One step of Newton on the reciprocal, which also makes up for what the sum lost.
    part = 1.0 / total
    part = m.fma(part, m.fma(-part, lost, m.fma(-part, total, 1.0)), part)
    return below.select(e * part, part)


# ---- f32 by way of f64 --------------------------------------------------------------------------


def _exp64(m: Maker, x: V) -> V:
    """exp for results that f32 holds or rounds to 0 or infinity."""
    x = x.at_least(-700.0).at_most(700.0)
    shifted = m.fma(x, LOG2E, SHIFTER64)
    k = shifted - SHIFTER64
    r = m.fma(k, -1.9082149292705877e-10, m.fma(k, -0.6931471803691238, x))
    scale = ((shifted.bits() << 52) + m.integer(0x3FF0000000000000, "i64")).floats()
    return m.polynomial(r, _EXP64) * scale


def _log64(m: Maker, x: V) -> V:
    """log of what f32 holds: no denormals of f64."""
    bits = x.bits() - m.integer(0x3FE6A09E667F3BCD, "i64")
    k = bits >> 52
    f = (x.bits() - (k << 52)).floats()
    magic = m.integer(0x4338000000000000, "i64")
    e = (k + magic).floats() - SHIFTER64
    s = (f - 1.0) / (f + 1.0)
    square = s * s
    result = m.fma(e, LN2, m.fma(s * square, m.polynomial(square, _LOG64), s + s))
    result = (x < math.inf).select(result, x)
    result = x.equals(0.0).select(m.number(-math.inf, "f64"), result)
    return (x < 0.0).select(m.number(math.nan, "f64"), result)


def _near_zero(m: Maker, x: V, u: V, factors: tuple[float, ...], far: V) -> V:
    """`x` times a polynomial in `u` where x is close to 0, which keeps its sign; else `far`."""
    return (x.abs() < 1e-3).select(x * m.polynomial(u, factors), far)


def _expm1(m: Maker, x: V) -> V:
    return _near_zero(m, x, x, (1.0, 1 / 2, 1 / 6, 1 / 24), _exp64(m, x) - 1.0)


def _log1p(m: Maker, x: V) -> V:
    return _near_zero(m, x, x, (1.0, -1 / 2, 1 / 3, -1 / 4), _log64(m, x + 1.0))


def _sinh(m: Maker, x: V) -> V:
    e = _exp64(m, x)
    return _near_zero(m, x, x * x, (1.0, 1 / 6, 1 / 120), (e - 1.0 / e) * 0.5)


def _cosh(m: Maker, x: V) -> V:
    e = _exp64(m, x)
    return (e + 1.0 / e) * 0.5


def _asinh(m: Maker, x: V) -> V:
    a = x.abs()
    far = _log64(m, a + m.fma(a, a, 1.0).sqrt()).copysign(x)
    return _near_zero(m, x, x * x, (1.0, -1 / 6, 3 / 40), far)


def _acosh(m: Maker, x: V) -> V:
    result = _log64(m, x + ((x - 1.0) * (x + 1.0)).sqrt())
    return (x < 1.0).select(m.number(math.nan, "f64"), result)


def _atanh(m: Maker, x: V) -> V:
    far = _log64(m, (1.0 + x) / (1.0 - x)) * 0.5
    return _near_zero(m, x, x * x, (1.0, 1 / 3, 1 / 5), far)


def _sine_and_cosine(m: Maker, x: V) -> tuple[V, V, V]:
    """The sine and cosine of what is left of quarter turns, and the number of these."""
    shifted = m.fma(x, 2 / PI, SHIFTER64)
    k = shifted - SHIFTER64
    r = m.fma(k, -6.123233995736766e-17, m.fma(k, -PI / 2, x))
    r = k.equals(0.0).select(x, r)  # keeps the sign of zero
    u = r * r
    sine = r * m.fma(u, m.polynomial(u, _SIN64), 1.0)  # a product keeps -0.0
    cosine = m.fma(u * u, m.polynomial(u, _COS64), m.fma(u, -0.5, 1.0))
    return sine, cosine, shifted.bits()


def _turned(m: Maker, x: V, ahead: int) -> V:
    sine, cosine, turns = _sine_and_cosine(m, x)
    turns = turns + m.integer(ahead, "i64")
    one = m.integer(1, "i64")
    value = (turns & one).is_integer(1).select(cosine, sine)
    negative = ((turns >> 1) & one).is_integer(1)
    return negative.select(-value, value)


def _tan(m: Maker, x: V) -> V:
    sine, cosine, turns = _sine_and_cosine(m, x)
    odd = (turns & m.integer(1, "i64")).is_integer(1)
    return odd.select(-cosine, sine) / odd.select(sine, cosine)


HUGE = 1e9  # the whole quarter turns of larger angles do not fit the reduction


def _angle(core: Callable[[Maker, V], V], library: str) -> Callable[[Maker, V], V]:
    """A function of an angle, by the C library where a lane holds a huge one."""

    def function(m: Maker, x: V) -> V:
        return m.unless(x.abs() > HUGE, core(m, x), lambda: m.by_lane(library, [x]))

    return function


def _atan_ratio(m: Maker, y: V, x: V) -> V:
    """atan(y / x) for y and x that are not negative."""
    steep, middle = y > x * 2.414213562373095, y > x * 0.41421356237309503
    top = steep.select(-x, middle.select(y - x, y))
    bottom = steep.select(y, middle.select(y + x, x))
    start = steep.select(m.number(PI / 2, "f64"), m.number(0.0, "f64"))
    start = (middle & ~steep).select(m.number(PI / 4, "f64"), start)
    z = top / bottom
    u = z * z
    return start + m.fma(z * u, m.polynomial(u, _ATAN64), z)


def _atan(m: Maker, x: V) -> V:
    return _atan_ratio(m, x.abs(), m.number(1.0, "f64")).copysign(x)


def _asin(m: Maker, x: V) -> V:
    return _atan_ratio(m, x.abs(), ((1.0 - x) * (1.0 + x)).sqrt()).copysign(x)


def _acos(m: Maker, x: V) -> V:
    angle = _atan_ratio(m, ((1.0 - x) * (1.0 + x)).sqrt(), x.abs())
    return (x < 0.0).select(PI - angle, angle)


def _atan2(m: Maker, y: V, x: V) -> V:
    up, side = y.abs(), x.abs()
    angle = _atan_ratio(m, up, side)
    both = up.equals(0.0) & side.equals(0.0)
    angle = both.select(m.number(0.0, "f64"), angle)
    both = up.equals(math.inf) & side.equals(math.inf)
    angle = both.select(m.number(PI / 4, "f64"), angle)
    left = m.number(1.0, "f64").copysign(x) < 0.0  # x may be -0.0
    return left.select(PI - angle, angle).copysign(y)


def _erfc(m: Maker, x: V) -> V:
    a = x.abs().at_most(11.0)
    t = (a - 4.0) / (a + 4.0)
    value = m.polynomial(t, _ERFC64) * _exp64(m, -(a * a)) / m.fma(a, 2.0, 1.0)
    return (x < 0.0).select(2.0 - value, value)


def _pow(m: Maker, x: V, y: V) -> V:
    a = x.abs()
    result = _exp64(m, y * _log64(m, a))
    # Beyond what an f32 holds the exponential was cut off: 700 and -700 stand for its ends.
    whole = y.floor().equals_value(y)
    half = y * 0.5
    odd = whole & ~half.floor().equals_value(half)
    negative = m.number(1.0, "f64").copysign(x) < 0.0
    result = (negative & odd).select(-result, result)
    bad = (x < 0.0) & ~whole & (a < math.inf)
    result = bad.select(m.number(math.nan, "f64"), result)
    one = m.number(1.0, "f64")
    result = (a.equals(1.0) & y.abs().equals(math.inf)).select(one, result)
    return (x.equals(1.0) | y.equals(0.0)).select(one, result)


def _hypot(m: Maker, x: V, y: V) -> V:
    endless = x.abs().equals(math.inf) | y.abs().equals(math.inf)
    return endless.select(m.number(math.inf, "f64"), m.fma(x, x, y * y).sqrt())


_FAST: dict[str, Callable[..., V]] = {
    "exp": _exp32, "exp2": _exp2_32, "log": _log32, "erf": _erf32, "tanh": _tanh32,
    "sigmoid": _sigmoid32, "rsqrt": lambda m, x: 1.0 / x.sqrt(),
    "fmod": lambda m, x, y: m.by_lane("fmodf", [x, y]),
}  # fmt: skip
_WIDE: dict[str, Callable[..., V]] = {
    "expm1": _expm1, "log1p": _log1p,
    "log2": lambda m, x: _log64(m, x) * LOG2E,
    "log10": lambda m, x: _log64(m, x) * (1 / math.log(10)),
    "sin": _angle(lambda m, x: _turned(m, x, 0), "sin"),
    "cos": _angle(lambda m, x: _turned(m, x, 1), "cos"), "tan": _angle(_tan, "tan"),
    "asin": _asin, "acos": _acos, "atan": _atan, "sinh": _sinh, "cosh": _cosh, "asinh": _asinh,
    "acosh": _acosh, "atanh": _atanh, "erfc": _erfc, "pow": _pow, "atan2": _atan2, "hypot": _hypot,
}  # fmt: skip
FUNCTIONS = frozenset(_FAST) | frozenset(_WIDE)
# Internal too, or the engine compiles a copy and a wrapper of every function besides.
_INLINED = '{llvm.linkage = #llvm.linkage<internal>, passthrough = ["alwaysinline"]}'
BINARY = frozenset({"pow", "atan2", "hypot", "fmod"})
# Units in the last place, in f32; 1 for what is computed in f64 and rounded.
ULP = dict.fromkeys(_WIDE, 1.0) | dict.fromkeys(_FAST, 2.0) | {"fmod": 0.0}


def _in_f64(m: Maker, name: str, args: list[V]) -> V:
    if name == "rsqrt":
        return 1.0 / args[0].sqrt()
    if name == "sigmoid":
        e = m.by_lane("exp", [-args[0].abs()])
        return (args[0] < 0.0).select(e, m.number(1.0, "f64")) / (1.0 + e)
    return m.by_lane(name, args)


def function_name(name: str, type: str) -> str:
    """The MLIR function of a function and a type: `exp_v16f32` for vectors, `exp_f32`."""
    if not type.startswith("vector"):
        return f"{name}_{type}"
    count, element = type[len("vector<") : -1].split("x")
    return f"{name}_v{count}{element}"


def definitions(wanted: Iterable[tuple[str, str]], native_bf16: bool = False) -> str:
    """The MLIR functions of these functions and types, with what they need of the C library.

    With `native_bf16` the machine's AVX512-BF16 is used.
    """
    library: set[str] = set()
    parts = []
    for name, type in sorted(set(wanted)):
        args = ("%x", "%y") if name in BINARY else ("%x",)
        m = Maker.of(type)
        values = [m.argument(arg) for arg in args]
        if name == TO_BF16:
            result = to_bf16(m, values[0], native_bf16)
        elif m.element == "f64":
            result = _in_f64(m, name, values)
        elif name in _FAST:
            result = _FAST[name](m, *values)
        else:
            wide = _WIDE[name](m, *(value.widened() for value in values))
            result = wide.rounded()
        library |= m.library
        given = ", ".join(f"{arg}: {type}" for arg in args)
        body = "".join(f"  {line}\n" for line in m.lines)
        parts.append(
            f"func.func private @{function_name(name, type)}({given}) -> "
            f"{m.type(result.kind)} attributes {_INLINED} {{\n{body}"
            f"  return {result.name} : {m.type(result.kind)}\n}}\n"
        )
    declared = []
    for call in sorted(library):
        ty = "f32" if call == "fmodf" else "f64"
        count = 2 if call in BINARY or call == "fmodf" else 1
        declared.append(f"llvm.func @{call}({', '.join([ty] * count)}) -> {ty}\n")
    return "".join(declared + parts)

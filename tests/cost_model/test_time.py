"""Seconds of products, attention, convolutions and streams: golden figures and properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from perfopt.cost_model.attention import attention
from perfopt.cost_model.convolution import convolution
from perfopt.cost_model.device import Device, device_named, host_device, known_devices
from perfopt.cost_model.efficiency import chain, constants, origin, tables
from perfopt.cost_model.estimate import Estimate
from perfopt.cost_model.gemm import gemm
from perfopt.cost_model.images import MODES, images
from perfopt.cost_model.steps import Step, accumulate, backward, forward
from perfopt.cost_model.streaming import (
    gather,
    normalisation,
    pointwise,
    scatter,
    softmax,
    strided_bytes,
)
from perfopt.cost_model.training import Decoder, step_seconds

MIB = 1 << 20
# What a calibration measured of a machine: a copy that got faster as it got larger among them.
COPIES = ((65536.0, 93e9), (262144.0, 158e9), (16777216.0, 123e9), (268435456.0, 42e9))
DEVICES = [*known_devices(), host_device(), replace(host_device(), copies=COPIES)]
devices = st.sampled_from(DEVICES)
Op = Callable[[Device], Estimate]
HALF = {"dtype": "float16"}
OPS: dict[str, Op] = {
    "mm 16 x 4096 x 4096": lambda d: gemm(d, 16, 4096, 4096, **HALF),
    "mm 1024 x 1024 x 1024": lambda d: gemm(d, 1024, 1024, 1024, **HALF),
    "mm 8192 x 8192 x 8192": lambda d: gemm(d, 8192, 8192, 8192, **HALF),
    "mm 64 x 64 x 65536": lambda d: gemm(d, 64, 64, 65536, **HALF),
    "bmm 96 x 512 x 64 x 512": lambda d: gemm(d, 512, 64, 512, batch=96, **HALF),
    "mm 2048 x 2048 x 2048 f32": lambda d: gemm(d, 2048, 2048, 2048, dtype="float32"),
    "attention 4 x 16 x 2048 x 128": lambda d: attention(d, 4, 16, 4, 2048, 2048, 128, **HALF),
    "  backward": lambda d: attention(d, 4, 16, 4, 2048, 2048, 128, backward=True, **HALF),
    "convolution 3 x 3": lambda d: convolution(d, 32, 128, 128, (28, 28), (3, 3), **HALF),
    "  depthwise": lambda d: convolution(d, 32, 128, 128, (28, 28), (3, 3), groups=128, **HALF),
    "pointwise 1 MiB": lambda d: pointwise(d, MIB),
    "pointwise 1 GiB": lambda d: pointwise(d, 1024 * MIB),
    "layer norm 16384 x 4096": lambda d: normalisation(d, 16384, 4096, 2.0),
    "softmax 16384 x 4096": lambda d: softmax(d, 16384, 4096, 2.0),
    "gather 32768 x 2 KiB": lambda d: gather(d, 32768, 2048),
}


def test_golden() -> None:
    names = ("V100", "A100", "RTX 4090", "H100", "B200", "MI300X", "i9-10940X")
    lines = ["microseconds".ljust(29) + "".join(name.rjust(10) for name in names)]
    for op, price in OPS.items():
        cells = []
        for name in names:
            found = price(device_named(name))
            cells.append(f"{float(found.seconds) * 1e6:9.1f}{str(found.bound)[0]}")
        lines.append(op.ljust(29) + "".join(cells))
    assert_expected_inline(
        "\n".join(lines) + "\n",
        """\
microseconds                       V100      A100  RTX 4090      H100      B200    MI300X i9-10940X
mm 16 x 4096 x 4096               58.3m     27.2m     47.7m     14.8m      9.1m     16.0m    407.6m
mm 1024 x 1024 x 1024             29.3c     17.3c     19.7c      5.9c      3.8l     12.4l    768.9c
mm 8192 x 8192 x 8192          10041.3c   3994.5c   7479.9c   1343.4c    670.6c   2170.2c 391527.6c
mm 64 x 64 x 65536                33.3m     17.7m     26.4m     10.6m      8.6l     14.3l    335.2c
bmm 96 x 512 x 64 x 512          103.3m     45.9m     87.6m     24.3m     12.3m     26.1m   1201.1c
mm 2048 x 2048 x 2048 f32       1309.5c   1013.5c    249.9c    354.4c    351.3c    170.5c   6128.1c
attention 4 x 16 x 2048 x 128   1050.0c    443.9c    803.1c    144.8c     77.4c    120.1c  43571.5c
  backward                      3197.7c   1331.1c   2443.7c    382.4c    190.5c    338.4c 135870.5c
convolution 3 x 3                144.8c     55.3c    108.7c     22.9m     12.5c     39.4c   2933.2c
  depthwise                       44.1m     18.6m     30.0m     11.6m      5.0m      9.3m    193.6m
pointwise 1 MiB                    3.0l      2.4l      2.8l      2.3l      1.6l      2.2l      3.8m
pointwise 1 GiB                 1408.7m    593.0m   1172.6m    368.1m    161.4m    255.2m  11436.1m
layer norm 16384 x 4096          534.9m    173.7m    319.4m    102.6m     44.6m     85.0m   2889.5m
softmax 16384 x 4096             422.2m    172.7m    318.4m     99.2m     46.2m     69.0m   2940.8m
gather 32768 x 2 KiB             353.7m    149.8m    294.6m     93.5m     41.3m     65.3m   1785.4m
""",
    )


@pytest.mark.parametrize("op", OPS)
@given(device=devices)
def test_seconds_are_their_parts(op: str, device: Device) -> None:
    found = OPS[op](device)
    parts = [float(x) for x in (found.compute, found.memory, found.latency, found.launch)]
    assert all(part >= 0 for part in parts) and np.isfinite(parts).all()
    assert max(parts[:2]) * (1 - 1e-9) <= float(found.seconds) <= sum(parts) * 1.3
    assert str(found.bound) in ("compute", "memory", "latency", "launch")


aligned = st.integers(1, 128).map(lambda n: 8 * n)


@given(
    device=devices, dtype=st.sampled_from(["bfloat16", "float16", "float32", "float8"]),
    sizes=st.tuples(aligned, aligned, aligned, st.integers(1, 64)), axis=st.integers(0, 3),
    more=st.integers(1, 4096),
)  # fmt: skip
def test_larger_products_never_take_less(
    device: Device, dtype: str, sizes: tuple[int, ...], axis: int, more: int
) -> None:
    m, n, k, batch = (
        np.array([size, size + (more if place == axis else 0)]) for place, size in enumerate(sizes)
    )
    small, large = gemm(device, m, n, k, batch=batch, dtype=dtype).seconds
    assert small <= large * (1 + 1e-9)


@given(
    device=devices, sizes=st.tuples(*[st.integers(1, 64)] * 2, *[st.integers(1, 4096)] * 2),
    axis=st.integers(0, 3), more=st.integers(1, 2048), causal=st.booleans(),
)  # fmt: skip
def test_longer_attention_never_takes_less(
    device: Device, sizes: tuple[int, ...], axis: int, more: int, causal: bool
) -> None:
    batch, heads, queries, extra = (
        np.array([size, size + (more if place == axis else 0)]) for place, size in enumerate(sizes)
    )
    small, large = attention(
        device, batch, heads, 1, queries, queries + extra, 128, causal=causal
    ).seconds
    assert small <= large * (1 + 1e-9)


@given(device=devices, size=st.floats(0, 1e11), more=st.floats(0, 1e11))
def test_more_bytes_never_take_less(device: Device, size: float, more: float) -> None:
    small, large = pointwise(device, np.array([size, size + more])).seconds
    assert small <= large * (1 + 1e-9)


@pytest.mark.parametrize("price", [normalisation, softmax])
@given(
    device=devices, rows=st.integers(1, 1 << 20), width=st.integers(1, 1 << 15),
    more=st.integers(0, 1 << 15), rather=st.booleans(),
)  # fmt: skip
def test_more_rows_and_wider_ones_never_take_less(
    price: Callable[..., Estimate], device: Device, rows: int, width: int, more: int, rather: bool
) -> None:
    many = np.array([rows, rows + more * rather])
    wide = np.array([width, width + more * (not rather)])
    small, large = price(device, many, wide, 4.0).seconds
    assert small <= large * (1 + 1e-9)


def faster(device: Device, what: str, factor: float) -> Device:
    if what == "peaks":
        peaks = {name: peak * factor for name, peak in device.peaks.items()}
        rates = {name: rate * factor for name, rate in device.vector.items()}
        return replace(device, peaks=MappingProxyType(peaks), vector=MappingProxyType(rates))
    return replace(device, **{what: getattr(device, what) * factor})


@pytest.mark.parametrize("op", OPS)
@given(
    device=devices, what=st.sampled_from(["peaks", "memory_bandwidth", "clock"]),
    factor=st.floats(1, 8),
)  # fmt: skip
def test_a_faster_device_is_never_slower(op: str, device: Device, what: str, factor: float) -> None:
    slow, fast = OPS[op](device), OPS[op](faster(device, what, factor))
    assert float(fast.seconds) <= float(slow.seconds) * (1 + 1e-9)


def test_shapes_broadcast_and_agree_with_one_at_a_time() -> None:
    device = device_named("h100")
    m, n = np.array([[1], [64], [4096]]), np.array([64, 1000])
    found = gemm(device, m, n, 512, batch=np.array([1, 3]))
    assert found.seconds.shape == (3, 2) == found.bound.shape
    for row in range(3):
        for column in range(2):
            one = gemm(device, m[row, 0], n[column], 512, batch=(1, 3)[column])
            assert one.seconds == found.seconds[row, column]


@given(device=devices)
def test_nothing_costs_a_launch(device: Device) -> None:
    for found in (
        gemm(device, 0, 64, 64), gemm(device, 64, 64, 0), pointwise(device, 0),
        gather(device, 0, 8), softmax(device, 0, 64, 4.0), normalisation(device, 64, 0, 4.0),
        attention(device, 0, 8, 8, 128, 128, 64), attention(device, 1, 8, 8, 0, 0, 64),
        attention(device, 1, 0, 0, 128, 128, 64), convolution(device, 0, 8, 8, (4, 4), (3, 3)),
    ):  # fmt: skip
        assert 0 <= float(found.seconds) < 1e-3 and np.isfinite(float(found.seconds))


def test_unaligned_rows_take_longer() -> None:
    device = device_named("a100")
    plain = gemm(device, 4096, 4096, 4096)
    assert gemm(device, 4096, 4096, 4096, alignment=2).seconds > plain.seconds


def test_fewer_keys_in_a_window_take_less() -> None:
    device = device_named("h100")
    whole = attention(device, 1, 32, 8, 16384, 16384, 128)
    assert attention(device, 1, 32, 8, 16384, 16384, 128, window=1024).seconds < whole.seconds / 3
    assert attention(device, 1, 32, 8, 16384, 16384, 128, causal=False).seconds > whole.seconds


def test_bounds() -> None:
    device = device_named("h100")
    assert gemm(device, 8192, 8192, 8192).bound == "compute"
    assert gemm(device, 1, 16384, 16384).bound == "memory"
    assert gemm(device, 1, 32, 32).bound == "launch"
    assert pointwise(device, 1 << 30).bound == "memory"
    assert pointwise(device, 4096).bound == "launch"


def test_convolution_directions_and_orders() -> None:
    device = device_named("a100")
    shape = (32, 256, 256, (14, 14), (3, 3))
    plain = convolution(device, *shape, dtype="float16")
    last = convolution(device, *shape, dtype="float16", channels_last=True)
    assert last.seconds < plain.seconds
    for direction in ("operand", "weight"):
        assert convolution(device, *shape, direction=direction).seconds > 0
    with pytest.raises(ValueError, match="'back'; allowed: forward, operand, weight"):
        convolution(device, *shape, direction="back")


def test_scatter_and_strides() -> None:
    device = device_named("a100")
    assert scatter(device, 1e6, 64, add=True).seconds > scatter(device, 1e6, 64).seconds
    assert float(gather(device, 1e6, 1).memory) > float(pointwise(device, 2e6).memory)
    assert strided_bytes(device, 100, 4, np.array([1, 2, 8, 100])).tolist() == [
        400, 800, 3200, 3200,
    ]  # fmt: skip


def test_every_device_has_every_constant() -> None:
    for device in DEVICES:
        for section in (
            "gemm.matrix",
            "gemm.vector",
            "gemm.cpu",
            "attention",
            "streaming",
            "convolution",
        ):
            every = set(constants(section, device_named("a100"))) - {"batched_tiles"}
            assert every <= set(constants(section, device)) | {"float8_share", "float16_share"}
            assert origin(section, device) in chain(device)
    assert chain(device_named("h200"))[:2] == ("H200-SXM-141GB", "sm_90")
    assert origin("gemm.matrix", device_named("l40s")) == "L40S"
    assert origin("attention", device_named("a10")) == "sm_80"
    assert set(tables()["like"]) & {device.arch for device in DEVICES}


def test_steps() -> None:
    device = device_named("v100")
    product = Step("product", (1.0, 512.0, 512.0, 512.0), "bias", weights=512.0 * 513)
    assert backward(device, product) > 1.5 * forward(device, product)
    assert accumulate(device, product) > 0 == accumulate(device, Step("view"))
    assert forward(device, Step("host")) == backward(device, Step("view")) == 0
    added = Step("pointwise", (1e6, 3.0), "add")
    assert backward(device, added) == 0 < forward(device, added)
    copied = replace(product, copied=1e6)
    assert forward(device, copied) > forward(device, product)


def test_a_training_step_is_bound_by_slow_adapters() -> None:
    device, model = device_named("a100"), Decoder(4096, 4, 32, 50368)
    one = step_seconds(device, model, 2048, 1, 1, checkpointing=False)
    again = step_seconds(device, model, 2048, 1, 1, checkpointing=True)
    slow = step_seconds(device, model, 2048, 1, 16, checkpointing=False, nodes=2, nic=1e8)
    assert one < again < slow


def test_images() -> None:
    device = device_named("rtx 4090")
    eager, compiled = (images(device, 4e9, 11e6, 256, mode=mode) for mode in MODES[:2])
    assert compiled < eager < images(device, 4e9, 11e6, 256, mode="training")
    with pytest.raises(ValueError, match="'fast'; allowed: eager, compiled"):
        images(device, 1, 1, 1, mode="fast")

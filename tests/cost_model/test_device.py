"""Devices: names, sources, arithmetic, a user's own file, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfopt.cost_model.device import (
    Device,
    DeviceFileError,
    UnknownDeviceError,
    device_named,
    host_device,
    known_devices,
)

each_device = pytest.mark.parametrize("device", known_devices(), ids=lambda d: d.name)
# FLOP per clock and core of dense matrix products that accumulate in the usual type; "half" marks
# the GeForce cards, whose tensor cores run at half rate when they accumulate in float32.
MATRIX = {
    "sm_70": {"float16": 1024},
    "sm_75": {"float16": 1024, "int8": 2048},
    "sm_80": {"float16": 2048, "bfloat16": 2048, "tf32": 1024, "float64": 128, "int8": 4096},
    "sm_86": {"float16": 1024, "bfloat16": 1024, "tf32": 512, "int8": 2048},
    "sm_86/half": {"float16": 512, "bfloat16": 512, "tf32": 256, "int8": 2048,
                   "float16/float16": 1024},
    "sm_89": {"float16": 1024, "bfloat16": 1024, "tf32": 512, "float8": 2048, "int8": 2048},
    "sm_89/half": {"float16": 512, "bfloat16": 512, "tf32": 256, "float8": 1024, "int8": 2048,
                   "float16/float16": 1024, "float8/float16": 2048},
    "sm_90": {"float16": 4096, "bfloat16": 4096, "tf32": 2048, "float8": 8192, "int8": 8192},
    "sm_100": {"float16": 8192, "bfloat16": 8192, "tf32": 4096, "float8": 16384, "float4": 32768},
    "sm_103": {"float16": 8192, "bfloat16": 8192, "tf32": 4096, "float8": 16384},
    "sm_120": {"float16": 1024, "bfloat16": 1024, "tf32": 512, "float8": 2048, "float4": 4096},
    "sm_120/half": {"float16": 512, "bfloat16": 512, "tf32": 256, "float8": 1024, "float4": 4096,
                    "float16/float16": 1024},
    "gfx908": {"float16": 1024, "bfloat16": 512, "float32": 256},
    "gfx90a": {"float16": 1024, "bfloat16": 1024, "float32": 256, "float64": 256},
    "gfx942": {"float16": 2048, "bfloat16": 2048, "tf32": 1024, "float8": 4096, "float64": 256},
    "gfx950": {"float16": 4096, "bfloat16": 4096, "float8": 8192, "float4": 16384, "float64": 128},
}  # fmt: skip
# FLOP per clock and core of float32 and float64 in vector lanes.
VECTOR = {
    "sm_60": (128, 64), "sm_61": (256, 8), "sm_70": (128, 64), "sm_75": (128, 4),
    "sm_80": (128, 64), "sm_86": (256, 4), "sm_89": (256, 4), "sm_90": (256, 128),
    "sm_100": (256, 128), "sm_103": (256, 4), "sm_120": (256, 4), "gfx908": (128, 64),
    "gfx90a": (128, 128), "gfx942": (256, 128), "gfx950": (256, 128), "AVX512": (64, 32),
}  # fmt: skip
HALF = ("RTX-3090", "RTX-4090", "RTX-5090")


@each_device
def test_every_device_is_complete(device: Device) -> None:
    assert device_named(device.name) is device
    for figure in ("memory_bandwidth", "memory_bytes", "launch_seconds", "cores", "cache_bytes",
                   "clock", "watts"):  # fmt: skip
        assert getattr(device, figure) > 0
        assert device.sources[figure]
    assert set(device.sources) >= {f"peaks.{dtype}" for dtype in device.peaks}
    assert device.peaks["float32"] > device.peaks["float64"] * 0.5
    # Bytes per FLOP of real devices; a slip of a power of ten falls out of it.
    assert 5e-3 < device.memory_bandwidth / device.peaks["float32"] < 0.2
    assert device.vendor and device.arch and device.note != "?"
    if device.kind == "gpu":
        for figure in ("shared_bytes", "registers", "warps", "warp_size", "pcie_bandwidth"):
            assert getattr(device, figure) > 0
            assert device.sources[figure]


@each_device
def test_matrix_peaks_are_cores_times_clock(device: Device) -> None:
    kind = f"{device.arch}/half" if device.name in HALF else device.arch
    clock = device.matrix_clock or device.clock
    for dtype, rate in MATRIX.get(kind, {}).items():
        # float64 units of NVIDIA run at the clock of the vector lanes.
        ticks = device.clock if dtype == "float64" else clock
        assert device.peaks[dtype] == pytest.approx(device.cores * rate * ticks, rel=0.03), dtype


@each_device
def test_vector_rates_are_cores_times_clock(device: Device) -> None:
    for dtype, rate in zip(("float32", "float64"), VECTOR[device.arch], strict=True):
        told = device.cores * rate * device.clock
        assert device.vector[dtype] == pytest.approx(told, rel=0.08), dtype


@each_device
def test_bandwidths_are_width_times_rate(device: Device) -> None:
    if device.bus_bits and device.pin_rate:
        told = device.bus_bits / 8 * device.pin_rate
        assert device.memory_bandwidth == pytest.approx(told, rel=0.03)


@each_device
def test_links_are_whole(device: Device) -> None:
    assert bool(device.link) == bool(device.fabric) == bool(device.link_bandwidth)
    assert bool(device.link) == bool(device.link_domain)
    if device.link:
        assert device.link_bandwidth > device.pcie_bandwidth


def test_the_devices_asked_for_are_known() -> None:
    for name in ("V100", "P100", "P4", "T4", "A10", "A100", "A40", "L4", "L40S", "RTX3090",
                 "RTX4090", "RTX 5090", "H100", "H100 NVL", "H200", "B200", "GB200", "MI100",
                 "MI210", "MI250X", "MI300X", "MI325X", "MI355X"):  # fmt: skip
        assert device_named(name).kind == "gpu"
    assert device_named("i9-10940X").kind == "cpu"


def test_aliases_are_unique() -> None:
    names = [n for d in known_devices() for n in {d.name, *d.aliases}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("a100", "A100-SXM4-80GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA_A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("a100_sxm", "A100-SXM4-80GB"),
        ("a100_40gb", "A100-SXM4-40GB"),
        ("a100_80gb", "A100-SXM4-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA_A100_80GB_PCIe", "A100-PCIE-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("Tesla_V100-PCIE-32GB", "V100-PCIE-32GB"),
        ("Tesla P100-PCIE-16GB", "P100-PCIE-16GB"),
        ("Tesla T4", "T4"),
        ("Tesla P4", "P4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("GeForce RTX 3090", "RTX-3090"),
        ("h100", "H100-SXM5-80GB"),
        ("h100_sxm", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("h200_sxm", "H200-SXM-141GB"),
        ("b200_sxm", "B200-SXM"),
        ("NVIDIA B200", "B200-SXM"),
        ("gb200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("MI300", "MI300X"),
        ("gfx942", "MI300X"),
        ("gfx942:sramecc+:xnack-", "MI300X"),
        ("AMD Instinct MI250X", "MI250X-GCD"),
        ("AMD_Instinct_MI210", "MI210"),
    ],
)
def test_spellings(spelled: str, name: str) -> None:
    assert device_named(spelled).name == name


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UnknownDeviceError, match=r"unknown device 'H1000'; nearest: H100"):
        device_named("H1000")


def test_missing_units_fall_back_to_float32() -> None:
    v100 = device_named("V100")
    assert "bfloat16" not in v100.peaks
    assert v100.matrix_peak("bfloat16") == v100.peaks["float32"]


def test_accumulation_has_its_own_rate() -> None:
    card = device_named("RTX 4090")
    assert card.matrix_peak("float16", "float16") == 2 * card.matrix_peak("float16") - 0.1e12
    assert card.matrix_peak("bfloat16", "float32") == card.matrix_peak("bfloat16")


def test_the_host_scales_with_its_threads() -> None:
    one, two = host_device(1), host_device(2)
    assert two.peaks["float32"] == 2 * one.peaks["float32"]
    assert one.peaks["float64"] == one.peaks["float32"] / 2
    assert device_named("cpu").kind == "cpu"
    assert one.memory_bytes == two.memory_bytes > 1e8
    assert set(one.sources) >= {"memory_bytes", "cores", "vector.float32", "peaks.float32"}


WHOLE = """
name = "mine"
arch = "sm_90"
memory_bandwidth = 2.0e12
memory_bytes = 40e9
cores = 60
[peaks]
float32 = 3e13
bfloat16 = 4e14
"float16/float16" = 8e14
"""


def written(folder: Path, text: str) -> str:
    path = folder / "my.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_is_a_device(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    device = device_named(path)
    assert (device.name, device.kind, device.cores) == ("mine", "gpu", 60)
    assert device.matrix_peak("bfloat16") == 4e14
    assert device.vector_peak("float32") == 3e13
    assert device.sources["peaks.bfloat16"] == path
    assert device.sources["launch_seconds"] == "assumed"


def test_a_file_changes_a_known_device(tmp_path: Path) -> None:
    text = 'name = "H100-96GB"\nlike = "h100"\nmemory_bandwidth = 2.4e12\nwatts = 500\n'
    device, base = device_named(written(tmp_path, text)), device_named("H100")
    assert device.memory_bandwidth == 2.4e12
    assert device.peaks == base.peaks
    assert device.sources["cores"] == base.sources["cores"]
    assert device.aliases == ()


def test_a_file_names_its_sources(tmp_path: Path) -> None:
    text = WHOLE.replace("[peaks]", '[sources]\nsheet = "my sheet"\n[sheet]\nwatts = 300\n[peaks]')
    assert device_named(written(tmp_path, text)).sources["watts"] == "my sheet"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\n', r"memory_bandwidth, memory_bytes, cores, peaks\.float32 missing"),
        ('like = "h100"\n', "name missing"),
        (WHOLE.replace("cores", "corse"), "unknown key 'corse'; did you mean 'cores'"),
        (WHOLE.replace("float32 =", "fp32 ="), "peaks has no 'fp32'"),
        (WHOLE.replace("float16/float16", "float16/half"), "peaks has no 'float16/half'"),
        (WHOLE.replace("= 60", "= -1"), "cores is -1.0, not a number above 0|cores is -1, not"),
        (WHOLE.replace("= 60", "= true"), "cores is True, not a number"),
        (WHOLE.replace("2.0e12", '"2 TB/s"'), "memory_bandwidth is '2 TB/s', not a number"),
        (WHOLE.replace('"sm_90"', "90"), "arch is 90, not text"),
        (WHOLE.replace('"mine"', '"mine"\nkind = "tpu"'), "kind is 'tpu'; allowed: gpu, cpu"),
        (WHOLE.replace('"mine"', '"mine"\nfabric = "ring"'), "fabric is 'ring'; allowed: switch"),
        (WHOLE.replace('"mine"', '"mine"\naliases = "m"'), "aliases is 'm', not a list"),
        (WHOLE.replace('"mine"', '"mine"\nlike = "H10"'), "no known device; did you mean 'H100'"),
        (WHOLE.replace("[peaks]", "[peaks"), "my.toml: "),
        ('name = "x"\npeaks = 3\n', "peaks is 3, not a table by dtype"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DeviceFileError, match=message):
        device_named(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownDeviceError, match="there is no such file"):
        device_named(str(tmp_path / "none.toml"))

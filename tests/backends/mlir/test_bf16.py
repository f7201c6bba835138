"""Rounding to bf16, in integers and by an instruction: bit for bit what torch does."""

from __future__ import annotations

import pytest
import torch

from perfopt.backends.mlir import compile as compiling
from tests.backends.kernels import generated

SPECIAL = [
    0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1.1754943e-38,
    -1.1754942e-38, 9.1835e-41, 4.6e-41, 3.4028235e38, 3.3895314e38, 1.00390625, 1.01171875,
]  # fmt: skip


def _values() -> torch.Tensor:
    """Numbers of every exponent, halfway cases, denormals alone and among others."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (65536,), generator=generator).to(torch.int32)
    halfway = (bits & ~0xFFFF) | 0x8000
    special = torch.tensor(SPECIAL)
    plain = torch.randn(4099, generator=generator)
    plain[::37] = 1e-40
    return torch.cat([bits.view(torch.float32), halfway.view(torch.float32), special, plain])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("lanes", [None, 8])
def test_rounding_is_torchs(
    native: bool, lanes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and not compiling.host_has_bf16():
        pytest.skip("this processor has no AVX512-BF16")
    monkeypatch.setattr(compiling, "host_has_bf16", lambda: native)
    marker = float(2 * native + 3)  # kernels are cached by their text: one of each kind's own

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == marker, marker, x).bfloat16()

    x = _values()
    (found,) = generated(narrow, x, lanes=lanes)
    expected = x.bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    same = found.view(torch.int16) == expected.view(torch.int16)
    assert bool((same | expected.isnan()).all())

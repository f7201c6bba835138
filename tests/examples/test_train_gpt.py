"""The demo, with few steps of a small model: it trains, its losses coincide, its tables print."""

from __future__ import annotations

import math

import pytest
import torch

from examples import train_gpt

SIZES = {"steps": 6, "layers": 2, "heads": 2, "width": 32, "context": 16, "batch": 4}
SMALL = [f"--{name}={size}" for name, size in SIZES.items()]


def test_losses_coincide_with_eagers(capsys: pytest.CaptureFixture[str]) -> None:
    code = train_gpt.main(SMALL)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "losses coincide" in printed
    assert "perfopt" in printed and "first step" in printed


def test_every_step_of_a_compiled_run_is_eagers() -> None:
    args = train_gpt.parse(SMALL)
    model = train_gpt.make_model(args)
    eager, compiled = (train_gpt.contender(name, model, args.rate) for name in ("eager", "perfopt"))
    data, _ = train_gpt.corpus()
    for _, batch in zip(range(4), train_gpt.batches(data, 4, 16, seed=0), strict=False):
        eager.step(*batch)
        compiled.step(*batch)
    torch.testing.assert_close(compiled.losses, eager.losses, rtol=1e-5, atol=0.0)
    mine, exact = (dict(each.model.named_parameters()) for each in (compiled, eager))
    for name, weight in exact.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-3, atol=1e-4)


def test_a_parted_or_nan_loss_is_told() -> None:
    args = train_gpt.parse(SMALL)
    model = train_gpt.make_model(args)
    eager, near, apart, broken = (train_gpt.contender("eager", model, 0.0) for _ in range(4))
    near.name, apart.name, broken.name = "near", "apart", "broken"
    eager.losses, near.losses = [2.0, 1.0], [2.0, 1.0001]
    apart.losses, broken.losses = [2.0, 1.1], [2.0, math.nan]
    assert train_gpt.parted([eager, near, apart, broken], 1e-3) == ["apart", "broken"]


def test_the_same_seed_gives_the_same_batches_and_weights() -> None:
    args = train_gpt.parse(SMALL)
    data, _ = train_gpt.corpus()
    first, second = (next(train_gpt.batches(data, 2, 8, seed=3)) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    one, other = (train_gpt.make_model(args).state_dict() for _ in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [["--steps", "1"], ["--width", "30", "--heads", "4"]])
def test_what_cannot_run_is_refused_with_its_value(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_gpt.parse(wrong)
    assert wrong[1] in capsys.readouterr().err


def test_an_unknown_backend_is_named_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_gpt.main([*SMALL, "--backend", "perfop"]) == 2
    printed = capsys.readouterr().out
    assert "perfop:" in printed and "inductor" in printed

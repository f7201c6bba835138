"""The simulated peak of eager programs, against the sizes and lives of their tensors."""

import torch
from torch import nn

from perfopt.backends.torch_private import allocated_peak
from perfopt.eager_memory import Peak, empty, kept, kernel, steady_peak

KIB = 1024


def test_values_live_until_their_last_reference() -> None:
    with Peak() as run:
        x = torch.empty(256, device="meta")  # 1 KiB
        y = (x * 2) * 3  # the product in the middle is alive beside the result
        assert run.peak == 3 * KIB
        run.forget()
        assert run.peak == 2 * KIB
        del y
        run.forget()
        assert run.peak == KIB


def test_storages_are_rounded_up_and_views_are_free() -> None:
    with Peak() as run:
        x = torch.empty(3, device="meta")
        assert run.peak == 512
        x.view(3, 1).expand(3, 7)
        assert run.peak == 512


def test_gradients_that_meet_are_added_in_place() -> None:
    small = kernel(lambda ctx, x: kept(ctx, empty(1), x), lambda ctx, dy: empty(256 * KIB))

    def build():
        x = empty(256 * KIB, grad=True)
        return lambda: (small(x) + small(x) + small(x)).backward()

    # x, its old gradient, the sum of the new ones and the next: not a third beside these.
    assert steady_peak(build) // (KIB * KIB) == 4


def test_a_workspace_is_kept_for_each_thread_that_multiplied() -> None:
    def forward_only():
        a = empty(16, 16)
        return lambda: a @ a

    def both():
        a = empty(16, 16, grad=True)
        return lambda: (a @ a).sum().backward()

    assert steady_peak(forward_only, workspace=KIB) == 3 * KIB
    assert steady_peak(both, workspace=100 * KIB) - steady_peak(both) == 200 * KIB


def test_a_kernel_keeps_what_it_says() -> None:
    fused = kernel(lambda ctx, x: kept(ctx, torch.empty_like(x), x),
                   lambda ctx, dy: torch.empty_like(dy))  # fmt: skip

    def build():
        x = empty(256, grad=True)
        dy = torch.empty_like(x)
        return lambda: fused(x).backward(dy)

    assert steady_peak(build) == 5 * KIB  # x, dy, x.grad, and the result and the new gradient


def test_as_an_allocator_counts_on_a_real_step() -> None:
    """A step of real tensors: its allocations beyond what it starts with."""

    def made(device: str):
        torch.manual_seed(0)
        layers = [nn.Linear(96, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)]
        model = nn.Sequential(*layers).to(device)
        x = torch.empty(128, 96, device=device)

        return lambda: model(x).square().mean().backward()

    held = sum(p.numel() for p in nn.Sequential(nn.Linear(96, 256), nn.LayerNorm(256),
                                                nn.Linear(256, 64)).parameters()) * 4  # fmt: skip
    held += 128 * 96 * 4
    step = made("cpu")
    step()
    # The gradients of the step before are held too.
    grads = held - 128 * 96 * 4
    real = allocated_peak(step) + held + grads
    assert abs(steady_peak(lambda: made("meta")) / real - 1) < 0.05

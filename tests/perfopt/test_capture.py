"""What may go into a compiled function and come out of it, against eager and float64."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import perfopt
from tests.perfopt.comparing import compare, compare_module, compiled, same


class Block(nn.Module):
    """A layer norm and a small network behind a residual, with a buffer that counts calls."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


def network(x: Tensor) -> Tensor:
    return F.gelu(x + 1).softmax(-1) * x


def test_training_a_module() -> None:
    compare_module(Block(), [torch.randn(4, 8, requires_grad=True)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Any) -> None:
    block = Block().eval()
    x = torch.randn(4, 8)
    with mode():
        ours, eager, exact = compiled(block)(x), block(x), block.double()(x.double())
    same(ours, eager, exact)
    assert not ours.requires_grad and ours.is_inference() == eager.is_inference()


def test_the_same_function_with_and_without_gradients() -> None:
    ours = compiled(network)
    x = torch.randn(3, 5, requires_grad=True)
    compare(network, [x], ours)
    with torch.no_grad():
        compare(network, [x.detach()], ours)
    compare(network, [x], ours)


def test_fullgraph_refuses_a_graph_break_and_a_break_is_right_without() -> None:
    def broken(x: Tensor) -> Tensor:
        y = F.gelu(x) * 2
        torch._dynamo.graph_break()
        return y.softmax(-1)

    compare(broken, [torch.randn(3, 5, requires_grad=True)], perfopt.compile(broken))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(broken)(torch.randn(3, 5))


def test_data_dependent_branch() -> None:
    def branch(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x - 1

    ours = perfopt.compile(branch)
    for sign in (1.0, -1.0):
        compare(branch, [torch.full((4,), sign, requires_grad=True)], ours)


def test_input_mutation() -> None:
    def mutate(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2).add_(y)
        y[0] = 7
        return x + y.exp()

    ours = compiled(mutate)
    given = [torch.randn(3, 4), torch.randn(3, 4)]
    a, b = [x.clone() for x in given], [x.clone() for x in given]
    c = [x.double() for x in given]
    result, expected, exact = ours(*a), mutate(*b), mutate(*c)
    same([result, *a], [expected, *b], [exact, *c])
    assert a[0]._version > 0


def test_mutation_of_a_view_and_of_overlapping_inputs() -> None:
    def mutate(x: Tensor, y: Tensor) -> Tensor:
        x[0].mul_(3)
        return y + 1

    for function in (mutate, compiled(mutate)):
        base = torch.arange(12.0).reshape(3, 4)
        result = function(base, base[0])
        assert base[0].tolist() == [0.0, 3.0, 6.0, 9.0] and result.tolist() == [1, 4, 7, 10]


def test_outputs_that_alias_inputs_or_each_other() -> None:
    def aliases(x: Tensor) -> Any:
        y = x * 2
        return x, x.view(-1), y, y[0], y, y.detach()

    x = torch.randn(3, 4)
    ours = compiled(aliases)(x)
    same(ours, aliases(x), aliases(x.double()))
    assert ours[0] is x and ours[1].data_ptr() == x.data_ptr()
    assert ours[2] is ours[4] and ours[3].data_ptr() == ours[2].data_ptr()
    ours[2].zero_()
    assert not ours[3].any() and not ours[5].any()


def test_results_are_not_reused_by_the_next_call() -> None:
    ours = compiled(network)
    x = torch.randn(3, 5)
    first = ours(x)
    kept = first.clone()
    ours(x + 1)
    assert torch.equal(first, kept)


def test_changing_a_result_that_backward_needs_is_noticed() -> None:
    for function in (torch.sigmoid, compiled(lambda x: (x * 2).softmax(-1))):
        y = function(torch.randn(3, 4, requires_grad=True))
        y.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.token.weight

        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.head(F.gelu(self.token(tokens)))
            return F.cross_entropy(logits, tokens.roll(1))

    module = Tied()
    compare_module(module, [torch.tensor([1, 4, 4, 10, 0])])


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "channels_last", "offset"])
def test_inputs_that_are_not_contiguous(layout: str) -> None:
    x = {
        "transposed": torch.randn(5, 6).t(),
        "sliced": torch.randn(6, 10)[:, ::2],
        "expanded": torch.randn(6, 1).expand(6, 5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "offset": torch.randn(31)[1:].view(6, 5),
    }[layout]
    with torch.no_grad():
        compare(network, [x])
    if layout != "expanded":
        torch.compiler.reset()
        compare(network, [x.detach().requires_grad_()])


def test_gradients_that_come_with_other_strides() -> None:
    def network(x: Tensor) -> Tensor:
        return F.gelu(x) * x.sin()

    ours = compiled(network)
    x = torch.randn(6, 5)
    cotangents = [
        torch.randn(6, 5), torch.randn(5, 6).t(), torch.ones(()).expand(6, 5),
        torch.randn(6, 10)[:, ::2],
    ]  # fmt: skip
    for cotangent in cotangents:
        results = []
        for function, dtype in ((ours, x.dtype), (network, x.dtype), (network, torch.float64)):
            leaf = x.detach().to(dtype).requires_grad_()
            (grad,) = torch.autograd.grad(function(leaf), leaf, cotangent.to(dtype))
            results.append(grad.contiguous())
        same(*results)


def test_scalars_and_zero_dimensions() -> None:
    def scalars(x: Tensor, s: Tensor, n: int, f: float) -> Any:
        return x * s + n, s * 2, x.sum() * f, s.exp() + s, x.max() > s

    x, s = torch.randn(3, 4, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    ours = compiled(scalars)
    for n, f in ((2, 0.5), (3, 0.5), (3, -1.25), (5, float("inf"))):
        compare(scalars, [x, s, n, f], ours)


def test_empty_tensors() -> None:
    def empty(x: Tensor) -> Any:
        return x * 2 + 1, x.sum(), x.sum(0), x.sum(-1), F.gelu(x).reshape(-1), x.amax(-1)

    for shape in ((0, 4), (2, 0, 4)):
        torch.compiler.reset()
        compare(empty, [torch.randn(shape, requires_grad=True)])
    torch.compiler.reset()
    compare(lambda x: (x.sum(-1), F.layer_norm(x, (4,))), [torch.randn(0, 4, requires_grad=True)])


def test_outputs_that_are_not_tensors_and_nested_inputs() -> None:
    def nested(given: dict[str, Any]) -> Any:
        x, (y, n) = given["x"], given["pair"]
        return {"sum": x + y, "more": [n, "text", None, (x * y, 1.5)]}

    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    compare(nested, [{"x": x, "pair": (y, 4)}])


def test_constants_in_the_graph() -> None:
    table = torch.tensor([1.0, 2.0, 3.0])

    def constants(x: Tensor) -> Tensor:
        return x * torch.tensor([2.0, 0.5, 1.0]) + table.to(x.dtype) + torch.arange(3)

    compare(constants, [torch.randn(2, 3, requires_grad=True)])


def test_retain_graph() -> None:
    ours = compiled(network)
    x = torch.randn(3, 5, requires_grad=True)
    loss = ours(x).pow(2).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def test_retain_graph_after_a_backward_that_did_not() -> None:
    ours = compiled(network)
    x = torch.randn(3, 5, requires_grad=True)
    ours(x).sum().backward()
    loss = ours(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    once = torch.autograd.grad(network(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, 3 * once)


def test_donated_buffers_refuse_retain_graph_and_are_right_otherwise() -> None:
    ours = compiled(network, donate=True)
    x = torch.randn(3, 5, requires_grad=True)
    compare(network, [x], ours)


def test_double_backward_is_refused_clearly() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    y = compiled(network)(x).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


def test_gradient_accumulation() -> None:
    block, other = Block(), Block()
    other.load_state_dict(block.state_dict())
    ours = compiled(block)
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        ours(x).pow(2).mean().backward()
        other(x).pow(2).mean().backward()
    for a, b in zip(block.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_hooks() -> None:
    seen: list[str] = []

    def hooked(block: Block) -> Block:
        block.norm.register_forward_hook(lambda m, args, out: out * 2)
        block.widen.weight.register_hook(lambda grad: seen.append("weight") or grad * 3)
        return block

    torch.manual_seed(0)
    block = hooked(Block())
    torch.manual_seed(0)
    other = hooked(Block())
    x = torch.randn(4, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    x.register_hook(lambda grad: grad + 1)
    y.register_hook(lambda grad: grad + 1)
    perfopt.compile(block)(x).sum().backward()
    other(y).sum().backward()
    assert seen == ["weight", "weight"]
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(block.widen.weight.grad, other.widen.weight.grad)


def test_several_threads_at_once() -> None:
    ours = compiled(network)
    inputs = [torch.randn(64, 33, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    ours(inputs[0])
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.allclose(ours(inputs[i]), network(inputs[i]), atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_that_all_compile_at_once() -> None:
    ours = compiled(network)
    x = torch.randn(8, 5)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(ours(x))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for each in results:
        torch.testing.assert_close(each, network(x))


def test_reentrance() -> None:
    inner = compiled(network)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return inner(x.detach())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                return torch.autograd.grad(inner(leaf), leaf, grad)[0]

    x = torch.randn(3, 5, requires_grad=True)
    compare(lambda x: network(x) * 2, [x], lambda x: Square.apply(x) * 2)


def test_compiled_inside_compiled() -> None:
    inner = compiled(network)

    def outer(x: Tensor) -> Tensor:
        return inner(x * 2) + 1

    compare(lambda x: network(x * 2) + 1, [torch.randn(3, 5, requires_grad=True)], compiled(outer))


def test_checkpointed_modules_with_dropout() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(lambda b, y: F.dropout(b(y), 0.3), block, x, use_reentrant=False)
            return x

    module = Deep()
    compare_module(module, [torch.randn(4, 8, requires_grad=True)], perfopt.compile(module))


def test_random_numbers_are_eagers() -> None:
    def noisy(x: Tensor) -> Any:
        y = F.dropout(x, 0.5)
        return y + torch.rand(3, 4), torch.randint(10, (5,)), torch.bernoulli(x.sigmoid())

    x = torch.randn(3, 4)
    states = []
    results = []
    for function in (noisy, compiled(noisy)):
        torch.manual_seed(3)
        results.append(function(x))
        states.append(torch.get_rng_state())
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(*states)


def test_autocast() -> None:
    def mixed(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.gelu(x @ w).softmax(-1)

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    ours, eager = compiled(mixed)(x, w), mixed(x, w)
    assert ours.dtype == eager.dtype
    torch.testing.assert_close(ours, eager, atol=2e-2, rtol=2e-2)


def test_custom_operators_run_through_aten() -> None:
    @torch.library.custom_op("perfopt_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)

    def function(x: Tensor) -> Tensor:
        return F.gelu(twice(x + 1)) * 3

    compare(function, [torch.randn(3, 5, requires_grad=True)])


def test_control_flow_operators() -> None:
    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    with torch.no_grad():
        compare(branch, [torch.ones(4)])
        compare(branch, [-torch.ones(4)])


def test_complex_and_sparse_values_run_through_aten() -> None:
    def complex_(x: Tensor) -> Any:
        z = torch.complex(x, x + 1)
        return (z * z).abs(), torch.view_as_real(z * 2)

    with torch.no_grad():
        compare(complex_, [torch.randn(3, 4)])


def test_meta_tensors_and_none_gradients() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        return x * 2, y.detach() + 1

    assert compiled(function)(*torch.ones(2, 3, device="meta").unbind())[0].device.type == "meta"
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    torch.compiler.reset()
    compare(function, [x, y])

"""Train a small GPT on the text that ships with Python, eagerly and through perfopt, side by side.

    python examples/train_gpt.py
    python examples/train_gpt.py --steps 300 --layers 6 --width 256 --inductor

Every contender starts from the same weights and takes the same batches; at each step they run one
after the other in random order, so that what else the machine does hits all of them alike. Exits
with 1 when a compiled run's losses part from eager's by more than `--tolerance`, relatively.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pydoc_data import topics
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional as F

import perfopt


@dataclass(frozen=True)
class Shape:
    """How big the model is; `context` counts characters."""

    vocabulary: int
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128


class Attention(nn.Module):
    """Causal self-attention over (batch, context, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    """Attention and a GELU network, each behind a layer norm and a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (batch, context, width)."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))


class GPT(nn.Module):
    """A decoder whose head shares its weights with the embedding; returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats of `targets`, both int64 of (batch, context)."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def corpus() -> tuple[Tensor, int]:
    """Python's own help topics as int64 characters, and how many different ones there are."""
    text = "".join(topics.topics.values())
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text]), len(number)


def batches(data: Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text and the same windows one character on, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - context - 1, (batch, 1), generator=generator)
        window = data[starts + torch.arange(context + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


@dataclass
class Contender:
    """One way to run the model, and what came of it: a loss and a time in seconds per step."""

    name: str
    model: nn.Module
    run: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    preparing: float = 0.0  # seconds of `torch.compile` itself, counted with the first step
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Forward, backward and update."""
        start = time.perf_counter()
        loss = self.run(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        spent = time.perf_counter() - start
        self.seconds.append(spent if self.seconds else spent + self.preparing)


def contender(name: str, model: nn.Module, rate: float) -> Contender:
    """`model` copied and, unless `name` is "eager", compiled by the backend `name`."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    start = time.perf_counter()
    run = model if name == "eager" else torch.compile(model, backend=name)
    return Contender(name, model, run, optimizer, preparing=time.perf_counter() - start)


def make_model(args: argparse.Namespace) -> GPT:
    """The model that the command line describes, its weights drawn from the seed."""
    _, vocabulary = corpus()
    torch.manual_seed(args.seed)
    return GPT(Shape(vocabulary, args.layers, args.heads, args.width, args.context))


def train(contenders: list[Contender], args: argparse.Namespace, console: Console) -> None:
    """Run every contender over the same batches, in random order within a step."""
    data, _ = corpus()
    order = random.Random(args.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("first steps, compiling", total=args.steps)
        for step, batch in zip(
            range(args.steps), batches(data, args.batch, args.context, args.seed), strict=False
        ):
            turn = contenders if step == 0 else order.sample(contenders, len(contenders))
            for each in turn:
                each.step(*batch)
            progress.update(task, advance=1, description=f"loss {contenders[0].losses[-1]:.3f}")


def curve(contenders: list[Contender], width: int = 64, height: int = 9) -> str:
    """The loss curves over one another: `*` where all agree, initials where they part."""
    steps = len(contenders[0].losses)
    width = min(width, steps)
    marks = [[" "] * width for _ in range(height)]
    every = [loss for each in contenders for loss in each.losses]
    low, high = min(every), max(every)
    edges = [steps * i // width for i in range(width + 1)]
    for column, (start, stop) in enumerate(pairwise(edges)):
        for each in contenders:
            mean = sum(each.losses[start:stop]) / (stop - start)
            row = round((high - mean) / ((high - low) or 1.0) * (height - 1))
            marks[row][column] = each.name[0] if marks[row][column] == " " else "*"
    label = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    return "\n".join(f"{label.get(i, ''):>6} |{''.join(row)}" for i, row in enumerate(marks))


def distance(each: Contender, eager: Contender, steps: int | None = None) -> float:
    """The greatest relative distance of two loss curves up to a step; NaN where one has a NaN."""
    mine, exact = (torch.tensor(one.losses[:steps], dtype=torch.float64) for one in (each, eager))
    return ((mine - exact).abs() / exact.abs()).max().item()


def parted(contenders: list[Contender], tolerance: float) -> list[str]:
    """The names of those whose losses are further than `tolerance` from the first one's."""
    eager, *others = contenders
    return [each.name for each in others if not distance(each, eager) <= tolerance]


def losses(contenders: list[Contender], rows: int = 8) -> Table:
    """The losses at some steps, and how far each contender has been from eager up to there."""
    eager, *others = contenders
    table = Table("step", *(each.name for each in contenders))
    for each in others:
        table.add_column(f"{each.name}, max relative distance")
    for column in table.columns:
        column.justify = "right"
    last = len(eager.losses) - 1
    for step in sorted({round(last * i / (rows - 1)) for i in range(rows)}):
        table.add_row(
            str(step + 1),
            *(f"{each.losses[step]:.5f}" for each in contenders),
            *(f"{distance(each, eager, step + 1):.1e}" for each in others),
        )
    return table


def results(contenders: list[Contender]) -> Table:
    """One row per contender: seconds to the first step, then medians over the others."""
    table = Table("", "first step s", "step ms", "eager / it", "total s", "last loss")
    for column in table.columns[1:]:
        column.justify = "right"
    eager = contenders[0]
    for each in contenders:
        speed = median(a / b for a, b in zip(eager.seconds[1:], each.seconds[1:], strict=True))
        table.add_row(
            each.name,
            f"{each.seconds[0]:.2f}",
            f"{median(each.seconds[1:]) * 1e3:.1f}",
            f"{speed:.2f}",
            f"{sum(each.seconds):.1f}",
            f"{each.losses[-1]:.4f}",
        )
    return table


def graphs(compiled: Contender) -> Table:
    """What perfopt made of each captured graph: kernels, and calls of ATen and vendor libraries."""
    report = perfopt.report(compiled.run)
    table = Table("graph", "operations", "kernels", "library calls", "the most frequent of them")
    for column in table.columns[1:4]:
        column.justify = "right"
    for graph in report.graphs:
        calls = sorted(graph.library_calls.items(), key=lambda item: -item[1])
        table.add_row(
            graph.kind,
            str(graph.operations),
            str(graph.launches),
            str(sum(graph.library_calls.values())),
            ", ".join(f"{count} {name.removeprefix('aten.')}" for name, count in calls[:3]),
        )
    return table


def decisions(compiled: Contender, rows: int = 6) -> Table:
    """The decisions that save most by the cost model's prediction; equal ones are added up."""
    saved: dict[tuple[str, str, str], list[float]] = {}
    for each in perfopt.report(compiled.run).decisions:
        if each.seconds_saved > 0:
            saved.setdefault((each.pass_name, each.text(), each.source), []).append(
                each.seconds_saved
            )
    table = Table("predicted to save us", "times", "pass", "decision", "line")
    for column in table.columns[:2]:
        column.justify = "right"
    best = sorted(saved.items(), key=lambda item: -sum(item[1]))
    for (name, text, line), seconds in best[:rows]:
        table.add_row(f"{sum(seconds) * 1e6:.0f}", str(len(seconds)), name, Text(text), line)
    return table


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("steps", 200), ("layers", 4), ("heads", 4), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("context", 128), ("batch", 8), ("seed", 0), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's learning rate")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative, between losses")
    parser.add_argument("--backend", default="perfopt", help="what to compare with eager")
    parser.add_argument("--inductor", action="store_true", help="run Inductor as well")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps is {args.steps}; it takes 2 at least, the first one compiles")
    if args.width % args.heads:
        parser.error(f"--width {args.width} does not divide by --heads {args.heads}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Train, print, and return the exit code."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console()
    # Asking imports Dynamo, which would else count against the first one that is compiled.
    known = torch.compiler.list_backends(exclude_tags=())
    if args.backend not in known:
        console.print(f"--backend {args.backend}: not installed; there are {', '.join(known)}")
        return 2
    model = make_model(args)
    names = ["eager", args.backend] + ["inductor"] * args.inductor
    contenders = [contender(name, model, args.rate) for name in names]
    console.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(corpus()[0]):,} "
        f"characters, {args.steps} steps of {args.batch} x {args.context}, "
        f"{torch.get_num_threads()} threads"
    )
    train(contenders, args, console)
    console.print(curve(contenders), highlight=False)
    console.print(losses(contenders))
    if args.backend == "perfopt":
        console.print(graphs(contenders[1]))
        console.print(decisions(contenders[1]))
    console.print(results(contenders))
    apart = parted(contenders, args.tolerance)
    if apart:
        console.print(f"[red]{', '.join(apart)}: losses part by more than {args.tolerance}")
        return 1
    console.print(f"losses coincide with eager's to {args.tolerance}, relatively")
    return 0


if __name__ == "__main__":
    sys.exit(main())

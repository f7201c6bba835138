"""A graph as one flat Python function.

Regions with kernels become allocations and launches, everything else calls of ATen overloads bound
as globals of the function. A region without kernels is spelled out as its ATen calls. The function
takes one list, empties it, and deletes every local after its last use, so that memory goes back as
early as eager gives it back.
"""

from __future__ import annotations

import linecache
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from perfopt.backends.codegen import Writer, argument, free_symbols, source_line
from perfopt.backends.devices import allocator, elsewhere, entry_on, number_on, several_gpus
from perfopt.backends.ir import FAULTS
from perfopt.backends.region import LoweredRegion, Size, is_region, region_graph
from perfopt.backends.torch_private import (
    PROFILING,
    current_gpu,
    fast_call,
    is_overload,
    is_view,
    profiler,
)

aten = torch.ops.aten

Check = Callable[[str, fx.GraphModule, tuple[Any, ...], tuple[Tensor, ...]], None]

_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//",
    operator.truediv: "/", operator.mod: "%", operator.eq: "==", operator.ne: "!=",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
# Names that the text uses beside its locals; sizes print as arithmetic with these functions.
_RESERVED = (
    "program", "inputs", "profiler", "span", "fault", "slice", "math", "max", "min", "abs", "int",
    "float", "round",
)  # fmt: skip
# Library calls whose results have the strides that tracing foresaw.
_EXACT = {aten.mm.default, aten.addmm.default, aten.bmm.default}


@dataclass(frozen=True)
class Program:
    """One captured graph, ready to run.

    `run` takes a list of inputs, which it empties, and returns the outputs as a tuple; `source` is
    its text. `regions` names those that run as kernels, `launches` counts kernel calls, and
    `library_calls` counts the other calls by operator, views left out.
    """

    name: str
    source: str
    run: Callable[[list[Any]], tuple[Any, ...]]
    regions: tuple[str, ...]
    launches: int
    library_calls: Mapping[str, int]


class ProgramError(Exception):
    """A region cannot be part of the program; the message says why."""


def build_program(
    name: str,
    gm: fx.GraphModule,
    lowered: Mapping[str, LoweredRegion],
    kernels: Mapping[str, Callable[..., Any]],
    *,
    check_strides: bool = False,
    verify: Check | None = None,
    clock: Callable[[str], None] | None = None,
    record: Callable[[str], Any] | None = None,
    recorded: Callable[[list[Any]], tuple[Any, ...]] | None = None,
) -> Program:
    """The program of a functional ATen graph.

    `lowered` has the regions, by target, that run as kernels; all entries that they call are in
    `kernels`. `check_strides` puts inputs that kernels read into the strides they were traced with
    (backward graphs: what autograd passes may differ). `verify` is called after every region,
    `clock` after every call and region with its name, and at the start with "". `record` makes
    contexts of names, which the launches of a region are put into; while torch's profiler runs,
    `recorded` is called in the program's place.
    """
    build = _Builder(gm, lowered, kernels, check_strides, verify, clock, record, recorded)
    source = build.text(name)
    run = _compiled(name, source, build.writer.bound)
    return Program(
        name, source, run, tuple(build.regions), build.launches, dict(sorted(build.calls.items()))
    )


def _compiled(name: str, source: str, bound: dict[str, Any]) -> Callable[..., Any]:
    space: dict[str, Any] = {"math": math, "profiler": profiler, **bound}
    file = f"<perfopt {name}>"
    exec(compile(source, file, "exec"), space)
    # Tracebacks and debuggers find the text here.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    run = space["program"]
    run._boxed_call = True
    run.source = source
    return run


def restrided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`x` itself where it has these strides (those of size-1 dimensions are free), else a copy."""
    if (
        all(size <= 1 or a == b for size, a, b in zip(x.shape, x.stride(), strides, strict=True))
        or not x.numel()
    ):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def raise_fault(fault: int, source: str) -> None:
    """Raise what eager raises for the check that failed in the user's line `source`."""
    where = source or "a compiled region"
    if fault == FAULTS["nonzero"]:
        raise RuntimeError(f"ZeroDivisionError: integer division by zero in {where}")
    raise IndexError(f"index out of range in {where}")


class _Builder:
    def __init__(
        self,
        gm: fx.GraphModule,
        lowered: Mapping[str, LoweredRegion],
        kernels: Mapping[str, Callable[..., Any]],
        check_strides: bool,
        verify: Check | None,
        clock: Callable[[str], None] | None,
        record: Callable[[str], Any] | None,
        recorded: Callable[[list[Any]], tuple[Any, ...]] | None,
    ) -> None:
        self.gm = gm
        self.lowered = lowered
        self.kernels = kernels
        self.check_strides = check_strides
        self.verify = verify
        self.clock = clock
        self.record = record
        self.recorded = recorded
        used = (lowered[str(n.target)].device for n in gm.graph.nodes if n.target in lowered)
        # The GPU of most of the work, where there is any: the current one while the program runs.
        self.home = next((device for device in used if device.type != "cpu"), None)
        self.writer = Writer()
        self.local: dict[fx.Node, str] = {}
        self.exact: set[str] = set()  # locals known to have the strides of their fake tensor
        self.regions: list[str] = []
        self.launches = 0
        self.calls: Counter[str] = Counter()
        self.threads = ""

    def text(self, name: str) -> str:
        names = self.writer.names
        for reserved in _RESERVED:
            names.fresh(reserved)
        self._ways_out()
        self._inputs()
        self._tick("")
        for node in self.gm.graph.nodes:
            self._node(self.gm, node)
        title = f"# {name}\n" if name else ""
        return self.writer.text(f"{title}def program(inputs):")

    def _ways_out(self) -> None:
        """Calls of other programs in this one's place."""
        bind = self.writer.bind
        if self.recorded is not None:
            self.writer.add(f"if {PROFILING}: return {bind('recorded', self.recorded)}(inputs)")
        if self.home is not None and several_gpus():
            now, index = bind("current_gpu", current_gpu), self.home.index or 0
            call = f"{bind('elsewhere', elsewhere)}({index}, program, inputs)"
            self.writer.add(f"if {now}() != {index}: return {call}")

    # ---- inputs -----------------------------------------------------------------------------

    def _inputs(self) -> None:
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            self.local[node] = self._input_name(node)
        names = tuple(self.local[node] for node in placeholders)
        if names:
            many = ", ".join(names)
            symbols = tuple(self.writer.symbols.values())
            self.writer.add(f"({many}{',' * (len(names) == 1)}) = inputs", names)
            self.writer.add("inputs.clear()", symbols, lasting=True)
        self._missing_symbols(placeholders)

    def _input_name(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            symbol = value.node.expr
            if symbol.is_Symbol and symbol not in self.writer.symbols:
                name = self.writer.names.fresh(symbol.name)
                self.writer.symbols[symbol] = name
                return name
        name = self.writer.names.fresh(node.name)
        if isinstance(value, Tensor) and not self.check_strides:
            self.exact.add(name)
        return name

    def _missing_symbols(self, placeholders: Sequence[fx.Node]) -> None:
        """Sizes that no input gives by itself are read off the tensors."""
        for node in placeholders:
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                continue
            for way in ("size", "stride"):
                for dim, size in enumerate(getattr(value, way)()):
                    symbol = size.node.expr if isinstance(size, torch.SymInt) else None
                    if not isinstance(symbol, sympy.Symbol) or symbol in self.writer.symbols:
                        continue
                    name = self.writer.names.fresh(symbol.name)
                    self.writer.symbols[symbol] = name
                    source = self.local[node]
                    self.writer.add(
                        f"{name} = {source}.{way}({dim})", (name,), (source,), lasting=True
                    )

    # ---- nodes ------------------------------------------------------------------------------

    def _node(self, owner: fx.GraphModule, node: fx.Node) -> None:
        if node.op == "placeholder" or node in self.local:
            return
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(owner)
            name = self.local[node] = self.writer.bind(node.name, value)
            self.exact.add(name)
        elif node.op == "output":
            self._output(node)
        elif is_region(node):
            self._region(node)
        else:
            self._call(owner, node)

    def _output(self, node: fx.Node) -> None:
        used: set[str] = set()
        (results,) = node.args
        results = results if isinstance(results, (list, tuple)) else (results,)
        text = argument(self.writer, tuple(results), self.local, used)
        self.writer.add(f"return {text}", (), tuple(sorted(used)))

    def _call(self, owner: fx.GraphModule, node: fx.Node) -> None:
        used: set[str] = set()
        args = [argument(self.writer, arg, self.local, used) for arg in node.args]
        if node.op == "call_method":
            callee = f"{args.pop(0)}.{node.target}"
        elif node.op == "call_module":
            callee = self.writer.bind(node.name, owner.get_submodule(str(node.target)))
        else:
            callee = self._callee(node, args)
        local = self.local[node] = self.writer.names.fresh(node.name)
        if node.target is operator.getitem:
            text = f"{args[0]}[{args[1]}]"
        elif node.target in _INFIX and len(args) == 2 and not node.kwargs:
            text = f"{args[0]} {_INFIX[node.target]} {args[1]}"
        else:
            args += [
                f"{key}={argument(self.writer, value, self.local, used)}"
                for key, value in node.kwargs.items()
            ]
            text = f"{callee}({', '.join(args)})"
        self._define_symbol(node, local)
        self.writer.add(
            f"{local} = {text}", (local,), tuple(sorted(used)), source_line(node),
            lasting=local in self.writer.symbols.values(),
        )  # fmt: skip
        self._tick(node.name)
        if node.target in _EXACT or (is_view(node.target) and args[0] in self.exact):
            self.exact.add(local)

    def _callee(self, node: fx.Node, args: list[str]) -> str:
        target: Any = node.target
        if target is operator.getitem or (target in _INFIX and len(args) == 2):
            return ""
        label = str(target) if is_overload(target) else target.__name__
        if not is_view(target):
            self.calls[label] += 1
        return self.writer.bind(label.replace(".default", ""), fast_call(target))

    def _define_symbol(self, node: fx.Node, local: str) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            symbol = value.node.expr
            if isinstance(symbol, sympy.Symbol) and symbol not in self.writer.symbols:
                self.writer.symbols[symbol] = local

    # ---- regions ----------------------------------------------------------------------------

    def _region(self, node: fx.Node) -> None:
        lowered = self.lowered.get(str(node.target))
        if lowered is not None and self._known(lowered):
            self._launch(node, lowered)
        else:
            self._spell_out(node)

    def _known(self, lowered: LoweredRegion) -> bool:
        """Whether every size that the region needs has a local by now."""
        sizes: list[Size] = [s for alloc in lowered.allocs for s in (*alloc.shape, *alloc.strides)]
        sizes += [a for call in lowered.calls for a in call.args if not isinstance(a, str)]
        needed = {symbol for size in sizes for symbol in free_symbols(size)}
        return needed <= set(self.writer.symbols)

    def _launch(self, node: fx.Node, lowered: LoweredRegion) -> None:
        writer, source = self.writer, source_line(node)
        where = self._operands(node, lowered, source)
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        wanted = {
            name: items[i].name for i, name in reversed([*enumerate(lowered.outputs)]) if i in items
        }
        for alloc in lowered.allocs:
            name = writer.names.fresh(wanted.get(alloc.name, f"{node.name}_{alloc.name}"))
            where[alloc.name] = name
            self.exact.add(name)
            shape, used = writer.sizes(alloc.shape)
            strides, more = writer.sizes(alloc.strides)
            dtype = writer.bind(str(alloc.dtype).removeprefix("torch."), alloc.dtype)
            empty = writer.bind("empty_strided", allocator(lowered.device, self.home))
            text = f"{name} = {empty}({shape}, {strides}, {dtype})"
            writer.add(text, (name,), (*used, *more), source)
        self._calls(lowered, where, source)
        outputs = [where[name] for name in lowered.outputs]
        for i, item in items.items():
            self.local[item] = outputs[int(i)]  # type: ignore[arg-type]
        if len(items) < len(node.users):
            local = self.local[node] = writer.names.fresh(node.name)
            writer.add(f"{local} = ({', '.join(outputs)},)", (local,), tuple(outputs), source)
        self._tick(str(node.target))
        self.regions.append(str(node.target))
        if self.verify is not None:
            self._verify(node, outputs, source)

    def _operands(self, node: fx.Node, lowered: LoweredRegion, source: str) -> dict[str, str]:
        """The locals of a region's inputs by name, where and as its kernels read them."""
        where: dict[str, str] = {}
        for name, arg in zip(lowered.inputs, node.args, strict=True):
            if not isinstance(arg, fx.Node):
                continue
            self._restride(arg)
            if not name:
                continue
            local = where[name] = self.local[arg]
            if arg.meta["val"].device != lowered.device:
                there = self.writer.bind("number_on", number_on)
                device = self.writer.bind("device", lowered.device)
                where[name] = self.writer.names.fresh(f"{local}_there")
                text = f"{where[name]} = {there}({device}, {local})"
                self.writer.add(text, (where[name],), (local,), source)
        return where

    def _more(self, device: torch.device) -> list[str]:
        """What kernels on a device take after their buffers and sizes."""
        if device.type != "cpu":
            return []
        writer = self.writer
        if not self.threads:
            self.threads = writer.names.fresh("threads")
            count = writer.bind("get_num_threads", torch.get_num_threads)
            writer.add(f"{self.threads} = {count}()", (self.threads,), lasting=True)
        return [self.threads]

    def _recorded(self, name: str, source: str, entering: bool) -> None:
        """A line that opens or closes what a profiler shows of a region."""
        if self.record is None:
            return
        if entering:
            label = f"{name}  {source.split('  ')[0]}".strip()
            call = f"{self.writer.bind('record', self.record)}({label!r})"
            self.writer.add(f"span = {call}.__enter__()", ("span",), lasting=True)
        else:
            self.writer.add("span.__exit__(None, None, None)", (), ("span",))

    def _calls(self, lowered: LoweredRegion, where: Mapping[str, str], source: str) -> None:
        writer, more, device = self.writer, self._more(lowered.device), lowered.device
        shapes = {alloc.name: alloc.shape for alloc in lowered.allocs}
        self._recorded(lowered.name, source, True)
        for call in lowered.calls:
            entry = entry_on(device, self.home, self.kernels[call.entry])
            kernel = writer.bind(call.entry, entry)
            texts, used = [], set()
            for arg in call.args:
                if isinstance(arg, str):
                    texts.append(f"{where[arg]}.data_ptr()")
                    used.add(where[arg])
                else:
                    text, names = writer.size(arg)
                    texts.append(text)
                    used.update(names)
            written = [shapes[a] for a in call.args if isinstance(a, str) and a in shapes]
            guard = self._guard(written, used)
            if guard is None:
                continue
            text = f"{kernel}({', '.join([*texts, *more])})"
            if call.checked and device.type == "cpu":
                raised = writer.bind("raise_fault", raise_fault)
                text = f"(fault := {text}) and {raised}(fault, {source.split('  ')[0]!r})"
            writer.add(guard + text, (), tuple(sorted(used)), source)
            self.launches += 1
        self._recorded(lowered.name, source, False)

    def _guard(self, shapes: list[tuple[Size, ...]], used: set[str]) -> str | None:
        """What keeps a kernel from writing empty tensors; None if there is never work for it."""
        tests = []
        for shape in shapes:
            if any(size == 0 for size in shape):
                continue
            unsure = [s for s in shape if not isinstance(s, int) and not s.is_positive]
            if not unsure:
                return ""
            parts = [self.writer.size(size) for size in unsure]
            tests.append(" and ".join(f"({text})" for text, _ in parts))
            used.update(name for _, names in parts for name in names)
        return f"if {' or '.join(tests)}: " if tests else None

    def _restride(self, node: fx.Node) -> None:
        value, local = node.meta.get("val"), self.local[node]
        if not isinstance(value, Tensor) or not value.ndim or local in self.exact:
            return
        self.exact.add(local)
        strides = tuple(s if isinstance(s, int) else s.node.expr for s in value.stride())
        try:
            text, used = self.writer.sizes(strides)
        except KeyError:
            return
        mend = self.writer.bind("restrided", restrided)
        self.writer.add(
            f"if {local}.stride() != {text}: {local} = {mend}({local}, {text})", (), (local, *used)
        )

    def _verify(self, node: fx.Node, outputs: list[str], source: str) -> None:
        name, module, used = str(node.target), region_graph(node), set(outputs)
        args = argument(self.writer, tuple(node.args), self.local, used)
        subgraph = self.writer.bind(f"{name}_graph", module)
        check = self.writer.bind("verify", self.verify)
        results = f"({', '.join(outputs)},)"
        text = f"{check}({name!r}, {subgraph}, {args}, {results})"
        self.writer.add(text, (), tuple(sorted(used)), source)

    def _tick(self, name: str) -> None:
        if self.clock is not None:
            self.writer.add(f"{self.writer.bind('clock', self.clock)}({name!r})", (), ())

    def _spell_out(self, node: fx.Node) -> None:
        """A region as the calls of its subgraph."""
        module = region_graph(node)
        inner = [n for n in module.graph.nodes if n.op == "placeholder"]
        for placeholder, arg in zip(inner, node.args, strict=True):
            used: set[str] = set()
            self.local[placeholder] = argument(self.writer, arg, self.local, used)
        results: Sequence[Any] = ()
        for each in module.graph.nodes:
            if each.op == "output":
                results = each.args[0]
            else:
                self._node(module, each)
        for user in node.users:
            if user.target is operator.getitem:
                result = results[int(user.args[1])]  # type: ignore[arg-type]
                self.local[user] = self.local[result]
        if any(user.target is not operator.getitem for user in node.users):
            used = set()
            text = argument(self.writer, tuple(results), self.local, used)
            local = self.local[node] = self.writer.names.fresh(node.name)
            self.writer.add(f"{local} = {text}", (local,), tuple(sorted(used)))

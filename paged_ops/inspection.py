"""What torch.compile made of a program: graphs, graph breaks, recompiles, and copies of the cache in generated code.

A mutating op that inductor cannot run in place gets a copy of its cache, which costs far more than the op itself and
changes no result. Only the generated code shows it. Inductor's own counters miss some of these copies (two slices of
one tensor that enter a graph as two inputs), so :class:`CompileReport` reads the code.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import ReinplaceCounters, counters, get_compilation_metrics, set_compilation_metrics_limit
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

_ALLOCATIONS = ("empty_strided", "alloc_from_pool")
_DTYPE_VIEW = re.compile(r"aten\.view\.dtype\((\w+),")
_MAX_COMPILES = 1 << 16


class CompileReport:
    """Counts what inductor compiles while the context is open; read the counts after it has closed.

    ::

        with CompileReport(caches=kv_cache.layers) as report:
            compiled(...)
        assert report.cache_copies == 0, report.copies

    A copy of a cache is a buffer that the generated code allocates, and that

    * is passed to an op of this package as a cache (``kv_cache``, ``value_cache``, ``kv_caches``, ...): these arguments
      should be inputs of the graph, or views of inputs; or
    * has the dtype of one of ``caches`` and the number of elements of that cache, of one plane of it (its keys) or of
      its whole storage: this finds copies made by other ops too. Only sizes that vary as a cache's do are compared.

    A kernel that reads a cache of these ops and writes it back counts too: a view of another dtype causes one.

    ``cache_copies`` is the larger of these and of inductor's own count of mutations that it did not run in place.
    Use it with inductor only: the ``aot_eager`` backend always copies. The code of a C++
    wrapper (AOTInductor) is not Python: there is only inductor's own count.

    Inductor's caches of whole graphs are off while the context is open: a graph from a cache would not be seen, and
    their keys do not cover an op's schema.

    Args:
        caches: the tensors whose copies to look for by size.

    Attributes:
        code: the generated code of each graph, in order.
        copies: one line per copy.
        recompile_reasons: the guard that failed, for each recompile.
    """

    def __init__(self, caches: Sequence[Tensor] = ()) -> None:
        self._sizes = {size for cache in caches for size in _sizes_of(cache)}
        self.code: list[str] = []
        self.copies: list[str] = []
        self.recompile_reasons: list[str] = []
        self._graph_breaks = self._missed = 0

    @property
    def graphs(self) -> int:
        """Graphs that inductor compiled."""
        return len(self.code)

    @property
    def graph_breaks(self) -> int:
        """Places at which dynamo had to split a function."""
        return self._graph_breaks

    @property
    def recompiles(self) -> int:
        """Functions compiled again because a guard failed."""
        return len(self.recompile_reasons)

    @property
    def cache_copies(self) -> int:
        """Copies of caches in the generated code, whole or one plane."""
        return max(len(self.copies), self._missed)

    def __enter__(self) -> CompileReport:
        set_compilation_metrics_limit(_MAX_COMPILES)
        self._num_compiles = len(get_compilation_metrics())
        self._breaks_before = _graph_breaks()
        self._missed_before = ReinplaceCounters.get_total_missed()
        self._previous: Callable[[str], None] | None = GraphLowering.save_output_code
        GraphLowering.save_output_code = self._inspect
        self._stack = ExitStack()
        self._stack.enter_context(inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False))
        self._stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        GraphLowering.save_output_code = self._previous
        self._graph_breaks = _graph_breaks() - self._breaks_before
        self._missed = ReinplaceCounters.get_total_missed() - self._missed_before
        metrics = get_compilation_metrics()[self._num_compiles :]
        self.recompile_reasons = [str(each.recompile_reason) for each in metrics if each.recompile_reason]

    def _inspect(self, code: str) -> None:
        if self._previous is not None:
            self._previous(code)
        graph = len(self.code)
        self.code.append(code)
        self.copies += [f"graph {graph}: {copy}" for copy in find_cache_copies(code, self._sizes, _hints(self._sizes))]


def find_cache_copies(
    code: str, sizes: set[tuple[torch.dtype, int]] | None = None, hints: dict[str, int] | None = None
) -> list[str]:
    """The copies of caches in the Python that inductor generated for one graph: one line each.

    Args:
        code: a module of generated code; one that is not Python has no findings.
        sizes: (dtype, number of elements) of buffers that count as copies by their size alone.
        hints: values of the symbols that sizes of caches have; buffers with another symbol do not count by their size.
    """
    try:
        module = ast.parse(code)
    except SyntaxError:
        return []
    found: dict[str, str] = {}
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef) and (
            function.name == "call" or function.name.startswith("partition_")
        ):
            reader = _Reader(sizes or set(), hints or {})
            reader.visit(function)
            found |= {f"{function.name}.{name}": line for name, line in reader.found.items()}
    return list(found.values())


class _Reader(ast.NodeVisitor):
    """Follows the names of one generated function from where they are made to the ops that take them."""

    def __init__(self, sizes: set[tuple[torch.dtype, int]], hints: dict[str, int]) -> None:
        self.found: dict[str, str] = {}
        self._sizes = sizes
        self._hints = hints
        self._fresh: dict[str, str] = {}  # name -> the buffer of this function that it is, or is a view of
        self._made: dict[str, str] = {}  # buffer -> the expression that made it
        self._caches: set[str] = set()  # caches that were passed to ops as a view of another dtype

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        target = node.targets[0]
        if isinstance(target, ast.Name):
            self._bind(target.id, node.value)
        elif isinstance(target, ast.Tuple) and not (isinstance(node.value, ast.Name) and node.value.id == "args"):
            for element in target.elts:
                if isinstance(element, ast.Name):
                    self._bind(element.id, node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        path = ast.unparse(node.func).split(".")
        if path[:3] != ["torch", "ops", "paged_ops"]:
            names = [each.id for each in node.args if isinstance(each, ast.Name)]
            for name in self._caches.intersection(name for name in names if names.count(name) > 1):
                self.found[name] = f"{ast.unparse(node)} reads and writes the cache {name}"
            return
        overload = getattr(getattr(torch.ops.paged_ops, path[3]), path[4] if len(path) > 4 else "default")
        names = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
        by_name = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
        for name, value in (*zip(names, node.args, strict=False), *by_name):
            if not name.endswith(("cache", "caches")):
                continue
            for tensor in value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]:
                viewed = _DTYPE_VIEW.match(ast.unparse(tensor))
                self._caches.update(viewed.groups() if viewed else ())
                root = self._root(tensor)
                if root is not None:
                    self.found[root] = f"{root} = {self._made[root]} is {name} of {path[3]}"

    def _bind(self, name: str, value: ast.expr) -> None:
        root = self._root(value)
        self._fresh.pop(name, None)
        if root is not None:
            self._fresh[name] = root
        elif isinstance(value, ast.Call):
            self._fresh[name] = name
            self._made[name] = ast.unparse(value)
            if any(size in self._sizes for size in self._allocated(value)):
                self.found[name] = f"{name} = {self._made[name]} has the size of a cache"

    def _root(self, value: ast.expr) -> str | None:
        """The buffer that an expression is, or is a view of; None for what came into the function from outside."""
        if isinstance(value, ast.Name):
            return self._fresh.get(value.id)
        if isinstance(value, ast.Subscript):
            return self._root(value.value)
        if isinstance(value, ast.Call) and value.args and ast.unparse(value.func) == "reinterpret_tensor":
            return self._root(value.args[0])
        return None

    def _allocated(self, call: ast.Call) -> Iterator[tuple[torch.dtype, int]]:
        """dtype and number of elements of an allocation; nothing for another call, or a size known only at run time."""
        if not ast.unparse(call.func).startswith(_ALLOCATIONS) or len(call.args) < 3:
            return
        dtype = getattr(torch, ast.unparse(call.args[-1]).removeprefix("torch."), None)
        shapes = [argument for argument in call.args if isinstance(argument, ast.Tuple)]
        try:
            shape = eval(compile(ast.Expression(shapes[0]), "<size>", "eval"), dict(self._hints))
        except (NameError, IndexError):
            return
        if isinstance(dtype, torch.dtype):
            yield dtype, torch.Size(shape).numel()


def _sizes_of(cache: Tensor) -> Iterator[tuple[torch.dtype, int]]:
    yield cache.dtype, cache.numel()
    yield cache.dtype, cache.numel() // 2
    yield cache.dtype, cache.untyped_storage().nbytes() // cache.element_size()


def _hints(sizes: set[tuple[torch.dtype, int]]) -> dict[str, int]:
    """The symbols in the sizes of those inputs of the graph being compiled that are as large as a cache, as a cache and
    its copy have the same symbols; and their values when it was traced."""
    shape_env: Any = V.graph.sizevars.shape_env
    values = getattr(shape_env, "backed_var_to_val", None)  # the name until torch 2.12 is var_to_val
    if values is None:
        values = shape_env.var_to_val
    numbers, found = {number for _, number in sizes}, dict[str, int]()
    for each in V.graph.graph_inputs.values():
        number: Any = math.prod(each.get_size()) if hasattr(each, "get_size") else 0
        symbols: set[Any] = getattr(number, "free_symbols", set())
        if symbols and symbols <= values.keys() and int(number.subs(values)) in numbers:
            found |= {str(symbol): int(values[symbol]) for symbol in symbols}
    return found


def _graph_breaks() -> int:
    return sum(counters["graph_break"].values())

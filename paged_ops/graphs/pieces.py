"""The pieces of a step between its attention ops: compiled separately, each captured in a graph of its own."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paged_ops.graphs.capture import CaptureSession, Graph, on_gpu

Place = tuple[int, ...]  # of an input of a piece: its index, and that in a list of results


class Pieces:
    """The graphs of one step of one size, in the order of the step's calls.

    The same compiled code may be called many times (once per layer): each call has a graph of its own. An input of a
    piece either lives longer than the step (weights, caches, inputs of the step), or comes from an earlier piece, and
    then lies at the same address at every replay; or it was made by an op between the pieces (attention), and is copied
    to where it lay at capture. Results of an op that returns several are one input: a list.
    """

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._graphs: list[tuple[Graph, list[tuple[Place, Tensor]]]] = []
        self._inputs: list[dict[Place, Any]] = []  # weak references to the storages, by call
        self._results: set[int] = set()  # addresses of storages that pieces returned
        self._room: dict[Any, Tensor] = {}
        self._call: Callable[[Callable[[list[Any]], Any], list[Any]], Any] = self._observe
        self._turn = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def observing(self) -> contextlib.AbstractContextManager[None]:
        """Inside it the step runs as usual, and the inputs of its pieces are noted."""
        return self._as(self._observe)

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """Inside it each piece is captured and replayed at once, so that the ops between the pieces see its results."""
        return self._as(self._capture)

    def replaying(self) -> contextlib.AbstractContextManager[None]:
        return self._as(self._replay)

    def __call__(self, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        result = self._call(function, args)
        self._turn += 1
        return result

    @contextlib.contextmanager
    def _as(self, call: Callable[[Callable[[list[Any]], Any], list[Any]], Any]) -> Iterator[None]:
        self._call, self._turn = call, 0
        token = _pieces.set(self)
        try:
            yield
        finally:
            _pieces.reset(token)

    def _observe(self, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._inputs.append({at: StorageWeakRef(tensor.untyped_storage()) for at, tensor in _tensors(args)})
        return function(args)

    def _capture(self, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        copies: list[tuple[Place, Tensor]] = []
        args[:] = [list(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]
        for at, arg in list(_tensors(args)):
            moves = self._inputs[self._turn][at].expired()
            if moves and arg.untyped_storage().data_ptr() not in self._results:
                alike = sum(room.shape == arg.shape for _, room in copies)
                kind = arg.shape, arg.stride(), arg.dtype, arg.device, alike
                if kind not in self._room:
                    self._room[kind] = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
                copies.append((at, self._room[kind]))
                holder = args if len(at) == 1 else args[at[0]]
                holder[at[-1]] = self._room[kind].copy_(arg)
        graph = Graph(self._session)
        result = graph.capture(lambda: function(list(args)))  # a list of its own: the function empties it
        graph.replay()
        leaves = torch.utils._pytree.tree_leaves(result)
        self._results |= {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
        self._graphs.append((graph, copies))
        return result

    def _replay(self, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        graph, copies = self._graphs[self._turn]
        for at, room in copies:
            value: Any = functools.reduce(operator.getitem, at, args)
            room.copy_(value)
        args.clear()
        return graph.replay()


def _tensors(args: list[Any]) -> Iterator[tuple[Place, Tensor]]:
    """The tensors on the GPU among the inputs of a piece, and where they are."""
    for i, arg in enumerate(args):
        if isinstance(arg, (list, tuple)):
            yield from (((i, j), each) for j, each in enumerate(arg) if on_gpu(each))
        elif on_gpu(arg):
            yield (i,), arg


_pieces: contextvars.ContextVar[Pieces | None] = contextvars.ContextVar("paged_ops.graphs.pieces", default=None)

# The ops that stay outside the pieces, by the names that they have in compiled graphs.
ATTENTION_OPS = [
    "paged_ops::paged_attention.list",
    "paged_ops::paged_attention_with_lse",
    "paged_ops::cascade_attention.list",
]


def check_pieces_exist() -> None:
    """Raises NotImplementedError if inductor cannot partition a graph at custom ops."""
    from torch._inductor import config, utils

    if not (hasattr(config, "custom_should_partition_ops") and hasattr(utils, "set_customized_partition_wrappers")):
        raise NotImplementedError(
            f"mode: expected torch 2.10 or newer for the piecewise modes, got {torch.__version__}"
        )


def compile_pieces(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """``torch.compile(fullgraph=True)`` by inductor, in pieces between the attention ops that can be captured.

    Without a runner in a piecewise mode it runs like any compiled function. A model may be compiled as a whole or layer
    by layer.

    Raises:
        NotImplementedError: before torch 2.10.
    """
    check_pieces_exist()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=_inductor_in_pieces)


def _inductor_in_pieces(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    from torch._inductor import utils
    from torch._inductor.compile_fx import compile_fx

    before = utils._unstable_customized_partition_wrapper.wrapper
    utils.set_customized_partition_wrappers(_wrap_piece)
    try:
        patches = {"graph_partition": True, "custom_should_partition_ops": ATTENTION_OPS}
        return compile_fx(module, inputs, config_patches=patches)
    finally:
        utils._unstable_customized_partition_wrapper.wrapper = before


def _wrap_piece(function: Callable[[list[Any]], Any], metadata: object) -> Callable[[list[Any]], Any]:
    def piece(args: list[Any]) -> Any:
        pieces = _pieces.get()
        return function(args) if pieces is None else pieces(function, args)

    return piece

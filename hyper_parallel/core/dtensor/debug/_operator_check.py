"""``check_replicas=True``: before an operator runs, its replicated arguments are compared."""
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.debug._meetings import Meetings, say_where
from hyper_parallel.core.dtensor.debug._replica_check import (
    ReplicaMismatchError,
    compare,
    name_layouts,
)
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform import get_platform

platform = get_platform()

# Operators that do not read their first argument, whose memory may never have been written.
_OVERWRITING = frozenset({
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
    "geometric_", "cauchy_", "log_normal_", "set_", "setitem_", "_foreach_zero_", "_foreach_copy_",
})

_blocks = itertools.count()


class OperatorCheck:
    """The checks of one block.

    Args:
        timeout: seconds to wait for the other ranks at each operator.
        name_of: the parameter path of a tensor, or None.
    """

    def __init__(self, timeout: float, name_of: Callable[[Any], str | None]) -> None:
        self._timeout = timeout
        self._name_of = name_of
        self._prefix = f"replicas/block {next(_blocks)}/"
        self._meetings: dict[tuple[int, ...], Meetings] = {}
        self._lock = threading.Lock()

    def check(self, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Return when all ranks of the operator's mesh hold what they are said to hold.

        A plain tensor beside DTensors is replicated on their mesh. What the operator does not
        read is left out. An operator without a replicated argument sends nothing.

        Raises:
            ReplicaMismatchError: they do not; see ``check_replicas``.
        """
        tensors = list(self._arguments(operator, args, kwargs))
        meshes = {tensor.device_mesh for _, tensor in tensors if isinstance(tensor, DTensor)}
        board = platform.board_of(None)
        if len(meshes) != 1 or board is None:
            return  # several meshes are refused by the dispatcher
        mesh = meshes.pop()
        if mesh.get_coordinate() is None:
            return
        entries = [entry for entry in name_layouts(tensors, mesh) if any(
            placement.is_replicate() and size > 1
            for placement, size in zip(entry.layout.placements, mesh.mesh_shape))]
        if not entries:
            return
        ranks = tuple(mesh.rank_list)
        with self._lock:
            if ranks not in self._meetings:
                self._meetings[ranks] = Meetings(board, self._prefix, ranks, self._timeout,
                                                 ReplicaMismatchError)
        compare(self._meetings[ranks], f"operator {operator!r}", entries)

    def leave(self, error: BaseException | None) -> None:
        """Tell those who still wait for this rank that it will not come."""
        why = "left the block"
        if error is not None:
            why += f" with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if self._meetings:
                say_where(self._prefix, why)
        for meetings in self._meetings.values():
            meetings.leave(why)

    def _arguments(self, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]
                   ) -> Iterator[tuple[str, Any]]:
        """The tensors that the operator reads, by their places and parameter paths."""
        if operator.endswith("_like") or operator.startswith("new_"):
            return
        skip = 1 if operator in _OVERWRITING else 0
        for place, value in (*list(enumerate(args))[skip:], *kwargs.items()):
            for name, tensor in _tensors(f"argument {place}", value):
                path = self._name_of(tensor)
                yield name if path is None else f"{name}, parameter {path!r}", tensor


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, platform.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _tensors(f"{name}[{index}]", entry)

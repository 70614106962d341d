"""Turns the events of the library into records: the half of ``CommDebugMode`` that listens."""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import (
    BACKWARD,
    FORWARD,
    AnnotateCall,
    CollectiveCall,
    DebugCall,
    OpCall,
    RedistributeCall,
    TensorInfo,
)
from hyper_parallel.core.dtensor.debug._call_tree import CallTree
from hyper_parallel.core.dtensor.debug._error_guard import ErrorGuard
from hyper_parallel.core.dtensor.debug._tensor_infos import (
    collective_group_size,
    local_info,
    tensor_info,
    tensors_in,
)
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TracedMove:
    """A redistribution as its observer knows it: the token between ``begin`` and ``end``.

    Attributes:
        recorder: who recorded it.
        tree: the tree it was recorded in. A recorder that is used again has another one.
        owner: the record that it happened under; None at the root.
        record: its own record; None where only a gradient will move.
    """

    recorder: Recorder
    tree: CallTree
    owner: DebugCall | None
    record: RedistributeCall | None


class Recorder:
    """Receives events and grows a tree. It is *closed* from its exit to its next entry.

    No method that is called by the observed program raises; the first error is kept and makes
    the trace incomplete.
    """

    def __init__(self) -> None:
        self._tree = CallTree()
        self._failure: str | None = None
        self._guard = ErrorGuard(self._note_failure)
        self._closed = False
        self._enclosing: tuple[Recorder, ...] = ()

    @property
    def _root_records(self) -> list[DebugCall]:
        return self._tree.roots

    @property
    def _call_stack(self) -> list[DebugCall]:
        return self._tree.stack

    @property
    def _comm_counts(self) -> dict[str, int]:
        return self._tree.counts

    @staticmethod
    def _extract_tensor_infos(*values: Any) -> list[TensorInfo]:
        """What is remembered of the tensors among values; tuples, lists and dicts are entered."""
        return [tensor_info(tensor) for tensor in tensors_in(*values)]

    @property
    def tree(self) -> CallTree:
        """The tree of the present or the last run."""
        return self._tree

    def still_open(self) -> Recorder | None:
        """This one, or the innermost one around it that has not exited; None without any."""
        return next((one for one in (self, *self._enclosing) if not one._closed), None)

    def encloses(self, other: Recorder) -> bool:
        """Whether the other one is this one or was entered inside it."""
        return other is self or self in other._enclosing

    def _on_op_dispatch_enter(self, op_name: str, op_call: Callable[..., Any] | None = None,
                              args: Sequence[Any] = (), kwargs: dict | None = None) -> None:
        if self._closed:
            # It exited on another thread, so the variable of this one still names it.
            heir = self.still_open()
            _debug_mode_observer.set(heir)
            if heir is not None:
                heir._on_op_dispatch_enter(op_name, op_call, args, kwargs)
            return
        with self._guard:
            record = OpCall(op_name)
            self._tree.open(record, self._tree.innermost)
            tensors = tensors_in(args, kwargs)
            record.input_infos = [tensor_info(tensor) for tensor in tensors]
            record.carried_makers = self._tree.makers.among(tensors)

    def _on_op_dispatch_exit(self, op_name: str, result: Any = None) -> None:
        with self._guard:
            record = self._tree.close(
                lambda one: isinstance(one, OpCall) and one.op_name == op_name)
            if record is not None:
                self._finish_op(record, result)
            elif self._closed:
                heir = self.still_open()
                if heir is not None:
                    heir._on_op_dispatch_exit(op_name, result)

    on_op_dispatch_enter = _on_op_dispatch_enter
    on_op_dispatch_exit = _on_op_dispatch_exit

    def _finish_op(self, record: OpCall, result: Any) -> None:
        """Note the results, and who made them Partial: this operator, or an earlier one."""
        carried, record.carried_makers = record.carried_makers or {}, None
        for tensor in tensors_in(result):
            info = tensor_info(tensor)
            record.output_infos.append(info)
            if not self._closed and info.is_dtensor:
                makers = {axis: carried.get(axis, record)
                          for axis, placement in enumerate(info.placements)
                          if placement.is_partial()}
                if makers:
                    self._tree.makers.remember(tensor, makers)

    def _on_collective_call(self, method_name: str, args: tuple, kwargs: dict,
                            result: Any) -> None:
        with self._guard:
            input_info, output_info = local_info(args, kwargs), local_info(result)
            around = self._tree.innermost
            self._tree.add_collective(CollectiveCall(
                method_name,
                group_size=collective_group_size(method_name, args, kwargs) or 0,
                input_shape=input_info and input_info.shape,
                output_shape=output_info and output_info.shape,
                input_dtype=input_info.dtype if input_info else "",
                phase=around.phase if isinstance(around, RedistributeCall) else FORWARD,
            ))

    def _on_module_event(self, module_fqn: str, event_type: str) -> None:
        with self._guard:
            if event_type == "enter":
                self._tree.open(AnnotateCall(module_fqn, event_type), self._tree.innermost)
            else:
                self._tree.close(
                    lambda one: isinstance(one, AnnotateCall) and one.module_fqn == module_fqn)

    def _on_move(self, tensor: Any, source: Layout, target: Layout, shape: Sequence[int],
                 steps: tuple) -> TracedMove:
        """A tensor begins to move in the forward pass."""
        tree = self._tree
        makers = tree.makers.of(tensor)
        reduced = [makers[axis] for axis, (old, new)
                   in enumerate(zip(source.placements, target.placements))
                   if axis in makers and old.is_partial() and old != new]
        # What finishes a sum belongs to the operator that left it unfinished.
        owner = reduced[0] if reduced else tree.innermost
        return self._open_move(owner, RedistributeCall(
            source.placements, target.placements, tuple(shape), FORWARD) if steps else None)

    def _on_move_backward(self, origin: TracedMove | None, source: Layout, target: Layout,
                          shape: Sequence[int], steps: tuple) -> TracedMove:
        """A gradient begins to move; it belongs where the tensor moved in the forward pass."""
        known = origin is not None and origin.tree is self._tree
        return self._open_move(origin.owner if known else None, RedistributeCall(
            source.placements, target.placements, tuple(shape), BACKWARD) if steps else None)

    def _open_move(self, owner: DebugCall | None, record: RedistributeCall | None) -> TracedMove:
        if record is not None:
            self._tree.open(record, owner)
        return TracedMove(self, self._tree, owner, record)

    def _on_move_end(self, move: TracedMove) -> None:
        with self._guard:
            if move.record is not None:
                move.tree.close(lambda one: one is move.record)

    def _note_failure(self, error: str) -> None:
        if self._failure is None:
            self._failure = error
            logger.warning("The trace is incomplete, the program goes on: %s", error)

"""Turns the events of the library into records: the half of ``CommDebugMode`` that listens."""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    RECOMPUTE,
    UNKNOWN,
    AnnotateCall,
    CollectiveCall,
    DebugCall,
    OpCall,
    RedistributeCall,
    TensorInfo,
)
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform.call_site import find_call_site, in_optimizer
from hyper_parallel.core.dtensor.debug._call_tree import CallTree, inherit
from hyper_parallel.core.dtensor.debug._error_guard import ErrorGuard
from hyper_parallel.core.dtensor.debug._fingerprints import (
    Fingerprint,
    FingerprintTaker,
    alike_on,
)
from hyper_parallel.core.dtensor.debug._issued import finished, issued_natively
from hyper_parallel.core.dtensor.debug._operator_check import OperatorCheck
from hyper_parallel.core.dtensor.debug._replica_check import ReplicaMismatchError
from hyper_parallel.core.dtensor.debug._report import TraceReport
from hyper_parallel.core.dtensor.debug._tensor_infos import collective_group, look
from hyper_parallel.core.dtensor.debug._traffic import axis_anywhere, axis_of
from hyper_parallel.core.dtensor.debug._verifier import Verifier
from hyper_parallel.core.dtensor.tensor_redistribution import OperandUse
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.traffic_adapter import NativeCall

platform = get_platform()
_NOTHING: list[TensorInfo] = []
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TracedMove:
    """A redistribution as its observer knows it: the token between ``begin`` and ``end``.

    Attributes:
        recorder: who recorded it.
        tree: the tree it was recorded in. A recorder that is used again has another one.
        owner: the record that it happened under; None at the root.
        record: its own record; None where only a gradient will move.
        use: the argument that it is for; None where no operator asked for it.
        call_site: the program's line.
        module, operator: whose it is, for a trace that does not hold the owner.
        mesh: the mesh that it moves on.
    """

    recorder: Recorder
    tree: CallTree
    owner: DebugCall | None
    record: RedistributeCall | None
    use: OperandUse | None
    call_site: str | None
    module: str | None
    operator: str | None
    mesh: DeviceMesh | None = None


class Recorder(TraceReport):
    """Receives events and grows a tree. It is *closed* from its exit to its next entry.

    No method that is called by the observed program raises; the first error is kept and makes
    the trace incomplete.
    """

    def __init__(self) -> None:
        super().__init__(CallTree())
        self._guard = ErrorGuard(self._note_failure)
        self._closed = False
        self._enclosing: tuple[Recorder, ...] = ()
        self._taker: FingerprintTaker | None = None
        self._traces_native = False
        self._verifier: Verifier | None = None
        self._operator_check: OperatorCheck | None = None
        # The modules of the parameters by their identity, while the mode keeps these alive.
        self._module_of_id: dict[int, str] = {}

    def _begin(self, max_records: int | None) -> None:
        """Forget what was recorded and be inside of the mode that is innermost now."""
        outer = _debug_mode_observer.get()
        self._enclosing = (outer, *outer._enclosing) if isinstance(outer, Recorder) else ()
        self._tree = CallTree(max_records)
        self._rank, self._world_size = platform.get_rank(), platform.get_world_size()
        self._failure = None

    @property
    def _call_stack(self) -> list[DebugCall]:
        return self._tree.stack

    @staticmethod
    def _extract_tensor_infos(*values: Any) -> list[TensorInfo]:
        """What is remembered of the tensors among values; tuples, lists and dicts are entered."""
        return look(*values)[1]

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
        # The lists come later, so that none is made in vain.
        tree, record = self._tree, OpCall(op_name, _NOTHING, _NOTHING, operator=op_name)
        try:
            tree.open_inside(record)
            tensors, record.input_infos = look(*args, kwargs) if kwargs else look(*args)
            if tree.makers:
                record.carried_makers = tree.makers.among(tensors)
            if self._operator_check is not None:
                self._operator_check.check(op_name, args, kwargs or {})
        except ReplicaMismatchError:
            tree.close(lambda one: one is record)
            raise
        except Exception as error:
            self._guard.report(error)
        except BaseException:
            # The operator will not begin, so that nobody would say that it ended.
            tree.close(lambda one: one is record)
            raise

    def _on_op_dispatch_exit(self, op_name: str, result: Any = None) -> None:
        try:
            record = self._tree.close_op(op_name)
            if record is not None:
                self._finish_op(record, result)
            elif self._closed:
                heir = self.still_open()
                if heir is not None:
                    heir._on_op_dispatch_exit(op_name, result)
        except Exception as error:
            self._guard.report(error)

    on_op_dispatch_enter = _on_op_dispatch_enter
    on_op_dispatch_exit = _on_op_dispatch_exit

    def _finish_op(self, record: OpCall, result: Any) -> None:
        """Note the results, and who made them Partial: this operator, or an earlier one."""
        carried, record.carried_makers = record.carried_makers, None
        tensors, infos = look(result)
        record.output_infos = infos
        if self._taker is not None and not self._closed:
            record.call_site = find_call_site()
            record.fingerprints = self._taker.of_outputs(tensors)
        for tensor, info in zip(tensors, infos):
            if info.partial_axes and not self._closed:
                self._tree.makers.remember(tensor, {
                    axis: carried.get(axis, record) if carried else record
                    for axis in info.partial_axes})

    def _on_collective_call(self, method_name: str, args: tuple, kwargs: dict, result: Any,
                            seconds: float = 0.0,
                            sized_group: tuple[Any, int | None] | None = None) -> Any:
        """Record a collective that ended; what is returned replaces its result, if not None.

        Args:
            method_name, args, kwargs, result: the call.
            seconds: how long it took.
            sized_group: its group and the number of its ranks, if that was found already.
        """
        with self._guard:
            sized_group = sized_group or collective_group(method_name, args, kwargs)
            record = finished(self._tree.kinds, method_name, args, kwargs, sized_group, result)
            self._add(record, seconds)
            if self._taker is not None:
                return self._taker.of_collective(
                    alike_on(method_name, record.ranks), result, self._noter(record))
        return None

    def _noter(self, record: CollectiveCall) -> Callable[[Fingerprint | None], None]:
        """Notes the fingerprint of a collective, which may come after the mode's end."""
        tree = self._tree

        def note(fingerprint: Fingerprint | None) -> None:
            if not self._closed and self._tree is tree:
                record.fingerprints = (fingerprint,)

        return note

    def _on_native_call(self, call: NativeCall, seconds: float) -> None:
        with self._guard:
            record = platform.run_undressed(issued_natively, (call,), {})
            if not call.continues or not self._tree.extend_last(record, seconds):
                self._add(record, seconds)

    def _add(self, record: CollectiveCall, seconds: float) -> None:
        """Put a collective that took so long, and has just ended, into the tree."""
        record.duration = seconds
        record.timestamp -= seconds
        owner = self._place(record)
        self._tree.add_collective(record, owner)

    def _check(self, record: CollectiveCall, group: Any) -> None:
        """Compare what is about to be issued with what the other ranks are about to issue."""
        if self._verifier is not None:
            with self._guard:
                owner = self._place(record) or self._tree.innermost
                if owner is not None:
                    inherit(record, owner)
            self._verifier.check(record, group)

    def _place(self, record: CollectiveCall) -> DebugCall | None:
        """Say why a collective happens; gives its owner where that is not what is open around."""
        around = self._tree.innermost
        if isinstance(around, RedistributeCall):
            record.phase, record.call_site = around.phase, around.call_site
            if around.operator == around.needed_by:
                record.argument = around.argument
            if record.ranks:
                record.axis = axis_of(around.mesh, record.ranks)
            return None
        record.axis = axis_anywhere(record.ranks) if record.ranks else None
        record.phase = self._phase(around)
        record.call_site = find_call_site()
        if around is None and record.phase == BACKWARD:
            return self._place_by_node(record)
        return None

    def _place_by_node(self, record: CollectiveCall) -> DebugCall | None:
        """Say whose gradient needs a collective of which only the running node tells.

        So it is where a reduction's gradient depends on the values, as for a product.
        """
        origin = platform.backward_origin()
        if isinstance(origin, TracedMove):
            record.module, record.operator = origin.module, origin.operator
            record.argument = origin.use and origin.use.argument
            record.call_site = origin.call_site
            if record.ranks and origin.mesh is not None:
                record.axis = axis_of(origin.mesh, record.ranks)
            return origin.owner if origin.tree is self._tree else None
        record.module = self._module_beside(origin)
        record.operator = UNKNOWN if origin is None else origin.operator
        record.argument = origin and origin.argument
        return None

    @staticmethod
    def _phase(owner: DebugCall | None) -> str:
        """The phase of what is not the gradient of anything that was seen."""
        recorded = platform.records_gradients()
        if platform.in_backward():
            # Gradients are computed unrecorded; a checkpoint repeats its forward recorded.
            return RECOMPUTE if recorded else BACKWARD
        if not recorded and in_optimizer():
            return OPTIMIZER
        return OUTSIDE if owner is None and not recorded else FORWARD

    def _on_fallback(self) -> None:
        for record in reversed(self._tree.stack):
            if isinstance(record, OpCall):
                record.fallback = True
                return

    def _on_module_event(self, module_fqn: str, event_type: str) -> None:
        with self._guard:
            if event_type == "enter":
                self._tree.open_inside(AnnotateCall(module_fqn, event_type, module=module_fqn))
            else:
                self._tree.close(
                    lambda one: isinstance(one, AnnotateCall) and one.module_fqn == module_fqn)

    def _on_move(self, tensor: Any, source: Layout, target: Layout, shape: Sequence[int],
                 steps: tuple, use: OperandUse | None = None) -> TracedMove:
        """A tensor begins to move in the forward pass."""
        tree = self._tree
        owner = around = tree.innermost
        # What finishes a sum belongs to the operator that left it unfinished.
        for axis, maker in tree.makers.of(tensor).items():
            old, new = source.placements[axis], target.placements[axis]
            if old.is_partial() and old != new:
                owner = maker
                break
        if use is None and isinstance(around, OpCall):
            use = OperandUse(around.op_name, None)  # a detour of the operator
        move = TracedMove(self, tree, owner, None, use, find_call_site(),
                          owner and owner.module, owner and owner.operator, source.device_mesh)
        if steps:
            self._open_move(move, source, target, shape, self._phase(owner))
        return move

    def _on_move_backward(self, origin: TracedMove | OperandUse | None, source: Layout,
                          target: Layout, shape: Sequence[int], steps: tuple) -> TracedMove:
        """A gradient begins to move; it belongs where the tensor moved in the forward pass."""
        if not isinstance(origin, TracedMove):
            operator = UNKNOWN if origin is None else origin.operator
            move = TracedMove(self, self._tree, None, None, origin, find_call_site(),
                              self._module_beside(origin), operator)
        else:
            owner = origin.owner if origin.tree is self._tree else None
            move = TracedMove(self, self._tree, owner, None, origin.use, origin.call_site,
                              origin.module, origin.operator)
        if steps:
            self._open_move(move, source, target, shape, BACKWARD)
        return move

    def _module_beside(self, use: OperandUse | None) -> str:
        """The module of an operator that ran before the trace, by its parameter."""
        parameter = use and use.parameter and use.parameter()
        return self._module_of_id.get(id(parameter), UNKNOWN)

    @staticmethod
    def _open_move(move: TracedMove, source: Layout, target: Layout, shape: Sequence[int],
                   phase: str) -> None:
        needed_by, argument = move.use[:2] if move.use else (None, None)
        move.record = RedistributeCall(
            source.placements, target.placements, tuple(shape), phase,
            tuple(source.device_mesh.alias_name), needed_by, module=move.module,
            operator=move.operator, argument=argument, call_site=move.call_site)
        move.record.mesh = source.device_mesh
        move.tree.open(move.record, move.owner)

    def _on_move_end(self, move: TracedMove) -> None:
        with self._guard:
            if move.record is not None:
                move.record.mesh = None
                move.tree.close(lambda one: one is move.record)

    def _note_failure(self, error: str) -> None:
        if self._failure is None:
            self._failure = error
            logger.warning("The trace is incomplete, the program goes on: %s", error)

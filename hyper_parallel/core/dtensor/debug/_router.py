"""Decides which mode an event belongs to: the innermost one, and nobody else.

The hooks in the platform and in redistribution are global to the process, the mode is a matter
of the context. So one router sits in those hooks while any mode is active, and asks at each
event who is innermost there and then.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor import tensor_redistribution
from hyper_parallel.core.dtensor.debug._collective_tracer import (
    COLLECTIVE_METHODS,
    OTHER_METHODS,
    CollectiveTracer,
)
from hyper_parallel.core.dtensor.debug._error_guard import ErrorGuard
from hyper_parallel.core.dtensor.debug._issued import issued, issued_natively
from hyper_parallel.core.dtensor.debug._prohibition import (
    check_fallback,
    check_move,
    prohibited,
)
from hyper_parallel.core.dtensor.debug._recorder import Recorder, TracedMove
from hyper_parallel.core.dtensor.debug._tensor_infos import collective_group
from hyper_parallel.core.dtensor.debug._thread_list import ThreadList
from hyper_parallel.core.dtensor.tensor_redistribution import OperandUse
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.traffic_adapter import NativeCall

platform = get_platform()


class EventRouter:
    """The redistribution's observer and the tracer's callback, on behalf of every active mode."""

    def __init__(self) -> None:
        self._active: tuple[Recorder, ...] = ()  # in order of entry; replaced whole
        self._watchers = 0  # how many need to be told of moves
        self._lock = threading.Lock()
        self._tracer = CollectiveTracer(self._on_collective, before=self._before_collective,
                                        methods=(*COLLECTIVE_METHODS, *OTHER_METHODS))
        self._end_watch: Callable[[], None] | None = None  # of the framework's own calls
        self._open: ThreadList[TracedMove] = ThreadList()  # moves that have begun
        self._guard = ErrorGuard(self._note_failure)

    def enter(self, recorder: Recorder) -> None:
        """A mode becomes active; the first one installs the hooks."""
        with self._lock:
            if recorder._traces_native and self._end_watch is None:
                self._end_watch = platform.watch_native(self)
            if not self._active:
                self._tracer.install()
            self._active = (*self._active, recorder)
        self.watch_moves()

    def leave(self, recorder: Recorder) -> None:
        """A mode is active no longer; the last one removes the hooks."""
        with self._lock:
            self._active = tuple(one for one in self._active if one is not recorder)
            if not self._active:
                self._tracer.uninstall()
            if self._end_watch is not None and not any(
                    one._traces_native for one in self._active):
                self._end_watch()
                self._end_watch = None
        self.unwatch_moves()

    def watch_moves(self) -> None:
        """Be told of moves, as often as ``unwatch_moves`` has not been called yet."""
        with self._lock:
            self._watchers += 1
            tensor_redistribution._redistribute_observer = self

    def unwatch_moves(self) -> None:
        """Undo one ``watch_moves``; the last one empties the slot."""
        with self._lock:
            self._watchers -= 1
            if self._watchers == 0:
                tensor_redistribution._redistribute_observer = None

    def receiver(self, origin: TracedMove | OperandUse | None = None) -> Recorder | None:
        """The mode that an event on this thread belongs to, or None when none is active.

        Args:
            origin: for a gradient, the forward move that it belongs to.
        """
        observer = _debug_mode_observer.get()
        if isinstance(observer, Recorder):
            innermost = observer.still_open()
            if innermost is not None:
                return innermost
        # A thread without a mode, such as autograd's own: what it does is on behalf of others.
        active = self._active
        if isinstance(origin, TracedMove) and origin.tree is origin.recorder.tree:
            for recorder in reversed(active):
                if origin.recorder.encloses(recorder):
                    return recorder
        return active[-1] if active else None

    def begin(self, tensor: Any, source: Layout, target: Layout, shape: Sequence[int],
              steps: tuple, use: OperandUse | None = None) -> TracedMove | OperandUse | None:
        """A tensor moves; see ``tensor_redistribution.RedistributeObserver``."""
        if use is not None and steps:
            check_move(use, source, target)
        with self._guard:
            recorder = self.receiver()
            if recorder is not None:
                return self._opened(recorder._on_move(tensor, source, target, shape, steps, use))
        return use

    def fallback(self, operator: str) -> None:
        """An operator runs on gathered operands."""
        check_fallback(operator)
        with self._guard:
            recorder = self.receiver()
            if recorder is not None:
                recorder._on_fallback()

    def begin_backward(self, origin: TracedMove | OperandUse | None, source: Layout, target: Layout,
                       shape: Sequence[int], steps: tuple) -> TracedMove | None:
        """A gradient moves, perhaps on another thread than the tensor did."""
        with self._guard:
            recorder = self.receiver(origin)
            if recorder is not None:
                return self._opened(
                    recorder._on_move_backward(origin, source, target, shape, steps))
        return None

    def end(self, token: TracedMove | OperandUse | None) -> None:
        """The move is done."""
        moves = self._open.items
        if isinstance(token, TracedMove) and token in moves:
            del moves[moves.index(token):]
            token.recorder._on_move_end(token)

    def _opened(self, move: TracedMove) -> TracedMove:
        self._open.items.append(move)
        return move

    def before_native(self, call: NativeCall) -> None:
        """The framework is about to make a call; see ``Platform.watch_native``."""
        recorder = self._native_receiver(call)
        if recorder is not None and recorder._verifier is not None:
            record = None
            with self._guard:
                record = platform.run_undressed(issued_natively, (call,), {})
            if record is not None:
                recorder._check(record, call.group)

    def after_native(self, call: NativeCall, seconds: float) -> None:
        """The framework made a call."""
        recorder = self._native_receiver(call)
        if recorder is not None:
            recorder._on_native_call(call, seconds)

    def native_lost(self, why: str) -> None:
        """The framework is about to make a call of which nothing is known."""
        self._note_failure(why)

    def _native_receiver(self, call: NativeCall) -> Recorder | None:
        """Whose a call of the framework is; nobody's if the library makes it."""
        if self._tracer.running() or platform.get_group_size(call.group) == 1:
            return None
        recorder = self._collective_receiver()
        return recorder if recorder is not None and recorder._traces_native else None

    def _collective_receiver(self) -> Recorder | None:
        moves = self._open.items
        return moves[-1].recorder if moves else self.receiver()

    def _before_collective(self, method_name: str, args: tuple, kwargs: dict) -> None:
        recorder = self._collective_receiver()
        if recorder is not None and recorder._verifier is not None:
            record = None
            with self._guard:
                group, size = collective_group(method_name, args, kwargs)
                record = issued(method_name, args, kwargs, group, size)
            if record is not None and record.group_size != 1:
                recorder._check(record, group)

    def _on_collective(self, method_name: str, args: tuple, kwargs: dict, result: Any) -> Any:
        with self._guard:
            recorder = self._collective_receiver()
            if recorder is not None:
                sized_group = collective_group(method_name, args, kwargs)
                # A group of one has nobody to talk to, the platform did nothing.
                if sized_group[1] != 1:
                    return recorder._on_collective_call(method_name, args, kwargs, result,
                                                        self._tracer.seconds(), sized_group)
        return None

    def _note_failure(self, error: str) -> None:
        for recorder in self._active:
            recorder._note_failure(error)


router = EventRouter()


@contextmanager
def forbid_implicit(action: str = "raise", *, strict: bool = False) -> Iterator[None]:
    """A context in which an operator may not redistribute its operands, nor run without a rule.

    What the program asks for itself (``redistribute``, ``full_tensor``, a parallel style's
    layouts) is allowed, and so are the gradients of what was allowed. It holds for the thread
    and the task that entered it.

    Args:
        action: ``"raise"`` stops the operator before anything is sent, ``"warn"`` only warns.
        strict: forbid also to finish a Partial, which is allowed otherwise.

    Raises:
        ImplicitRedistributionError: inside, from the operator; it names the operator, the
            argument, both layouts and the program's line.
        ValueError: another action.
    """
    with prohibited(action, strict):
        router.watch_moves()
        try:
            yield
        finally:
            router.unwatch_moves()

"""Decides which mode an event belongs to: the innermost one, and nobody else.

The hooks in the platform and in redistribution are global to the process, the mode is a matter
of the context. So one router sits in those hooks while any mode is active, and asks at each
event who is innermost there and then.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor import tensor_redistribution
from hyper_parallel.core.dtensor.debug._collective_tracer import CollectiveTracer
from hyper_parallel.core.dtensor.debug._error_guard import ErrorGuard
from hyper_parallel.core.dtensor.debug._recorder import Recorder, TracedMove
from hyper_parallel.core.dtensor.debug._tensor_infos import collective_group_size
from hyper_parallel.core.dtensor.debug._thread_list import ThreadList
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer


class EventRouter:
    """The redistribution's observer and the tracer's callback, on behalf of every active mode."""

    def __init__(self) -> None:
        self._active: tuple[Recorder, ...] = ()  # in order of entry; replaced whole
        self._lock = threading.Lock()
        self._tracer = CollectiveTracer(self._on_collective)
        self._open: ThreadList[TracedMove] = ThreadList()  # moves that have begun
        self._guard = ErrorGuard(self._note_failure)

    def enter(self, recorder: Recorder) -> None:
        """A mode becomes active; the first one installs the hooks."""
        with self._lock:
            if not self._active:
                self._tracer.install()
                tensor_redistribution._redistribute_observer = self
            self._active = (*self._active, recorder)

    def leave(self, recorder: Recorder) -> None:
        """A mode is active no longer; the last one removes the hooks."""
        with self._lock:
            self._active = tuple(one for one in self._active if one is not recorder)
            if not self._active:
                tensor_redistribution._redistribute_observer = None
                self._tracer.uninstall()

    def receiver(self, origin: TracedMove | None = None) -> Recorder | None:
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
        if origin is not None and origin.tree is origin.recorder.tree:
            for recorder in reversed(active):
                if origin.recorder.encloses(recorder):
                    return recorder
        return active[-1] if active else None

    def begin(self, tensor: Any, source: Layout, target: Layout, shape: Sequence[int],
              steps: tuple) -> TracedMove | None:
        """A tensor moves; see ``tensor_redistribution.RedistributeObserver``."""
        with self._guard:
            recorder = self.receiver()
            if recorder is not None:
                return self._opened(recorder._on_move(tensor, source, target, shape, steps))
        return None

    def begin_backward(self, origin: TracedMove | None, source: Layout, target: Layout,
                       shape: Sequence[int], steps: tuple) -> TracedMove | None:
        """A gradient moves, perhaps on another thread than the tensor did."""
        with self._guard:
            recorder = self.receiver(origin)
            if recorder is not None:
                return self._opened(
                    recorder._on_move_backward(origin, source, target, shape, steps))
        return None

    def end(self, token: TracedMove | None) -> None:
        """The move is done."""
        moves = self._open.items
        if token is not None and token in moves:
            del moves[moves.index(token):]
            token.recorder._on_move_end(token)

    def _opened(self, move: TracedMove) -> TracedMove:
        self._open.items.append(move)
        return move

    def _on_collective(self, method_name: str, args: tuple, kwargs: dict, result: Any) -> None:
        with self._guard:
            moves = self._open.items
            recorder = moves[-1].recorder if moves else self.receiver()
            # A group of one has nobody to talk to, the platform did nothing.
            if recorder is not None and collective_group_size(method_name, args, kwargs) != 1:
                recorder._on_collective_call(method_name, args, kwargs, result)

    def _note_failure(self, error: str) -> None:
        for recorder in self._active:
            recorder._note_failure(error)


router = EventRouter()

"""Sees every collective of the platform, by replacing its staticmethods while somebody looks.

The methods of a class are replaced once, whoever looks and however often: the last tracer to go
puts the original descriptors back, in whichever order the tracers come and go.
"""
from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.debug._error_guard import ErrorGuard
from hyper_parallel.platform import get_platform

logger = logging.getLogger(__name__)

COLLECTIVE_METHODS = (
    "differentiable_all_gather_concat",
    "differentiable_all_to_all",
    "differentiable_all_reduce",
    "differentiable_reduce_scatter",
    "differentiable_all_to_all_single",
    "differentiable_all_to_all_single_async",
)

OTHER_METHODS = ("broadcast", "scatter", "all_reduce_async")
"""What else the library sends: whole tensors to spread, the state of random generators, and the
gradients of replicated modules."""

CollectiveCallback = Callable[[str, tuple, dict, Any], Any]
Announcement = Callable[[str, tuple, dict], None]

_patch_lock = threading.Lock()


class CollectiveTracer:
    """Calls back after each collective of a platform class.

    Args:
        callback: called as ``callback(method_name, args, kwargs, result)`` after the collective
            returned, on the thread that called it. A collective that another collective of the
            class calls is part of that one and not reported. An exception of the callback never
            reaches the caller of the collective; the first one is logged. What it returns, if it
            is not None, the caller gets in place of the result.
        before: called as ``before(method_name, args, kwargs)`` before the collective begins. What
            it raises reaches the caller, and nothing is sent.
        platform_cls: the class whose staticmethods are traced; by default that of
            ``get_platform()`` at the time of ``install``. Methods that its body does not define
            are skipped (MindSpore has no ``differentiable_all_to_all_single``).
        methods: names of the methods to trace.
    """

    def __init__(self, callback: CollectiveCallback, platform_cls: type | None = None,
                 before: Announcement | None = None,
                 methods: Sequence[str] = COLLECTIVE_METHODS) -> None:
        self.methods = frozenset(methods)
        self._callback = callback
        self._before = before
        self._platform_cls = platform_cls
        self._patch: _ClassPatch | None = None
        self._guard = ErrorGuard(self._note_error)
        self._noted = False

    def install(self) -> None:
        """Start to report. Does nothing when already installed."""
        with _patch_lock:
            if self._patch is None:
                self._patch = _ClassPatch.of(self._platform_cls or type(get_platform()))
                self._patch.add(self)

    def uninstall(self) -> None:
        """Stop to report; the last one restores the class. Does nothing when not installed."""
        with _patch_lock:
            if self._patch is not None:
                self._patch.remove(self)
                self._patch = None

    def announce(self, method_name: str, args: tuple, kwargs: dict) -> None:
        """Say that a collective is about to begin."""
        if self._before is not None:
            self._before(method_name, args, kwargs)

    def report(self, method_name: str, args: tuple, kwargs: dict, result: Any) -> Any:
        """Hand one finished collective to the callback; gives the result to go on with."""
        replaced = None
        with self._guard:
            replaced = self._callback(method_name, args, kwargs, result)
        return result if replaced is None else replaced

    def seconds(self) -> float:
        """How long the collective took that is being reported, on this thread."""
        return 0.0 if self._patch is None else self._patch.seconds()

    def running(self) -> bool:
        """Whether a collective of the class runs on this thread."""
        return self._patch is not None and self._patch.running()

    def _note_error(self, error: str) -> None:
        if not self._noted:
            self._noted = True
            logger.warning("A callback on collectives failed, the program goes on: %s", error)


class _ClassPatch:
    """The replaced methods of one class and the tracers that look at it."""

    _of_class: dict[type, _ClassPatch] = {}

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._tracers: tuple[CollectiveTracer, ...] = ()  # replaced whole: wrappers take no lock
        self._originals: dict[str, staticmethod] = {}
        self._calls = threading.local()

    @classmethod
    def of(cls, patched: type) -> _ClassPatch:
        """The one patch of a class."""
        return cls._of_class.setdefault(patched, cls(patched))

    def add(self, tracer: CollectiveTracer) -> None:
        """Report to a tracer; replaces the methods that no earlier one asked for."""
        for name in tracer.methods - self._originals.keys():
            # The descriptor is kept, not the function behind it, so that the very same object
            # can be put back.
            descriptor = self._cls.__dict__.get(name)
            if isinstance(descriptor, staticmethod):
                self._originals[name] = descriptor
                type.__setattr__(self._cls, name,
                                 staticmethod(self._make_wrapper(descriptor.__func__, name)))
        self._tracers = (*self._tracers, tracer)

    def remove(self, tracer: CollectiveTracer) -> None:
        """Report to it no longer; the last one restores the methods."""
        self._tracers = tuple(other for other in self._tracers if other is not tracer)
        if not self._tracers:
            for name, descriptor in self._originals.items():
                type.__setattr__(self._cls, name, descriptor)
            del self._of_class[self._cls]

    def seconds(self) -> float:
        """Seconds from the beginning to the end of this thread's last collective."""
        return getattr(self._calls, "seconds", 0.0)

    def running(self) -> bool:
        """Whether this thread is inside of a collective."""
        return getattr(self._calls, "running", False)

    def _make_wrapper(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        calls = self._calls

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(calls, "running", False):
                return original(*args, **kwargs)
            for tracer in self._tracers:
                if name in tracer.methods:
                    tracer.announce(name, args, kwargs)
            calls.running = True
            began = time.perf_counter()
            try:
                result = original(*args, **kwargs)
            finally:
                calls.running = False
                calls.seconds = time.perf_counter() - began
            for tracer in self._tracers:
                if name in tracer.methods:
                    result = tracer.report(name, args, kwargs, result)
            return result

        return wrapper

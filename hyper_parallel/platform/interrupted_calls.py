"""Tells of modules whose call ended by something that is no ``Exception``.

The frameworks run the hooks that they promise to run always (``always_call``) after an
``Exception`` only, not after a ``KeyboardInterrupt``.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Optional

_Callback = Callable[[Any], None]


class InterruptedCalls:
    """The function through which a class of modules is called, replaced while somebody watches.

    Args:
        cls: the class.
        name: the method's name.
    """

    def __init__(self, cls: type, name: str) -> None:
        self._cls = cls
        self._name = name
        self._callbacks: tuple[_Callback, ...] = ()  # replaced whole: calls take no lock
        self._original: Optional[Callable[..., Any]] = None
        self._lock = threading.Lock()

    def add(self, callback: _Callback) -> None:
        """Tell one more; the first one replaces the function."""
        with self._lock:
            if self._original is None:
                self._original = original = vars(self._cls)[self._name]
                setattr(self._cls, self._name, self._telling(original))
            self._callbacks = (*self._callbacks, callback)

    def remove(self, callback: _Callback) -> None:
        """Tell it no longer; the last one puts the function back."""
        with self._lock:
            self._callbacks = tuple(one for one in self._callbacks if one is not callback)
            if not self._callbacks and self._original is not None:
                setattr(self._cls, self._name, self._original)
                self._original = None

    def _telling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(module, *args, **kwargs)
            except Exception:
                raise
            except BaseException:
                for callback in self._callbacks:
                    callback(module)
                raise

        return call

    def watch(self, callback: _Callback) -> Callable[[], None]:
        """Call back for each such module; see ``Platform.watch_interrupted_calls``."""
        self.add(callback)
        return lambda: self.remove(callback)

"""Tells of modules whose call ended by something that is no ``Exception``.

torch runs the hooks that it promises to run always (``always_call``) after an ``Exception`` only,
not after a ``KeyboardInterrupt``.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Optional

from torch import nn

_Callback = Callable[[nn.Module], None]


class _Watch:
    """The function below ``Module.__call__``, replaced while somebody wants to know."""

    def __init__(self) -> None:
        self._callbacks: tuple[_Callback, ...] = ()  # replaced whole: calls take no lock
        self._original: Optional[Callable[..., Any]] = None
        self._lock = threading.Lock()

    def add(self, callback: _Callback) -> None:
        """Tell one more; the first one replaces the function."""
        with self._lock:
            if self._original is None:
                self._original = original = vars(nn.Module)["_call_impl"]
                setattr(nn.Module, "_call_impl", self._telling(original))
            self._callbacks = (*self._callbacks, callback)

    def remove(self, callback: _Callback) -> None:
        """Tell it no longer; the last one puts the function back."""
        with self._lock:
            self._callbacks = tuple(one for one in self._callbacks if one is not callback)
            if not self._callbacks and self._original is not None:
                setattr(nn.Module, "_call_impl", self._original)
                self._original = None

    def _telling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(module, *args, **kwargs)
            except Exception:
                raise
            except BaseException:
                for callback in self._callbacks:
                    callback(module)
                raise

        return call


_watch = _Watch()


def watch_interrupted_calls(callback: _Callback) -> Callable[[], None]:
    """Call back for each such module; see ``Platform.watch_interrupted_calls``."""
    _watch.add(callback)
    return lambda: _watch.remove(callback)

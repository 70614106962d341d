"""Keeps a fault of the recorder away from the program that it watches."""
from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType


class ErrorGuard:
    """A context that reports an ``Exception`` and goes on; it may be entered again and again.

    ``KeyboardInterrupt`` and its like are not errors and pass.

    Args:
        note: called with one line that describes the error. The error itself is not kept, since
            its traceback holds the tensors of every frame.
    """

    __slots__ = ("_note",)

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.report(error)
        return True

    def report(self, error: Exception) -> None:
        """Report an error that was caught without the context, which costs two calls."""
        self._note(traceback.format_exception_only(error)[-1].strip())

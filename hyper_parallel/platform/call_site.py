"""Where the program is: its own line, and whether an optimizer is at work."""
from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from types import FrameType

from hyper_parallel.platform.choice import get_platform

_LIBRARY = __name__.partition(".")[0]
_FRAMEWORK = get_platform().Tensor.__module__.partition(".")[0]


def _folder(package: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(sys.modules[package].__file__)), "")


_FOREIGN = tuple(_folder(package) for package in (_LIBRARY, _FRAMEWORK))
_OPTIMIZERS = tuple(_folder(_FRAMEWORK) + os.path.join(*parts, "")
                    for parts in (("optim",), ("nn", "optim")))
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
# Packages that were installed live inside the standard library's folder, but are not part of it.
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    """Whether code of a file is the program's, and not the library's, framework's or Python's."""
    if file.startswith("<") or file.startswith(_FOREIGN):
        return False
    return not file.startswith(_STANDARD) or file.startswith(_INSTALLED)


def _users_frame() -> tuple[int, FrameType | None]:
    """The innermost frame of the program itself, and how far out it is from the caller's caller."""
    frame: FrameType | None = sys._getframe(2)
    distance = 0
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame, distance = frame.f_back, distance + 1
    return distance, frame


def find_call_site() -> str | None:
    """``file:line`` of the innermost frame of the program itself; None where there is none.

    On a thread that the framework runs, such as a backward pass', there may be none.
    """
    _, frame = _users_frame()
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def users_stack_level() -> int:
    """The ``stacklevel`` with which the caller's warning points at the program's own line."""
    return _users_frame()[0] + 1


def in_optimizer() -> bool:
    """Whether an optimizer of the framework, or one built on it, called what runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back
    return False

"""``torch.masked`` on DTensors.

Its functions are made of operators that are dispatched, but they ask each tensor for its memory
layout first, where a DTensor answers how it is spread.  :func:`install` replaces them by functions
in which a DTensor answers as any other tensor does.
"""
from __future__ import annotations

from functools import wraps
from typing import Any, Callable

import torch
from torch.masked import _ops as masked

from hyper_parallel.platform.torch.dtensor_base import memory_layouts


def _with_memory_layouts(function: Callable) -> Callable:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = memory_layouts.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            memory_layouts.reset(token)

    return run


def install() -> None:
    """Replace the functions of ``torch.masked``."""
    for name in (*masked.__all__, "logaddexp"):
        setattr(torch.masked, name, _with_memory_layouts(getattr(masked, name)))

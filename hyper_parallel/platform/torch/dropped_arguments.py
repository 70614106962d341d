"""Functions of PyTorch that do not tell a tensor's class all that they were called with.

``l1_loss`` keeps its weights to itself and ``chain_matmul`` its ``out``, so that a DTensor's
result would be another one.  :func:`install` replaces them by functions that, when called with such
an argument, run their own body, whose operators are dispatched.
"""
from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from hyper_parallel.platform.torch.operator_names import decomposed

_DROPPED = ((functional, "l1_loss", "weight", 5), (torch, "chain_matmul", "out", None))


def install() -> None:
    """Replace the functions."""
    for module, name, argument, position in _DROPPED:
        _open_with(module, name, argument, position)


def _open_with(module: ModuleType, name: str, argument: str, position: int | None) -> None:
    """Make a function run its body where ``argument`` is given, by name or at ``position``."""
    function = getattr(module, name)
    body = decomposed(function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get(argument)
        if position is not None and len(args) > position:
            given = args[position]
        return (function if given is None else body)(*args, **kwargs)

    setattr(module, name, run)

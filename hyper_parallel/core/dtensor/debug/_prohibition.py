"""``forbid_implicit``: operators may not move what the program has not moved itself."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from hyper_parallel.core.dtensor.debug._call_records import placements_text
from hyper_parallel.platform.call_site import find_call_site
from hyper_parallel.core.dtensor.tensor_redistribution import OperandUse
from hyper_parallel.core.layout import Layout

ACTIONS = ("raise", "warn")


class Prohibition(NamedTuple):
    """What happens to an implicit move: ``"raise"`` or ``"warn"``, sums to finish included."""

    action: str
    strict: bool


class ImplicitRedistributionError(RuntimeError):
    """An operator needed a redistribution inside ``forbid_implicit``."""


class ImplicitRedistributionWarning(UserWarning):
    """The same, where it was only to be warned of."""


_prohibition: ContextVar[Prohibition | None] = ContextVar("_prohibition", default=None)


@contextmanager
def prohibited(action: str, strict: bool) -> Iterator[None]:
    """Forbid implicit moves to what runs inside; see ``forbid_implicit``."""
    if action not in ACTIONS:
        raise ValueError(f"forbid_implicit takes the action 'raise' or 'warn', but got {action!r}.")
    token = _prohibition.set(Prohibition(action, strict))
    try:
        yield
    finally:
        _prohibition.reset(token)


def check_move(use: OperandUse, source: Layout, target: Layout) -> None:
    """Object to a move that an operator needs, if that is forbidden here."""
    prohibition = _prohibition.get()
    if prohibition is None or not prohibition.strict and _only_finishes_sums(source, target):
        return
    _object(prohibition, f"{use.operator!r} needs its argument {use.argument} in another layout: "
            f"{placements_text(source.placements)} -> {placements_text(target.placements)}")


def check_fallback(operator: str) -> None:
    """Object to an operator that gathers what it works on, if that is forbidden here."""
    prohibition = _prohibition.get()
    if prohibition is not None:
        _object(prohibition, f"{operator!r} has no rule for its operands, which are gathered")


def _only_finishes_sums(source: Layout, target: Layout) -> bool:
    return all(old == new or old.is_partial()
               for old, new in zip(source.placements, target.placements))


def _object(prohibition: Prohibition, what: str) -> None:
    message = (f"implicit redistribution is forbidden here, but {what} (at {find_call_site()}); "
               "call redistribute() before the operator, or leave it outside of forbid_implicit.")
    if prohibition.action == "raise":
        raise ImplicitRedistributionError(message)
    warnings.warn(ImplicitRedistributionWarning(message), stacklevel=2)

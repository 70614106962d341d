"""``verify="online"``: the ranks of a group agree on each collective before they issue it.

Before a call the members meet (see ``Meetings``), each with a note of what it is about to do.
"""
from __future__ import annotations

import itertools
import json
import threading
from typing import Any

from hyper_parallel.core.dtensor.debug._agreement import (
    between_two,
    disagreement,
    signature,
    told,
)
from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall
from hyper_parallel.core.dtensor.debug._meetings import Meetings, say_where
from hyper_parallel.platform import get_platform

platform = get_platform()

_blocks = itertools.count()


class CollectiveMismatchError(RuntimeError):
    """The ranks of a group were about to issue different collectives, or one of them none."""


class Verifier:
    """The calls of one block.

    Args:
        timeout: seconds to wait for the other ranks at each call.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._block = next(_blocks)
        self._groups: dict[Any, Meetings | None] = {}
        self._lock = threading.Lock()

    def check(self, record: CollectiveCall, group: Any) -> None:
        """Return when all members of the group are about to do the same.

        Raises:
            CollectiveMismatchError: they are not, on every member that comes; the message has the
                group, the number of the call in it and what each rank is about to do.
        """
        if between_two(record):
            return
        with self._lock:
            if group not in self._groups:
                board = platform.board_of(group)
                self._groups[group] = board and Meetings(
                    board, f"{self._block}/", record.ranks, self._timeout, CollectiveMismatchError)
            meetings = self._groups[group]
        if meetings is None:
            return
        notes = meetings.meet(json.dumps(signature(record)), told(record))
        if len({note for note, _ in notes.values()}) > 1:
            raise CollectiveMismatchError(disagreement(
                record.ranks, meetings.number, {rank: text for rank, (_, text) in notes.items()}))

    def leave(self, error: BaseException | None) -> None:
        """Tell those who still wait for this rank that it will not come."""
        why = "left the block"
        if error is not None:
            why += f" with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if self._groups:
                say_where(f"{self._block}/", why)
        for meetings in self._groups.values():
            if meetings is not None:
                meetings.leave(why)

"""``verify="online"``: the ranks of a group agree on each collective before they issue it.

Before a call each member leaves a note of what it is about to do on the group's board, waits for
the notes of the others, and compares. The board is no collective, so that it works where one
would hang. Whoever waits no longer settles the verdict on the call; it can be settled once, so
that all members act alike: a rank that comes late finds it and raises as the others did.

The keys on a board, below the number of the block (a ``with`` statement of a verifying mode):

    NUMBER/RANK      the note of one rank on the call of that number in the group
    NUMBER/verdict   "met" when somebody saw all notes, otherwise why the call is off
    left/RANK        that a rank left the block, and why
    at/RANK          on the default group's board: what a rank waits for that waits long, or why
                     it left the block

A rank that has all notes on one call knows that everybody is done with the one before, and erases
its note on that, so that a board holds two calls of each group at most.
"""
from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

from hyper_parallel.core.dtensor.debug._agreement import (
    between_two,
    disagreement,
    signature,
    told,
)
from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.traffic_adapter import Board

platform = get_platform()

_MET = "met"
_FIRST_PAUSE, _LONGEST_PAUSE = 5e-5, 0.01  # seconds between two looks at the board
_PATIENCE = 0.2  # seconds after which a rank says what it waits for, and asks who has left

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
        self._groups: dict[Any, _GroupCalls | None] = {}
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
                self._groups[group] = board and _GroupCalls(
                    board, f"{self._block}/", record.ranks, self._timeout)
            calls = self._groups[group]
        if calls is not None:
            calls.check(record)

    def leave(self, error: BaseException | None) -> None:
        """Tell those who still wait for this rank that it will not come."""
        why = "left the block"
        if error is not None:
            why += f" with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._say_gone(why)
        for calls in self._groups.values():
            if calls is not None:
                calls.leave(why)

    def _say_gone(self, why: str) -> None:
        """For those who wait in a group in which this rank has not begun a call."""
        world = platform.board_of(None) if self._groups else None
        if world is not None:
            world.write(f"{self._block}/at/{platform.get_rank()}", why)


class _GroupCalls:
    """The calls in one group, numbered from 0."""

    def __init__(self, board: Board, prefix: str, ranks: tuple[int, ...], timeout: float) -> None:
        self._board = board
        self._prefix = prefix
        self._ranks = ranks
        self._timeout = timeout
        self._own = platform.get_rank()
        self._number = itertools.count()
        self._last = -1
        self._last_told: dict[int, str] = {}

    def check(self, record: CollectiveCall) -> None:
        """Meet the other members at the next call."""
        number = self._last = next(self._number)
        note = json.dumps([signature(record), told(record)])
        self._board.write(self._key(number, self._own), note)
        try:
            notes = self._meet(number, told(record))
        except CollectiveMismatchError:
            raise
        except BaseException as error:
            # Nobody shall begin a call that this rank will not come to.
            self._settle(number, f"rank {self._own} was stopped by {type(error).__name__}")
            raise
        parts = dict(zip(self._ranks, map(json.loads, notes)))
        self._last_told = {rank: text for rank, (_, text) in parts.items()}
        self._erase(number - 1, self._own)
        if any(found != parts[self._own][0] for found, _ in parts.values()):
            raise CollectiveMismatchError(disagreement(self._ranks, number, self._last_told))

    def leave(self, why: str) -> None:
        """Say that this rank comes no more; the last one tidies up."""
        self._board.write(self._left(self._own), why)
        left = [self._left(rank) for rank in self._ranks]
        if self._board.has(left):
            for rank in self._ranks:
                self._erase(self._last, rank)
            self._board.erase(left)

    def _meet(self, number: int, own_part: str) -> list[str]:
        """The notes of all members on a call, in the order of the group."""
        keys = [self._key(number, rank) for rank in self._ranks]
        began = time.monotonic()
        pause, waiting = _FIRST_PAUSE, None
        try:
            while True:
                notes = self._board.read(keys)
                if notes is not None:
                    self._go_on(self._settle(number, _MET), number)
                    return notes
                waited = time.monotonic() - began
                if waited > min(_PATIENCE, self._timeout):
                    waiting = waiting or self._say_waiting(number, own_part)
                    why = self._absence(keys, waited)
                    if why is not None:
                        self._go_on(self._settle(number, why), number)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            if waiting is not None:
                waiting.erase([self._at(self._own)])

    def _go_on(self, verdict: str, number: int) -> None:
        """Raise unless everybody came; where this rank was about to give up but the others had
        seen its note already, it finds theirs at its next look."""
        if verdict != _MET:
            raise CollectiveMismatchError(f"group {self._ranks}, call {number}: {verdict}")

    def _absence(self, keys: list[str], waited: float) -> str | None:
        """Why the call will not come about; None while it may."""
        notes = {rank: self._board.peek(key) for rank, key in zip(self._ranks, keys)}
        left = [rank for rank, note in notes.items()
                if note is None and self._board.has([self._left(rank)])]
        if None not in notes.values() or not left and waited < self._timeout:
            return None
        return "\n".join(["not all of its ranks come", *(
            f"  rank {rank}: {self._whereabouts(rank) if note is None else json.loads(note)[1]}"
            for rank, note in notes.items())])

    def _whereabouts(self, rank: int) -> str:
        """What is known of a rank that did not come."""
        left = self._board.peek(self._left(rank))
        if left is not None:
            return left
        world = platform.board_of(None)
        place = world and world.peek(self._at(rank))
        if place is not None:
            return place
        last = self._last_told.get(rank)
        known = "nothing before in this group" if last is None else f"its last call here was {last}"
        return f"did not come within {self._timeout:g} s; {known}"

    def _say_waiting(self, number: int, own_part: str) -> Board | None:
        world = platform.board_of(None)
        if world is not None:
            world.write(self._at(self._own),
                        f"waits in group {self._ranks}, call {number}: {own_part}")
        return world

    def _settle(self, number: int, verdict: str) -> str:
        return self._board.settle(f"{self._prefix}{number}/verdict", verdict)

    def _erase(self, number: int, rank: int) -> None:
        keys = [self._key(number, rank)]
        if rank == self._ranks[0]:
            keys.append(f"{self._prefix}{number}/verdict")
        if number >= 0:
            self._board.erase(keys)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}{number}/{rank}"

    def _left(self, rank: int) -> str:
        return f"{self._prefix}left/{rank}"

    def _at(self, rank: int) -> str:
        return f"{self._prefix}at/{rank}"

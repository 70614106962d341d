"""Meetings of some ranks on a board: each leaves a note, and goes on when it has everybody's.

The board is no collective, so that it works where one would hang. Whoever waits no longer settles
the verdict on the meeting; it can be settled once, so that all ranks act alike: one that comes
late finds it and raises as the others did.

The keys on a board, below the prefix of the meetings:

    RANKS/NUMBER/RANK      the note of one rank on the meeting of that number of those ranks
    RANKS/NUMBER/verdict   "met" when somebody saw all notes, otherwise why the meeting is off
    RANKS/left/RANK        that a rank comes no more, and why
    at/RANK                on the default group's board: where a rank waits that waits long, where
                           it stopped waiting, or why it comes no more

A rank that has all notes of one meeting knows that everybody is done with the one before, and
erases its note on that, so that a board holds two meetings of the same ranks at most.
"""
from __future__ import annotations

import itertools
import json
import time

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.traffic_adapter import Board

platform = get_platform()

_MET = "met"
_FIRST_PAUSE, _LONGEST_PAUSE = 5e-5, 0.01  # seconds between two looks at the board
_PATIENCE = 0.2  # seconds after which a rank says what it waits for, and asks who has left


def say_where(prefix: str, where: str | None) -> None:
    """Let those who wait for this rank in any meeting below the prefix read where it is, or why
    it comes no more; None takes that back."""
    world = platform.board_of(None)
    key = _at(prefix, platform.get_rank())
    if world is None:
        return
    if where is None:
        world.erase([key])
    else:
        world.write(key, where)


def _at(prefix: str, rank: int) -> str:
    return f"{prefix}at/{rank}"


class Meetings:
    """The meetings of some ranks, numbered from 0.

    Args:
        board: a board that all of them see.
        prefix: what the keys of these meetings begin with, the same on all of them.
        ranks: the global ranks that meet, in the same order on all.
        timeout: seconds to wait for the others at each meeting.
        error: what is raised where a rank does not come.
    """

    def __init__(self, board: Board, prefix: str, ranks: tuple[int, ...], timeout: float,
                 error: type[RuntimeError]) -> None:
        self._board = board
        self._error = error
        self._prefix = prefix
        self._place = f"{prefix}{ranks}/"
        self._ranks = ranks
        self._timeout = timeout
        self._own = platform.get_rank()
        self._number = itertools.count()
        self._last = -1
        self._last_told: dict[int, str] = {}

    @property
    def number(self) -> int:
        """The number of the last meeting."""
        return self._last

    def meet(self, text: str, told: str) -> dict[int, tuple[str, str]]:
        """Meet the other ranks for the next time.

        Args:
            text: what this rank has to say.
            told: the same to read, for the error where another rank does not come.

        Returns:
            Text and ``told`` of each rank.

        Raises:
            RuntimeError: not all come, on every rank that does; of the class of these meetings.
        """
        number = self._last = next(self._number)
        self._board.write(self._key(number, self._own), json.dumps([text, told]))
        try:
            notes = self._meet(number, told)
        except self._error:
            raise
        except BaseException as error:
            # Nobody shall go on from a meeting that this rank will not come to.
            self._settle(number, f"rank {self._own} was stopped by {type(error).__name__}")
            raise
        parts = {rank: tuple(json.loads(note)) for rank, note in zip(self._ranks, notes)}
        self._last_told = {rank: words for rank, (_, words) in parts.items()}
        self._erase(number - 1, self._own)
        return parts

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
        at = f"in group {self._ranks}, call {number}: {own_part}"
        pause, said = _FIRST_PAUSE, False
        try:
            while True:
                notes = self._board.read(keys)
                if notes is not None:
                    self._go_on(self._settle(number, _MET), number)
                    break
                waited = time.monotonic() - began
                if waited > min(_PATIENCE, self._timeout):
                    if not said:
                        said = True
                        say_where(self._prefix, f"waits {at}")
                    why = self._absence(keys, waited)
                    if why is not None:
                        self._go_on(self._settle(number, why), number)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        except BaseException:
            # Until this rank goes on or leaves, the others can still read where it stopped.
            say_where(self._prefix, f"stopped waiting {at}")
            raise
        if said:
            say_where(self._prefix, None)
        return notes

    def _go_on(self, verdict: str, number: int) -> None:
        """Raise unless everybody came; where this rank was about to give up but the others had
        seen its note already, it finds theirs at its next look."""
        if verdict != _MET:
            raise self._error(f"group {self._ranks}, call {number}: {verdict}")

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
        place = world and world.peek(_at(self._prefix, rank))
        if place is not None:
            return place
        last = self._last_told.get(rank)
        known = "nothing before in this group" if last is None else f"its last call here was {last}"
        return f"did not come within {self._timeout:g} s; {known}"

    def _settle(self, number: int, verdict: str) -> str:
        return self._board.settle(f"{self._place}{number}/verdict", verdict)

    def _erase(self, number: int, rank: int) -> None:
        keys = [self._key(number, rank)]
        if rank == self._ranks[0]:
            keys.append(f"{self._place}{number}/verdict")
        if number >= 0:
            self._board.erase(keys)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._place}{number}/{rank}"

    def _left(self, rank: int) -> str:
        return f"{self._place}left/{rank}"

"""What a tracer needs to know of a framework's communication, beside the library's own."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol


@dataclass(slots=True, frozen=True)
class NativeCall:
    """A collective or point-to-point call that the framework is about to make.

    Attributes:
        kind: the framework's public name of it, such as ``"all_reduce"`` or ``"send"``.
        inputs: the tensors that this rank gives.
        outputs: the tensors that it gets.
        group: the process group.
        reduce_op: how values are reduced, such as ``"sum"``; None where they are not.
        peer: global rank of the one that is sent to or received from, or of the root of a
            broadcast, scatter, gather or reduce; None where there is none.
        kept: of an exchange, the part of the inputs that stays on this rank; None for equal
            pieces.
        continues: whether it is a further part of the call before it on this thread, as for
            objects, whose sizes are sent first.
    """

    kind: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    group: Any
    reduce_op: Optional[str] = None
    peer: Optional[int] = None
    kept: Optional[float] = None
    continues: bool = False


class NativeObserver(Protocol):
    """Who is told of the framework's calls, on the thread that makes them."""

    def before_native(self, call: NativeCall) -> None:
        """A call is about to be made; what this raises reaches the caller instead."""

    def after_native(self, call: NativeCall, seconds: float) -> None:
        """A call was launched, which took so long."""

    def native_lost(self, why: str) -> None:
        """A call is about to be made that cannot be told of."""


class Board(Protocol):
    """Notes that the members of a group leave for each other, beside every collective.

    No method waits for another rank. What is written stays until it is erased.
    """

    def write(self, key: str, text: str) -> None:
        """Leave a note."""

    def read(self, keys: Sequence[str]) -> Optional[list[str]]:
        """The notes under all of the keys, or None while one of them is missing.

        For notes that nobody erases at the same time.
        """

    def peek(self, key: str) -> Optional[str]:
        """The note under a key that anybody may erase at any time, or None."""

    def has(self, keys: Sequence[str]) -> bool:
        """Whether there are notes under all of the keys."""

    def settle(self, key: str, text: str) -> str:
        """Leave a note unless there is one already; the one that stands. All ranks get the same."""

    def erase(self, keys: Sequence[str]) -> None:
        """Remove notes; those that do not exist are passed over."""


class TrafficAdapter(ABC):
    """The part of a platform that looks at communication."""

    @staticmethod
    @abstractmethod
    def watch_native(observer: NativeObserver) -> Callable[[], None]:
        """Tell ``observer`` of every call of the framework's own interface, once.

        Forward and backward, on every thread, blocking or not, from Python or from within the
        framework; the library's own collectives are among them.

        Returns:
            What ends it. The last observer to go leaves nothing behind.
        """

    @staticmethod
    @abstractmethod
    def board_of(group: Any) -> Optional[Board]:
        """The board of ``group`` (None: the default group); None for a group without real peers.

        Raises:
            RuntimeError: not initialised.
        """

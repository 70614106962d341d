"""The tree that a trace grows into, and what is needed only while it grows."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall, DebugCall, OpCall
from hyper_parallel.core.dtensor.debug._ledger import Ledger
from hyper_parallel.core.dtensor.debug._thread_list import ThreadList
from hyper_parallel.platform.identity_map import IdentityMap


class CallTree:
    """The records of one run of a mode. Each thread nests its own calls.

    Args:
        max_records: records to keep at most; later ones are counted, but not kept. None keeps all.

    Attributes:
        roots: the records that no other one holds.
        counts: number of collectives by method name; that of the tree if nothing was dropped.
        ledger: number and bytes of the collectives, dropped ones included.
        dropped: number of records that were not kept, for want of room.
        kinds: what is known of collectives by their arguments, while the tree grows.
    """

    def __init__(self, max_records: int | None = None) -> None:
        self.roots: list[DebugCall] = []
        self.counts: dict[str, int] = {}
        self.ledger = Ledger()
        self.dropped = 0
        self.makers = PartialMakers()
        self.kinds: dict[tuple, tuple] = {}
        self._room = max_records
        self._collectives = 0
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._stack: ThreadList[DebugCall] = ThreadList()
        self._last: ThreadList[CollectiveCall] = ThreadList()
        self._lock = threading.Lock()

    @property
    def stack(self) -> list[DebugCall]:
        """The current thread's open records, outermost first."""
        return self._stack.items

    @property
    def innermost(self) -> DebugCall | None:
        """The current thread's last record that is still open."""
        stack = self._stack.items
        return stack[-1] if stack else None

    def open(self, record: DebugCall, parent: DebugCall | None) -> None:
        """Put a record under a parent (None: a root); what follows on this thread is inside it."""
        self._attach(record, parent)
        self._stack.items.append(record)

    def open_inside(self, record: DebugCall) -> None:
        """As ``open``, under the innermost open record of this thread."""
        stack = self._stack.items
        self._attach(record, stack[-1] if stack else None)
        stack.append(record)

    def close(self, matches: Callable[[DebugCall], bool]) -> DebugCall | None:
        """End the innermost open record of this thread that matches, and those inside it.

        Returns:
            That record, or None where none matches; then nothing is ended.
        """
        stack = self._stack.items
        if stack and matches(stack[-1]):  # nearly always
            record = stack.pop()
            record.duration = time.time() - record.timestamp
            return record
        for index in range(len(stack) - 2, -1, -1):
            record = stack[index]
            if matches(record):
                now = time.time()
                for one in stack[index:]:
                    one.duration = now - one.timestamp
                del stack[index:]
                return record
        return None

    def close_op(self, name: str) -> OpCall | None:
        """As ``close``, for an operator of a name."""
        stack = self._stack.items
        record = stack[-1] if stack else None
        if type(record) is not OpCall or record.op_name != name:
            return self.close(lambda one: isinstance(one, OpCall) and one.op_name == name)
        stack.pop()
        record.duration = time.time() - record.timestamp
        return record

    def add_collective(self, record: CollectiveCall, owner: DebugCall | None = None) -> None:
        """Put a collective under its owner, by default the innermost open record, and count it."""
        self._attach(record, owner or self.innermost)
        name = record.collective_type
        with self._lock:
            # A trace has few groups, and each may have thousands of ranks.
            record.ranks = self._groups.setdefault(record.ranks, record.ranks)
            record.sequence = self._collectives
            self._collectives += 1
            self.counts[name] = self.counts.get(name, 0) + 1
            self.ledger.add(record)
        self._last.items[:] = [record]

    def finish(self) -> None:
        """Let go of every tensor and group: nothing more will grow."""
        self.makers.forget_all()
        self.kinds.clear()

    def extend_last(self, part: CollectiveCall, seconds: float) -> bool:
        """Add what a further part of a collective sends to this thread's last record.

        Returns:
            Whether there is one.
        """
        if not self._last.items:
            return False
        (record,) = self._last.items
        with self._lock:
            record.duration += seconds
            record.input_bytes += part.input_bytes
            record.output_bytes += part.output_bytes
            record.wire_bytes += part.wire_bytes
            self.ledger.add_part(record, part)
        return True

    def _attach(self, record: DebugCall, parent: DebugCall | None) -> None:
        if parent is not None:
            inherit(record, parent)
        if self._room is None or self._takes_room():
            # No lock: a list takes one element at a time.
            (self.roots if parent is None else parent.children).append(record)

    def _takes_room(self) -> bool:
        with self._lock:
            if self._room == 0:
                self.dropped += 1
                return False
            self._room -= 1
        return True


def inherit(record: DebugCall, parent: DebugCall) -> None:
    """Give a record its place, and the owner of what it lies in where it has none itself."""
    record.call_depth = parent.call_depth + 1
    if record.module is None:
        record.module = parent.module
    if record.operator is None:
        record.operator = parent.operator


class PartialMakers:
    """Which operator made a tensor Partial, by mesh axis.

    Tensors are held weakly and known by identity; nothing is set on them.
    """

    def __init__(self) -> None:
        self._makers: IdentityMap[dict[int, OpCall]] = IdentityMap()

    def __bool__(self) -> bool:
        return bool(self._makers)

    def of(self, tensor: Any) -> dict[int, OpCall]:
        """The maker for each axis on which the tensor was made Partial in this trace."""
        return self._makers.get(tensor) or {}

    def among(self, tensors: list[Any]) -> dict[int, OpCall] | None:
        """The makers of several tensors in one; the first tensor's where two were at an axis."""
        found: dict[int, OpCall] = {}
        for tensor in tensors:
            for axis, maker in self.of(tensor).items():
                found.setdefault(axis, maker)
        return found or None

    def remember(self, tensor: Any, makers: dict[int, OpCall]) -> None:
        """Say who made a tensor Partial."""
        self._makers.set(tensor, makers)

    def forget_all(self) -> None:
        """Let go of every tensor."""
        self._makers.clear()

"""Compares traces: of two runs, and of the ranks of one."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from hyper_parallel.core.dtensor.debug import CommDebugMode, CommTrace
from hyper_parallel.core.dtensor.debug._agreement import (
    between_two,
    disagreement,
    signature,
    told,
)
from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall, walk
from hyper_parallel.debug._values import departures, first_difference

Trace = CommDebugMode | CommTrace

_KEYS = ("module", "op", "type", "axis", "phase", "dtype")


def diff_traces(before: Trace, after: Trace) -> list[str]:
    """What differs between two traces in number or bytes of collectives, a line each.

    A line begins with ``+`` for what only ``after`` has, ``-`` for what only ``before`` has and
    ``~`` for what both have in another number or size. Equal traces give no line. Where both
    have fingerprints, a line that begins with ``!`` names the first result that differs in value.
    """
    old, new = before.get_comm_summary(_KEYS), after.get_comm_summary(_KEYS)
    lines = []
    for key in sorted({*old, *new}, key=str):
        a, b = old.get(key), new.get(key)
        if a == b:
            continue
        what = " ".join(f"{name}={value}" for name, value in zip(_KEYS, key))
        if a is None or b is None:
            sums = a or b
            lines.append(f"{'+' if a is None else '-'} {what}: {sums['count']} calls, "
                         f"{sums['wire_bytes']} bytes")
        else:
            lines.append(f"~ {what}: {a['count']} -> {b['count']} calls, "
                         f"{a['wire_bytes']} -> {b['wire_bytes']} bytes")
    parting = first_difference(before, after)
    return lines if parting is None else [*lines, parting]


def check_traces(traces: Sequence[Trace]) -> str | None:
    """Where the ranks of one run first do different things, or None if they agree.

    In each group the members must issue the same collectives in the same order: kind, element
    type, shape (but for exchanges of uneven pieces) and reduction.

    Args:
        traces: one trace of each rank, any of them left out; groups of which only one member is
            there are not compared.

    Returns:
        The group, the number of the call in it, and what each rank does there, with module and
        line of the program; or the first value that is not the same, and the rank that departs.

    Raises:
        ValueError: two traces of one rank, or a trace that does not hold all its collectives.
    """
    calls: dict[int, dict[tuple[int, ...], list[CollectiveCall]]] = {}
    for trace in traces:
        if trace.rank in calls:
            raise ValueError(f"check compares one trace of each rank, but rank {trace.rank} came "
                             "twice; leave one of them out.")
        if trace.dropped_records or trace.incomplete is not None:
            raise ValueError(f"the trace of rank {trace.rank} does not hold all of its "
                             "collectives; record it without max_records.")
        calls[trace.rank] = _by_group(trace)
    groups = sorted({group for by_group in calls.values() for group in by_group})
    found = [fault for group in groups for fault in _first_fault(group, calls)]
    found = found or list(departures({trace.rank: trace for trace in traces}))
    return min(found)[1] if found else None


def _by_group(trace: Trace) -> dict[tuple[int, ...], list[CollectiveCall]]:
    records = [record for _, record in walk(trace.tree.roots)
               if isinstance(record, CollectiveCall) and not between_two(record)]
    groups: dict[tuple[int, ...], list[CollectiveCall]] = {}
    for record in sorted(records, key=lambda one: one.sequence):
        groups.setdefault(record.ranks, []).append(record)
    return groups


def _first_fault(group: tuple[int, ...],
                 calls: dict[int, dict[tuple[int, ...], list[CollectiveCall]]]
                 ) -> Iterator[tuple[int, str]]:
    """How far the ranks had come and what they do, at the first call that differs."""
    members = {rank: calls[rank].get(group, []) for rank in group if rank in calls}
    for number in range(max(map(len, members.values()), default=0)):
        here = {rank: records[number] if number < len(records) else None
                for rank, records in members.items()}
        found = [record and signature(record) for record in here.values()]
        if any(one != found[0] for one in found):
            parts = {rank: "nothing, its trace ends before" if record is None else told(record)
                     for rank, record in here.items()}
            yield (min(record.sequence for record in here.values() if record is not None),
                   disagreement(group, number, parts))
            return

"""Compares the fingerprints of traces: where values part between runs, or between ranks."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hyper_parallel.core.dtensor.debug import CommDebugMode, CommTrace
from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall, DebugCall, OpCall, walk
from hyper_parallel.core.dtensor.debug._fingerprints import Fingerprint

Trace = CommDebugMode | CommTrace


class Value(NamedTuple):
    """One result of a call, with its fingerprint."""

    record: DebugCall
    output: int
    fingerprint: Fingerprint

    @property
    def place(self) -> tuple:
        """What a value of another trace has in common with this one."""
        record = self.record
        kind = record.op_name if isinstance(record, OpCall) else record.collective_type
        return kind, record.module, record.operator, record.call_site, self.output

    def __str__(self) -> str:
        record = self.record
        what = f"operator {record.op_name}" if isinstance(record, OpCall) else (
            f"{record.collective_type}, {record.phase} of operator {record.operator}")
        return (f"output {self.output} of {what}, module {record.module}, "
                f"at {record.call_site}")


def values_of(trace: Trace) -> list[Value]:
    """The values whose fingerprints were taken, in the order in which they were."""
    found = [Value(record, output, fingerprint) for _, record in walk(trace.tree.roots)
             if isinstance(record, (OpCall, CollectiveCall))
             for output, fingerprint in enumerate(record.fingerprints) if fingerprint is not None]
    return sorted(found, key=lambda value: value.fingerprint.number)


def first_difference(before: Trace, after: Trace) -> str | None:
    """Where the values of two runs first part, as a line; None where they do not.

    The values are compared in the order in which they came about, up to where the runs do
    different things.
    """
    for old, new in zip(values_of(before), values_of(after)):
        # Lines move when a program is edited.
        if old.place[:3] != new.place[:3] or old.output != new.output:
            return None
        if old.fingerprint != new.fingerprint:
            return f"! values part at {new}: {old.fingerprint} -> {new.fingerprint}"
    return None


def departures(traces: Mapping[int, Trace]) -> Iterator[tuple[int, str]]:
    """Where ranks that must hold the same value do not: the number of the value, and a report.

    Calls that only some of the ranks make are left out.
    """
    places: dict[tuple, dict[int, list[Value]]] = {}
    for rank, trace in traces.items():
        for value in values_of(trace):
            ranks = value.fingerprint.ranks
            if ranks:
                places.setdefault((ranks, *value.place), {}).setdefault(rank, []).append(value)
    for (ranks, *_), values in places.items():
        counts = {len(values.get(rank, ())) for rank in ranks if rank in traces}
        if len(counts) == 1:
            for same in zip(*values.values()):
                here = dict(zip(values, same))
                if len({value.fingerprint for value in same}) > 1:
                    yield (min(value.fingerprint.number for value in same),
                           _departure(ranks, here))
                    break


def _departure(ranks: tuple[int, ...], here: Mapping[int, Value]) -> str:
    counts = Counter(value.fingerprint for value in here.values())
    # The value of most; of as many, that of the lowest rank.
    usual = max(sorted(here), key=lambda rank: counts[here[rank].fingerprint])
    odd = next(rank for rank in sorted(here)
               if here[rank].fingerprint != here[usual].fingerprint)
    lines = [f"ranks {ranks} must hold the same value, but rank {odd} departs at {here[odd]}"]
    lines += [f"  rank {rank}: {here[rank].fingerprint}" for rank in sorted(here)]
    return "\n".join(lines)

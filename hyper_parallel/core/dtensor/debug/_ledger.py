"""Adds up collectives by everything that one may ask for, so that sums are exact and small."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall

KEYS = ("type", "axis", "module", "op", "phase", "dtype")
"""What a summary can be grouped by."""

QUANTITIES = ("count", "input_bytes", "output_bytes", "wire_bytes")
"""What a summary tells of each group."""

By = str | Sequence[str]


class Ledger:
    """Number and bytes of the collectives, for each combination of the keys."""

    def __init__(self) -> None:
        self._rows: dict[tuple, list[int]] = {}

    def add(self, record: CollectiveCall) -> None:
        """Count one collective."""
        self._row(record)[0] += 1
        self.add_part(record, record)

    def add_part(self, record: CollectiveCall, part: CollectiveCall) -> None:
        """Add the bytes of one part of a collective that was counted."""
        row = self._row(record)
        row[1] += part.input_bytes
        row[2] += part.output_bytes
        row[3] += part.wire_bytes

    def _row(self, record: CollectiveCall) -> list[int]:
        key = (record.collective_type, record.axis, record.module, record.operator, record.phase,
               record.input_dtype)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = [0] * len(QUANTITIES)
        return row

    def grouped(self, by: By) -> dict[Any, dict[str, int]]:
        """Sums for each value of one key, or for each combination of several.

        Raises:
            ValueError: no key, or one that does not exist.
        """
        names = (by,) if isinstance(by, str) else tuple(by)
        wrong = [name for name in names if name not in KEYS]
        if wrong or not names:
            raise ValueError(f"a summary is grouped by one or more of {KEYS}, but got {by!r}.")
        positions = [KEYS.index(name) for name in names]
        groups: dict[Any, dict[str, int]] = {}
        for key, row in self._rows.items():
            group = tuple(key[position] for position in positions)
            sums = groups.setdefault(group[0] if isinstance(by, str) else group,
                                     dict.fromkeys(QUANTITIES, 0))
            for name, value in zip(QUANTITIES, row):
                sums[name] += value
        # The most bytes first; then by name, so that ranks and runs list alike.
        return dict(sorted(groups.items(), key=lambda item: (-item[1]["wire_bytes"],
                                                             str(item[0]))))

    def as_data(self) -> list[dict[str, Any]]:
        """Plain data for JSON: one object for each combination, keys and quantities together."""
        return [{**dict(zip(KEYS, key)), **sums} for key, sums in self.grouped(KEYS).items()]

    @classmethod
    def from_data(cls, rows: Iterable[dict[str, Any]]) -> Ledger:
        """The ledger that ``as_data`` was taken of."""
        ledger = cls()
        for row in rows:
            ledger._rows[tuple(row[name] for name in KEYS)] = [row[name] for name in QUANTITIES]
        return ledger


def summary_table(groups: dict[Any, dict[str, int]], by: By) -> str:
    """A summary as text: a line for each group, and their total."""
    names = [by] if isinstance(by, str) else list(by)
    heading = [*names, *QUANTITIES]
    rows = [[*map(str, (group,) if isinstance(by, str) else group),
             *(f"{sums[name]:,}" for name in QUANTITIES)] for group, sums in groups.items()]
    total = [sum(sums[name] for sums in groups.values()) for name in QUANTITIES]
    rows.append(["total", *[""] * (len(names) - 1), *(f"{value:,}" for value in total)])
    widths = [max(map(len, column)) for column in zip(heading, *rows)]
    lines = []
    for row in (heading, *rows):
        cells = [cell.ljust(width) if index < len(names) else cell.rjust(width)
                 for index, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)

"""The questions that one may ask of a trace, and its output: tables and files."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from hyper_parallel.core.dtensor.debug._call_records import DebugCall
from hyper_parallel.core.dtensor.debug._call_tree import CallTree
from hyper_parallel.core.dtensor.debug._chrome import chrome_events
from hyper_parallel.core.dtensor.debug._colour import print_table
from hyper_parallel.core.dtensor.debug._ledger import By, summary_table
from hyper_parallel.core.dtensor.debug._module_tracker import parameters_as_data, sharding_info
from hyper_parallel.core.dtensor.debug._page import html_page
from hyper_parallel.core.dtensor.debug._render import (
    records_as_data,
    tracing_table,
    without_ansi,
    write_text,
)

JSON_VERSION = 1
"""Number of the JSON format; it grows when a reader of the old format would go wrong."""

_TABLE_LEVEL = 1
_MODULE_LEVEL = 2

FileName = str | os.PathLike


class TraceReport:
    """A tree of records and what can be said about it.

    Args:
        tree: the records.
        rank: the rank that they are of.
        world_size: number of ranks in all.
    """

    def __init__(self, tree: CallTree, rank: int = 0, world_size: int = 1) -> None:
        self._tree = tree
        self._rank = rank
        self._world_size = world_size
        self._failure: str | None = None
        self._parameters: dict[str, dict[str, Any]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(get_total_counts()={self.get_total_counts()})"

    @property
    def _root_records(self) -> list[DebugCall]:
        return self._tree.roots

    @property
    def _comm_counts(self) -> dict[str, int]:
        return self._tree.counts

    @property
    def tree(self) -> CallTree:
        """The tree of the present or the last run."""
        return self._tree

    @property
    def rank(self) -> int:
        """The rank that was traced."""
        return self._rank

    @property
    def incomplete(self) -> str | None:
        """The first error that happened while recording, or None for a complete trace."""
        return self._failure

    @property
    def dropped_records(self) -> int:
        """Number of records that ``max_records`` left no room for; counts include them."""
        return self._tree.dropped

    def get_comm_counts(self) -> dict[str, int]:
        """Number of collectives by name of the platform's method, forward and backward."""
        return dict(self._comm_counts)

    def get_total_counts(self) -> int:
        """Number of collectives."""
        return sum(self._comm_counts.values())

    def get_comm_bytes(self) -> dict[str, int]:
        """Bytes that this rank sends, by name of the platform's method.

        They are those of the ring algorithm; the documentation has the formulas.
        """
        return {kind: sums["wire_bytes"] for kind, sums in self.get_comm_summary("type").items()}

    def get_comm_summary(self, by: By = "type") -> dict[Any, dict[str, int]]:
        """Number and bytes of the collectives, grouped.

        Args:
            by: ``"type"``, ``"axis"``, ``"module"``, ``"op"``, ``"phase"`` or ``"dtype"``, or a
                tuple of them.

        Returns:
            ``count``, ``input_bytes``, ``output_bytes`` and ``wire_bytes`` for each value of the
            key, or for each tuple of values; the most bytes first. None is the key of what has
            no such thing, ``"unknown"`` of what belongs to a forward pass before the trace.

        Raises:
            ValueError: another key, or none.
        """
        return self._tree.ledger.grouped(by)

    def generate_comm_summary_table(self, by: By = "type") -> str:
        """``get_comm_summary`` as a table of text with a line for the total."""
        return summary_table(self.get_comm_summary(by), by)

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """The module's parameters as they were at the entry, by qualified name.

        Each one has ``shape`` (global for a DTensor), ``dtype``, ``requires_grad``,
        ``is_dtensor``, ``placements`` and ``mesh_shape`` (None for a plain one). Empty without a
        module.
        """
        return {name: dict(info) for name, info in self._parameters.items()}

    def get_sharding_info(self) -> dict[str, Any]:
        """The placements of the module's DTensor parameters at the entry, by qualified name.

        ``"Shard(dim=1)"`` on a mesh of one axis, ``"(Shard(dim=0), Replicate())"`` on more. Empty
        without a module.
        """
        return dict(sharding_info(self._parameters))

    def generate_comm_debug_tracing_table(self, noise_level: int | None = None) -> str:
        """The trace as a table of text.

        Args:
            noise_level: 0 shows collectives, 1 (the default) operators too, 2 the boundaries of
                modules too (this needs ``module``, else a warning is logged), 3 redistributions
                too, and of each call why it happened and how many bytes it sent.

        Raises:
            TypeError: the level is no int.
            ValueError: the level is negative.
        """
        level = self._checked_level(noise_level, _TABLE_LEVEL)
        table = tracing_table(self._root_records, level)
        if self.dropped_records:
            table += f"\n({self.dropped_records} records dropped: max_records was reached)"
        return table if self._failure is None else f"{table}\n(incomplete: {self._failure})"

    generate_tracing_table = generate_comm_debug_tracing_table

    def print_comm_debug_tracing_table(self, noise_level: int | None = None,
                                       file: TextIO | None = None) -> None:
        """Print the table, in colour where it goes to a terminal.

        ``NO_COLOR``, ``FORCE_COLOR`` and ``TERM=dumb`` in the environment are honoured.

        Args:
            noise_level: as for the table.
            file: where to; None is the standard output of the time of the call.
        """
        print_table(self.generate_comm_debug_tracing_table(noise_level), file or sys.stdout)

    def log_comm_debug_tracing_table_to_file(self, file_name: FileName = "comm_mode_log.txt",
                                             noise_level: int | None = None) -> None:
        """Write the table to a file, without terminal escape sequences.

        Raises:
            OSError: the file cannot be written; what it held before is still there.
        """
        table = self.generate_comm_debug_tracing_table(noise_level)
        write_text(file_name, without_ansi(table) + "\n")

    def generate_json_dump(self, file_name: FileName = "comm_mode_log.json",
                           noise_level: int | None = None) -> None:
        """Write the trace as JSON, which ``CommTrace.load`` reads again.

        The object has ``comm_counts``, ``total_counts``, ``sharding_info`` and ``records``, a
        nested list; and ``incomplete``, the error, when one happened while recording. The
        documentation has the schema.

        Args:
            file_name: the file.
            noise_level: as for the table, but 2 by default. What stands inside a record that the
                level hides moves up.

        Raises:
            OSError: the file cannot be written; what it held before is still there.
        """
        write_text(file_name, self._as_json(self._checked_level(noise_level, _MODULE_LEVEL)))

    def _as_json(self, level: int) -> str:
        data = {
            "comm_counts": self.get_comm_counts(),
            "total_counts": self.get_total_counts(),
            "sharding_info": self.get_sharding_info(),
            "version": JSON_VERSION,
            "noise_level": level,
            "rank": self._rank,
            "world_size": self._world_size,
            "dropped_records": self.dropped_records,
            "parameters": parameters_as_data(self._parameters),
            "summary": self._tree.ledger.as_data(),
            # One root at a time: the plain data of a long trace is many times its text.
            "records": (entry for record in self._root_records
                        for entry in records_as_data([record], level)),
        }
        if self._failure is not None:
            data["incomplete"] = self._failure
        return _json_text(data)

    def generate_chrome_trace(self, file_name: FileName = "comm_mode_trace.json") -> None:
        """Write the trace in Chrome's trace event format, which Perfetto opens.

        Modules have one track for each depth, operators and collectives one of their own.

        Raises:
            OSError: the file cannot be written; what it held before is still there.
        """
        write_text(file_name, _json_text(chrome_events(self._root_records, self._rank)))

    def generate_html(self, file_name: FileName = "comm_mode_trace.html") -> None:
        """Write the trace as one HTML page, which a browser opens from the file.

        It shows the tree, the bytes by module, axis and collective, a timeline and the
        parameters, and loads nothing from anywhere.

        Raises:
            OSError: the file cannot be written; what it held before is still there.
        """
        heading = {
            "rank": self._rank,
            "world_size": self._world_size,
            "total_counts": self.get_total_counts(),
            "dropped_records": self.dropped_records,
            "incomplete": self._failure,
            "parameters": parameters_as_data(self._parameters),
            "summary": self._tree.ledger.as_data(),
        }
        write_text(file_name, html_page(heading, self._root_records))

    def _checked_level(self, noise_level: int | None, default: int) -> int:
        if noise_level is None:
            return default
        if not isinstance(noise_level, int) or isinstance(noise_level, bool):
            raise TypeError(f"noise_level is an int from 0 to 3 or None, but got {noise_level!r} "
                            f"({type(noise_level).__name__}).")
        if noise_level < 0:
            raise ValueError(f"noise_level is 0 or more (3 shows everything), but got "
                             f"{noise_level}.")
        if noise_level >= _MODULE_LEVEL:
            self._warn_of_level(noise_level)
        return noise_level

    def _warn_of_level(self, noise_level: int) -> None:
        """Say so where the trace cannot show all that the level promises."""


def _json_text(data: dict[str, Any]) -> str:
    """JSON with a line for each key and each entry of a list.

    Not with ``indent``, which is many times slower and makes long files of deep trees.
    """
    lines = []
    for key, value in data.items():
        if isinstance(value, (list, Iterator)):
            text = "[\n" + ",\n".join("    " + json.dumps(entry) for entry in value) + "\n  ]"
        else:
            text = json.dumps(value)
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"

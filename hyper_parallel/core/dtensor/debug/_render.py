"""Tables, JSON and files."""
from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import DebugCall, walk

NOTHING_RECORDED = "(no operations recorded)"

_TYPE_WIDTH = 20
_RULE_WIDTH = 80
_ANSI_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


def tracing_table(records: list[DebugCall], noise_level: int) -> str:
    """The records that a level shows, one a line, under a heading and a rule."""
    if not records:
        return NOTHING_RECORDED
    lines = [_row("Type", "Detail"), "-" * _RULE_WIDTH]
    lines.extend(_row("  " * depth + record.label, record.describe(noise_level))
                 for depth, record in walk(records, noise_level))
    return "\n".join(lines)


def _row(kind: str, detail: str) -> str:
    return f"{kind:<{_TYPE_WIDTH}} {detail}"


def records_as_data(records: Iterable[DebugCall], noise_level: int) -> list[dict[str, Any]]:
    """The records that a level shows as nested plain data.

    What stands inside a hidden record moves up to the nearest shown one.
    """
    data: list[dict[str, Any]] = []
    for record in records:
        children = records_as_data(record.children, noise_level)
        if record.shown_from <= noise_level:
            data.append({**record.as_dict(), "timestamp": record.timestamp,
                         "duration": record.duration, "children": children})
        else:
            data.extend(children)
    return data


def without_ansi(text: str) -> str:
    """The text without terminal escape sequences."""
    return _ANSI_ESCAPE.sub("", text)


def write_text(file_name: str | os.PathLike, text: str) -> None:
    """Write a UTF-8 file whole or not at all.

    Raises:
        OSError: the file cannot be written; the system's own error. What the file held before
            is still there.
    """
    existed = os.path.exists(file_name)
    # Opening the file itself first gives the system's own word on it, and a new file its mode.
    with open(file_name, "a", encoding="utf-8"):
        pass
    target = os.path.realpath(file_name)
    if not os.path.isfile(target):
        # A device or a pipe: it cannot be replaced, only written to.
        with open(target, "w", encoding="utf-8") as stream:
            stream.write(text)
        return
    try:
        _replace(target, text)
    except BaseException:
        if not existed:
            os.unlink(target)
        raise


def _replace(target: str, text: str) -> None:
    handle, scratch = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        shutil.copymode(target, scratch)
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise

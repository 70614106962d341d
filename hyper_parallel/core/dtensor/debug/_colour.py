"""Colour for the tables where they go to a terminal. Without the escapes the text is the same."""
from __future__ import annotations

import os
import re
from typing import TextIO

_BOLD, _DIM, _RED, _YELLOW = "1", "2", "31", "33"
_LABELS = {"Module": _BOLD, "Op": "36", "Redistribute": _YELLOW, "Collective": "1;35"}

_RECORD = re.compile(r"( *)(" + "|".join(_LABELS) + r")( +.*)", re.DOTALL)
_RULE = re.compile(r"-+")
_MARKS = re.compile(r"(?P<phase> phase=\w+)|(?P<alarm> fallback\b| implicit for )"
                    r"|(?P<bytes> wire_bytes=\d+)")
_STYLE_OF_MARK = {"phase": _YELLOW, "alarm": _RED, "bytes": _BOLD}


def print_table(text: str, stream: TextIO) -> None:
    """Print tables, in colour where the stream shows it."""
    print(coloured(text) if wants_colour(stream) else text, file=stream)


def wants_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colour, or the user says that it is.

    As Python's own tracebacks decide it: ``NO_COLOR`` (https://no-color.org) comes first, then
    ``FORCE_COLOR``, then ``TERM=dumb``, then what the stream says of itself.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def coloured(text: str) -> str:
    """Tables with escape sequences: kinds of calls, phases, bytes, headings, what went wrong."""
    lines = text.split("\n")
    return "\n".join(_coloured_line(line, following)
                     for line, following in zip(lines, [*lines[1:], ""]))


def _coloured_line(line: str, following: str) -> str:
    record = _RECORD.fullmatch(line)
    if record is not None:
        indent, label, detail = record.groups()
        return indent + _styled(label, _LABELS[label]) + _MARKS.sub(
            lambda mark: _styled(mark[0], _STYLE_OF_MARK[mark.lastgroup]), detail)
    if _RULE.fullmatch(line):
        return _styled(line, _DIM)
    if _RULE.fullmatch(following) or line.startswith("total "):
        return _styled(line, _BOLD)
    return _styled(line, _RED) if line.startswith("(incomplete: ") else line


def _styled(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m"

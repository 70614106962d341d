"""A trace as one HTML page that needs nothing else; its sources lie in the folder ``page``."""
from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import DebugCall, walk

_SCRIPTS = ("trace.js", "view.js", "tree.js", "charts.js", "timeline.js", "main.js")
_MICROSECONDS = 1e6


def html_page(heading: dict[str, Any], records: Sequence[DebugCall]) -> str:
    """The page.

    Args:
        heading: what the page says of the trace as a whole: ``rank``, ``world_size``,
            ``total_counts``, ``dropped_records``, ``incomplete``, and ``parameters`` and
            ``summary`` as the JSON dump has them.
        records: the tree.
    """
    style = _source("page.css")
    script = '"use strict";\n' + "\n".join(_source(name) for name in _SCRIPTS)
    # The browser runs this script alone and opens no connection, whatever a trace holds.
    policy = ("default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
              f"script-src '{_digest(script)}'; style-src '{_digest(style)}'")
    parts = {"policy": policy, "style": style, "script": script,
             "trace": _inert(json.dumps({**_finite(heading), **_columns(records)}))}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("page.html"))


def _source(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert(text: str) -> str:
    """JSON that no HTML parser takes for the end of its element or for a comment."""
    return text.replace("<", "\\u003c")


def _columns(records: Sequence[DebugCall]) -> dict[str, Any]:
    """The records as columns, in the order of the tree; times in microseconds from the first on.

    What many records have in common, all but their times and numbers, is there once.
    """
    facts: list[dict[str, Any]] = []
    position: dict[str, int] = {}
    columns: dict[str, list] = {"fact": [], "depth": [], "start": [], "duration": []}
    walked = list(walk(records))
    began = min((record.timestamp for _, record in walked), default=0.0)
    for depth, record in walked:
        data = record.as_dict()
        data.pop("sequence", None)
        key = json.dumps(data)
        if key not in position:
            position[key] = len(facts)
            facts.append(_finite(data))
        columns["fact"].append(position[key])
        columns["depth"].append(depth)
        columns["start"].append(round((record.timestamp - began) * _MICROSECONDS, 1))
        columns["duration"].append(round(record.duration * _MICROSECONDS, 1))
    return {"facts": facts, "records": columns}


def _finite(value: Any) -> Any:
    """The value with what JSON has no numbers for, such as an infinite norm, as text."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

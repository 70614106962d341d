"""A trace in Chrome's trace event format, for Perfetto and chrome://tracing."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import (
    AnnotateCall,
    CollectiveCall,
    DebugCall,
    OpCall,
    RedistributeCall,
)

_MICROSECONDS = 1e6

# Numbers of the tracks; modules have one for each depth, from the last one on.
_COLLECTIVES, _REDISTRIBUTIONS, _OPERATORS, _MODULES = range(4)


def chrome_events(records: Sequence[DebugCall], rank: int) -> dict[str, Any]:
    """The events as plain data: one complete event a record, times in microseconds.

    Gradients lie where they ran in time, not inside of their forward operator.
    """
    events: list[dict[str, Any]] = []
    tracks: dict[int, str] = {}
    pending = [(record, 0) for record in reversed(records)]
    while pending:
        record, depth = pending.pop()
        track, name = _track(record, depth)
        tracks.setdefault(track, name)
        events.append({
            "name": _title(record), "cat": record.label.lower(), "ph": "X", "pid": rank,
            "tid": track, "ts": record.timestamp * _MICROSECONDS,
            "dur": record.duration * _MICROSECONDS,
            "args": {key: value for key, value in record.as_dict().items()
                     if key != "type" and value is not None},
        })
        inside = depth + isinstance(record, AnnotateCall)
        pending.extend((child, inside) for child in reversed(record.children))
    names = [{"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
             for track, name in sorted(tracks.items())]
    process = {"name": "process_name", "ph": "M", "pid": rank, "tid": 0,
               "args": {"name": f"rank {rank}"}}
    return {"displayTimeUnit": "ms", "traceEvents": [process, *names, *events]}


def _track(record: DebugCall, depth: int) -> tuple[int, str]:
    if isinstance(record, CollectiveCall):
        return _COLLECTIVES, "collectives"
    if isinstance(record, RedistributeCall):
        return _REDISTRIBUTIONS, "redistributions"
    if isinstance(record, AnnotateCall):
        return _MODULES + depth, f"modules, depth {depth}"
    return _OPERATORS, "operators"


def _title(record: DebugCall) -> str:
    if isinstance(record, OpCall):
        return record.op_name
    if isinstance(record, AnnotateCall):
        return record.module_fqn
    if isinstance(record, CollectiveCall):
        return record.collective_type
    return record._render_self()

"""``CommTrace``: a trace that was written to a file, as an object again."""
from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import (
    FULL_LEVEL,
    AnnotateCall,
    CollectiveCall,
    DebugCall,
    OpCall,
    RedistributeCall,
    TensorInfo,
)
from hyper_parallel.core.dtensor.debug._call_tree import CallTree, inherit
from hyper_parallel.core.dtensor.debug._fingerprints import Fingerprint
from hyper_parallel.core.dtensor.debug._ledger import Ledger
from hyper_parallel.core.dtensor.debug._report import JSON_VERSION, FileName, TraceReport
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard


class CommTrace(TraceReport):
    """What ``CommDebugMode.generate_json_dump`` wrote. Get one by :meth:`load`.

    It answers as the mode does: counts, bytes, summaries, layouts, and the tables of all levels up
    to the one that the file was written with.
    """

    def __init__(self, tree: CallTree, rank: int, world_size: int, noise_level: int) -> None:
        super().__init__(tree, rank, world_size)
        self._noise_level = noise_level

    @property
    def noise_level(self) -> int:
        """The level that the file was written with."""
        return self._noise_level

    @classmethod
    def load(cls, path: FileName) -> CommTrace:
        """Read a trace.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a trace, or of a version that this library does not know.
        """
        with open(path, encoding="utf-8") as file:
            return cls._parse(file.read, path)

    @classmethod
    def of_text(cls, text: str, name: str) -> CommTrace:
        """A trace whose JSON is at hand; ``name`` is what errors call it."""
        return cls._parse(lambda: text, name)

    @classmethod
    def _parse(cls, read: Callable[[], str], path: FileName) -> CommTrace:
        with _collector_paused():
            return cls._parsed(read, path)

    @classmethod
    def _parsed(cls, read: Callable[[], str], path: FileName) -> CommTrace:
        try:
            data = json.loads(read())
        except ValueError as error:
            raise ValueError(f"a trace is a JSON file, but {path} is not: {error}; write one "
                             "with generate_json_dump.") from error
        if not isinstance(data, dict) or "records" not in data or "version" not in data:
            raise ValueError(f"a trace is a JSON object with `version` and `records`, but {path} "
                             "holds something else; write one with generate_json_dump.")
        if data["version"] != JSON_VERSION:
            raise ValueError(f"this library reads traces of version {JSON_VERSION}, but {path} is "
                             f"of version {data['version']!r}; write it again with this one.")
        try:
            return cls._from_data(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the trace {path} is damaged: {type(error).__name__}: {error}"
                             ) from error

    @classmethod
    def _from_data(cls, data: dict[str, Any]) -> CommTrace:
        tree = CallTree()
        tree.roots += [_record(entry, None) for entry in data["records"]]
        tree.counts.update(data["comm_counts"])
        tree.ledger = Ledger.from_data(data["summary"])
        tree.dropped = data["dropped_records"]
        trace = cls(tree, data["rank"], data["world_size"], data["noise_level"])
        trace._failure = data.get("incomplete")
        trace._parameters = {
            name: {**info, "shape": tuple(info["shape"]), "placements": _layout(info["placements"]),
                   "mesh_shape": _tuple(info["mesh_shape"])}
            for name, info in data["parameters"].items()}
        return trace

    def _warn_of_level(self, noise_level: int) -> None:
        if min(noise_level, FULL_LEVEL) > self._noise_level:
            raise ValueError(
                f"the file was written with noise_level={self._noise_level}, so it cannot show "
                f"{noise_level}; write it with generate_json_dump(noise_level={noise_level}).")


def _record(data: dict[str, Any], parent: DebugCall | None) -> DebugCall:
    """One record and those inside it."""
    record = _MAKERS[data["type"]](data)
    record.timestamp, record.duration = data["timestamp"], data["duration"]
    record.fingerprints = tuple(map(Fingerprint.from_data, data.get("fingerprints", ())))
    if parent is not None:
        inherit(record, parent)
    record.children += [_record(child, record) for child in data["children"]]
    return record


def _op(data: dict[str, Any]) -> OpCall:
    return OpCall(data["op_name"], _infos(data["inputs"]), _infos(data["outputs"]),
                  data["fallback"], operator=data["op_name"], call_site=data.get("call_site"))


def _collective(data: dict[str, Any]) -> CollectiveCall:
    names = ("collective_type", "group_size", "input_dtype", "phase", "input_bytes",
             "output_bytes", "wire_bytes", "axis", "reduce_op", "module", "argument", "call_site",
             "sequence")
    return CollectiveCall(
        **{name: data[name] for name in names}, operator=data["op"], ranks=tuple(data["ranks"]),
        input_shape=_tuple(data["input_shape"]), output_shape=_tuple(data["output_shape"]),
        peer=data.get("peer"))  # older files have none


def _redistribute(data: dict[str, Any]) -> RedistributeCall:
    return RedistributeCall(
        _layout(data["src_placements"]), _layout(data["dst_placements"]),
        tuple(data["tensor_shape"]), data["phase"], tuple(data["mesh_axes"]), data["needed_by"],
        argument=data["argument"], call_site=data["call_site"])


def _module(data: dict[str, Any]) -> AnnotateCall:
    return AnnotateCall(data["module_fqn"], data["event_type"], module=data["module_fqn"])


_MAKERS = {"op": _op, "collective": _collective, "redistribute": _redistribute, "module": _module}


def _infos(data: list[dict[str, Any]]) -> list[TensorInfo]:
    return [_info(tuple(info["shape"]), info["dtype"], info["is_dtensor"],
                  _tuple(info["placements"])) for info in data]


# Tensors that look alike share their info, as they did in the mode.
@lru_cache(maxsize=1024)
def _info(shape: tuple[int, ...], dtype: str, is_dtensor: bool, names: tuple[str, ...] | None
          ) -> TensorInfo:
    return TensorInfo(shape, dtype, is_dtensor, _layout(names))


def _layout(names: Sequence[str] | None) -> tuple[Placement, ...] | None:
    return None if names is None else tuple(map(_placement, names))


@lru_cache(maxsize=1024)
def _placement(text: str) -> Placement:
    """The placement that prints like this."""
    kind, value = re.fullmatch(r"(\w+)\((?:dim=)?(.*)\)", text).groups()
    if kind == "Shard":
        return Shard(int(value))
    return Partial(value) if kind == "Partial" else Replicate()


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Most of the time would go to the search for cycles in millions of new objects without any."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

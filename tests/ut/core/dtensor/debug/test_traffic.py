"""Bytes, axes and sums, worked out by hand; Chrome's format; traces that cannot be read."""
import json
import sys
import types
from typing import Any

import pytest
import torch

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.debug import CommDebugMode, CommTrace, forbid_implicit
from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall, walk
from hyper_parallel.core.dtensor.debug._traffic import axis_of, reduce_op, wire_bytes
from hyper_parallel.platform import get_platform

ALL_REDUCE = "differentiable_all_reduce"
ALL_GATHER = "differentiable_all_gather_concat"
PAIR = types.SimpleNamespace(size=lambda: 2)


@pytest.fixture(name="world")
def fixture_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of eight ranks can be described, though this process runs alone."""
    monkeypatch.setattr(type(get_platform()), "known_world_size", staticmethod(lambda: 8))


@pytest.mark.parametrize("method, size, kept, expected", [
    (ALL_REDUCE, 4, None, 1200), (ALL_REDUCE, 2, None, 800), (ALL_REDUCE, 1, None, 0),
    (ALL_REDUCE, 0, None, 0), (ALL_GATHER, 4, None, 2400),
    ("differentiable_reduce_scatter", 4, None, 600), ("differentiable_all_to_all", 4, None, 600),
    ("differentiable_all_to_all_single", 4, 0.5, 400),
    ("differentiable_all_to_all_single_async", 4, 0.0, 800),
])
def test_wire_bytes(method: str, size: int, kept: float | None, expected: int) -> None:
    assert wire_bytes(method, size, 800, 3200, kept) == expected


def test_reduce_op_is_found_by_place_and_name() -> None:
    assert reduce_op(ALL_REDUCE, (None, "max", None), {}) == "max"
    assert reduce_op(ALL_REDUCE, (None,), {"op": "avg", "group": None}) == "avg"
    assert reduce_op("differentiable_reduce_scatter", (None, 2, 0, "sum", None), {}) == "sum"
    assert reduce_op(ALL_GATHER, (None, None, 2, 0), {"op": "sum"}) is None


@pytest.mark.usefixtures("world")
def test_axis() -> None:
    mesh = DeviceMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("dp", "cp", "tp"))
    assert axis_of(mesh, (4, 5)) == "tp"
    assert axis_of(mesh, (5, 7)) == "cp"
    assert axis_of(mesh, (3, 7)) == "dp"
    assert axis_of(mesh, (4, 5, 6, 7)) == "cp+tp"
    assert axis_of(mesh, (2, 3, 6, 7)) == "dp+tp"
    assert axis_of(mesh, (0, 1, 2, 3, 4, 5, 6, 7)) == "dp+cp+tp"
    assert axis_of(mesh, (0, 3)) is None
    assert axis_of(mesh, (0, 1, 2)) is None
    assert axis_of(mesh, (0, 9)) is None
    assert axis_of(mesh["dp", "cp"].flatten("x"), (0, 2, 4, 6)) == "dp+cp"
    assert axis_of(DeviceMesh([3, 1, 2, 0], ("tp",)), (3, 1, 2, 0)) == "tp"


def test_summary_adds_up_and_prints() -> None:
    mode = CommDebugMode()
    for axis, module, size in (("tp", "a", 100), ("tp", "b", 50), ("dp", "a", 7), (None, None, 1)):
        mode._tree.add_collective(CollectiveCall(
            ALL_REDUCE, wire_bytes=size, axis=axis, module=module, input_dtype="torch.int8"))
    assert {key: one["wire_bytes"] for key, one in mode.get_comm_summary("axis").items()} == {
        "tp": 150, "dp": 7, None: 1}
    assert list(mode.get_comm_summary(("module", "axis"))) == [
        ("a", "tp"), ("b", "tp"), ("a", "dp"), (None, None)]
    assert mode.get_comm_bytes() == {ALL_REDUCE: 158}
    lines = [line.split() for line in mode.generate_comm_summary_table(("axis", "module"))
             .split("\n")]
    assert lines[2] == ["tp", "a", "1", "0", "0", "100"]
    assert lines[-1] == ["total", "4", "0", "0", "158"]
    assert mode.generate_comm_summary_table("axis").split("\n")[2].split() == [
        "tp", "2", "0", "0", "150"]


@pytest.mark.parametrize("by", ["rank", (), ("axis", "x")])
def test_wrong_grouping_raises(by: Any) -> None:
    with pytest.raises(ValueError, match="grouped by one or more of"):
        CommDebugMode().get_comm_summary(by)


def test_many_collectives_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """C17, second half: past the bound nothing grows and nothing is miscounted."""
    cls = type(get_platform())
    monkeypatch.setattr(cls, ALL_REDUCE, staticmethod(lambda data, op, group: data))
    x = torch.zeros(2)
    with CommDebugMode(max_records=10) as mode:
        for _ in range(1000):
            cls.differentiable_all_reduce(x, "sum", PAIR)
        blocks = sys.getallocatedblocks()
        for _ in range(19_000):
            cls.differentiable_all_reduce(x, "sum", PAIR)
        grown = sys.getallocatedblocks() - blocks
    assert grown < 500
    assert mode.get_comm_counts() == {ALL_REDUCE: 20_000}
    assert (mode.dropped_records, sum(1 for _ in walk(mode._root_records))) == (19_990, 10)


@pytest.mark.parametrize("bound, error", [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_wrong_bound_raises(bound: Any, error: type) -> None:
    with pytest.raises(error, match="max_records is"):
        CommDebugMode(max_records=bound)


def test_wrong_action_raises() -> None:
    with pytest.raises(ValueError, match="'raise' or 'warn', but got 'ignore'"):
        with forbid_implicit("ignore"):
            pass


def test_chrome_trace(tmp_path: Any) -> None:
    x = torch.zeros(2)
    with CommDebugMode() as mode:
        mode._on_module_event("(root)", "enter")
        mode._on_module_event("fc", "enter")
        mode._on_op_dispatch_enter("linear", None, (x,), {})
        mode._on_collective_call(ALL_REDUCE, (x, "sum", PAIR), {}, x, 0.5)
        mode._on_op_dispatch_exit("linear", x)
        mode._on_module_event("fc", "exit")
        mode._on_module_event("(root)", "exit")
    mode.generate_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events
             if event["name"] == "thread_name"}
    calls = {event["name"]: event for event in events if event["ph"] == "X"}
    assert {name: names[event["tid"]] for name, event in calls.items()} == {
        "(root)": "modules, depth 0", "fc": "modules, depth 1", "linear": "operators",
        ALL_REDUCE: "collectives"}
    assert calls[ALL_REDUCE]["dur"] == 500_000
    assert calls[ALL_REDUCE]["args"]["input_bytes"] == 8
    (root, inner) = calls["(root)"], calls["fc"]
    assert root["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= root["ts"] + root["dur"]


def write(path: Any, **changes: Any) -> Any:
    """A trace of one operator with some keys of its JSON changed; None takes one away."""
    with CommDebugMode() as mode:
        mode.on_op_dispatch_enter("mm")
        mode.on_op_dispatch_exit("mm")
    mode.generate_json_dump(path)
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return path


@pytest.mark.parametrize("changes, words", [
    ({"version": 2}, "reads traces of version 1, but .* is of version 2"),
    ({"version": None}, "a JSON object with `version` and `records`"),
    ({"summary": None}, "is damaged: KeyError: 'summary'"),
    ({"records": [{"type": "op"}]}, "is damaged: KeyError"),
    ({"records": [{"type": "dance"}]}, "is damaged: KeyError: 'dance'"),
])
def test_bad_traces_say_what_is_wrong(tmp_path: Any, changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CommTrace.load(write(tmp_path / "trace.json", **changes))


def test_a_file_that_is_no_json(tmp_path: Any) -> None:
    (tmp_path / "x").write_text("{")
    with pytest.raises(ValueError, match="a trace is a JSON file, but .* is not"):
        CommTrace.load(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        CommTrace.load(tmp_path / "y")


def test_a_level_that_the_file_lacks(tmp_path: Any) -> None:
    trace = CommTrace.load(write(tmp_path / "trace.json"))
    assert "Op(mm)" in trace.generate_tracing_table(2)
    with pytest.raises(ValueError, match="written with noise_level=2, so it cannot show 3"):
        trace.generate_tracing_table(3)


def test_large_trace_is_read_back(tmp_path: Any) -> None:
    mode = CommDebugMode()
    x = torch.zeros(2)
    with mode:
        for index in range(2000):
            mode.on_op_dispatch_enter(f"op{index % 7}", None, (x, x), {})
            mode._on_collective_call(ALL_REDUCE, (x, "sum", PAIR), {}, x, 1e-3)
            mode.on_op_dispatch_exit(f"op{index % 7}", x)
    mode.generate_json_dump(tmp_path / "t", noise_level=3)
    trace = CommTrace.load(tmp_path / "t")
    assert trace.generate_tracing_table(1) == mode.generate_tracing_table(1)
    assert [one.sequence for _, one in walk(trace._root_records)
            if isinstance(one, CollectiveCall)] == list(range(2000))

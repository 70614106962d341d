"""JSON and files: shapes of the data, and what becomes of a file that cannot be written."""
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.core.dtensor.debug import CommDebugMode
from hyper_parallel.core.dtensor.debug._call_records import (
    AnnotateCall,
    CollectiveCall,
    OpCall,
    RedistributeCall,
    TensorInfo,
)
from hyper_parallel.core.placement_types import Partial, Replicate, Shard

ALL_REDUCE = "differentiable_all_reduce"


@pytest.fixture(name="mode")
def fixture_mode() -> CommDebugMode:
    """A trace that has a record of each kind."""
    mode = CommDebugMode(module=torch.nn.Module())
    op = OpCall("linear", [TensorInfo((4, 32), "torch.float32", True, (Shard(1),), (2,)),
                           TensorInfo((), "torch.int64")],
                [TensorInfo((4, 16), "torch.float32", True, (Partial(),), (2,))])
    move = RedistributeCall((Partial(),), (Replicate(),), (4, 16), "forward", ("tp",), "linear",
                            argument="1", call_site="model.py:7")
    collective = CollectiveCall(
        ALL_REDUCE, 2, (4, 16), (4, 16), "torch.float32", "forward", 256, 256, 256, "tp", (0, 1),
        "sum", argument="1", call_site="model.py:7", module="fc2", operator="linear")
    mode._tree.ledger.add(collective)
    move.children.append(collective)
    op.children.append(move)
    module = AnnotateCall("fc2")
    module.children.append(op)
    mode._root_records.append(module)
    mode._comm_counts[ALL_REDUCE] = 1
    return mode


COLLECTIVE = {"type": "collective", "collective_type": ALL_REDUCE, "group_size": 2,
              "input_shape": [4, 16], "output_shape": [4, 16], "input_dtype": "torch.float32",
              "phase": "forward", "input_bytes": 256, "output_bytes": 256, "wire_bytes": 256,
              "axis": "tp", "ranks": [0, 1], "reduce_op": "sum", "module": "fc2", "op": "linear",
              "argument": "1", "call_site": "model.py:7", "sequence": 0, "peer": None,
              "native": False, "children": []}
OP = {"type": "op", "op_name": "linear",
      "inputs": [{"shape": [4, 32], "dtype": "torch.float32", "is_dtensor": True,
                  "placements": ["Shard(dim=1)"]},
                 {"shape": [], "dtype": "torch.int64", "is_dtensor": False, "placements": None}],
      "outputs": [{"shape": [4, 16], "dtype": "torch.float32", "is_dtensor": True,
                   "placements": ["Partial(sum)"]}],
      "fallback": False, "children": [COLLECTIVE]}
MODULE = {"type": "module", "module_fqn": "fc2", "event_type": "enter", "children": [OP]}
MOVE = {"type": "redistribute", "src_placements": ["Partial(sum)"],
        "dst_placements": ["Replicate()"], "tensor_shape": [4, 16], "phase": "forward",
        "mesh_axes": ["tp"], "implicit": True, "needed_by": "linear", "argument": "1",
        "call_site": "model.py:7", "children": [COLLECTIVE]}


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records less what differs from run to run, which must be there."""
    for record in records:
        assert record.pop("timestamp") > 0 and record.pop("duration") >= 0
        without_times(record["children"])
    return records


@pytest.mark.parametrize("level, records", [
    (None, [MODULE]),
    (0, [COLLECTIVE]),
    (1, [OP]),
    (2, [MODULE]),
    (3, [{**MODULE, "children": [{**OP, "children": [MOVE]}]}]),
])
def test_json(mode, tmp_path, level, records):
    path = tmp_path / "trace.json"
    mode.generate_json_dump(str(path), noise_level=level)
    data = json.loads(path.read_text())
    assert without_times(data.pop("records")) == records
    assert data == {
        "comm_counts": {ALL_REDUCE: 1}, "total_counts": 1, "sharding_info": {}, "version": 1,
        "noise_level": 2 if level is None else level, "rank": 0, "world_size": 1,
        "dropped_records": 0, "parameters": {}, "summary": [
            {"type": ALL_REDUCE, "axis": "tp", "module": "fc2", "op": "linear", "phase": "forward",
             "dtype": "torch.float32", "count": 1, "input_bytes": 256, "output_bytes": 256,
             "wire_bytes": 256}]}


def test_json_says_that_it_is_incomplete(mode, tmp_path):
    mode._note_failure("ValueError: x")
    mode.generate_json_dump(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["incomplete"] == "ValueError: x"


def test_default_file_names(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mode.log_comm_debug_tracing_table_to_file()
    mode.generate_json_dump()
    assert sorted(os.listdir()) == ["comm_mode_log.json", "comm_mode_log.txt"]


@pytest.mark.parametrize("level", [None, 0, 1, 2, 3])
def test_log_holds_the_table(mode, tmp_path, level):
    mode.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt", level)
    assert (tmp_path / "log.txt").read_text() == mode.generate_tracing_table(level) + "\n"


def test_log_has_no_terminal_escapes(tmp_path):
    mode = CommDebugMode()
    mode._root_records.append(OpCall("\x1b[1;31mmm\x1b[0m \x1b]0;title\x07[é]"))
    mode.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt")
    line = (tmp_path / "log.txt").read_text(encoding="utf-8").split("\n")[2]
    assert line == "Op                   Op(mm [é]) inputs=[] outputs=[]"


def test_levels_are_nested(mode):
    tables = [mode.generate_tracing_table(level).split("\n") for level in range(4)]
    for lower, higher in zip(tables, tables[1:]):
        shown = [" ".join(line.split()) for line in higher]
        assert all(any(other.startswith(" ".join(line.split())) for other in shown)
                   for line in lower)
        assert len(higher) == len(lower) + 1


def test_redistribute_is_shown_and_indents_from_level_3_only(mode):
    detail = ("Collective(differentiable_all_reduce) group_size=2 "
              "input_shape=(4, 16) output_shape=(4, 16)")
    assert mode.generate_tracing_table(2).split("\n")[-1] == f"    Collective       {detail}"
    assert mode.generate_tracing_table(3).split("\n")[-2:] == [
        "    Redistribute     Redistribute(Partial(sum) -> Replicate()) tensor_shape=(4, 16) "
        "implicit for argument 1 of linear at model.py:7",
        f"      Collective     {detail} axis=tp ranks=(0, 1) dtype=torch.float32 reduce_op=sum "
        "input_bytes=256 output_bytes=256 wire_bytes=256"]


def test_wrong_levels_raise(mode):
    for write in (mode.generate_tracing_table, mode.log_comm_debug_tracing_table_to_file,
                  mode.generate_json_dump):
        with pytest.raises(TypeError, match="int from 0 to 3 or None, but got '1'"):
            write(noise_level="1")
        with pytest.raises(TypeError, match="but got True"):
            write(noise_level=True)
        with pytest.raises(ValueError, match="but got -1"):
            write(noise_level=-1)


@pytest.mark.parametrize("write", ["log_comm_debug_tracing_table_to_file", "generate_json_dump"])
class TestFiles:
    """Both writers treat files alike."""

    @pytest.mark.parametrize("name, error", [
        ("missing/trace", FileNotFoundError),
        ("", IsADirectoryError),
        ("file/trace", NotADirectoryError),
    ])
    def test_path_that_cannot_be_written(self, mode, tmp_path, write, name, error):
        (tmp_path / "file").write_text("old")
        path = os.path.join(tmp_path, name)
        with pytest.raises(error) as caught:
            getattr(mode, write)(path)
        assert caught.value.filename == path
        assert os.listdir(tmp_path) == ["file"]

    def test_folder_without_permission(self, mode, tmp_path, write):
        tmp_path.chmod(0o500)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            with pytest.raises(PermissionError) as caught:
                getattr(mode, write)(tmp_path / "trace")
        finally:
            os.seteuid(user)
        assert caught.value.filename == str(tmp_path / "trace")
        tmp_path.chmod(0o700)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("old", [None, "old"])
    def test_full_disk_leaves_what_was_there(self, mode, tmp_path, write, old, monkeypatch):
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        if old is not None:
            (tmp_path / "trace").write_text(old)
        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            getattr(mode, write)(tmp_path / "trace")
        left = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert left == ({} if old is None else {"trace": old})

    def test_file_keeps_its_mode_and_link(self, mode, tmp_path, write):
        (tmp_path / "real").write_text("old and much longer than nothing")
        (tmp_path / "real").chmod(0o640)
        (tmp_path / "link").symlink_to("real")
        getattr(mode, write)(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
        assert ALL_REDUCE in (tmp_path / "real").read_text()
        assert sorted(os.listdir(tmp_path)) == ["link", "real"]

    def test_new_file_has_the_usual_mode(self, mode, tmp_path, write):
        (tmp_path / "usual").touch()
        getattr(mode, write)(tmp_path / "trace")
        assert (tmp_path / "trace").stat().st_mode == (tmp_path / "usual").stat().st_mode

    def test_pipe_is_written_to_and_stays(self, mode, tmp_path: Path, write):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            getattr(mode, write)(pipe)
            assert ALL_REDUCE in os.read(reader, 65536).decode()
        finally:
            os.close(reader)
        assert stat.S_ISFIFO(pipe.stat().st_mode) and os.listdir(tmp_path) == ["pipe"]

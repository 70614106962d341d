"""Budgets, comparisons and commands, on traces made by hand."""
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.core.dtensor.debug._call_records import AnnotateCall, CollectiveCall
from hyper_parallel.core.dtensor.debug._call_tree import CallTree
from hyper_parallel.debug import (
    CommDebugMode,
    CommTrace,
    assert_comms,
    check_traces,
    diff_traces,
)
from hyper_parallel.debug.__main__ import main
from hyper_parallel.debug.pytest_plugin import comm_budget
from hyper_parallel.platform import get_platform

ALL_REDUCE = "differentiable_all_reduce"
ALL_GATHER = "differentiable_all_gather_concat"
EXCHANGE = "differentiable_all_to_all_single"


def call(kind: str = ALL_REDUCE, ranks: tuple[int, ...] = (0, 1), **more: Any) -> CollectiveCall:
    """A collective of 64 bytes on the wire in module "b"."""
    values = {"group_size": len(ranks), "input_shape": (4, 4), "input_dtype": "torch.float32",
              "wire_bytes": 64, "axis": "tp", "reduce_op": "sum", "module": "b",
              "operator": "linear", "call_site": "model.py:7", **more}
    return CollectiveCall(kind, ranks=ranks, **values)


def make_trace(*calls: CollectiveCall, rank: int = 0, max_records: int | None = None) -> CommTrace:
    """The trace of a rank that issued these collectives in module "b"."""
    tree = CallTree(max_records)
    tree.open(AnnotateCall("b"), None)
    for one in calls:
        tree.add_collective(one)
    tree.close(lambda _: True)
    return CommTrace(tree, rank, 4, 3)


def failure_of(trace: CommTrace, **budget: Any) -> str:
    """What a budget that is not kept says."""
    with pytest.raises(AssertionError) as caught:
        assert_comms(trace, **budget)
    return str(caught.value)


class TestBudget:
    """``assert_comms`` and its fixture."""

    def test_kept(self):
        trace = make_trace(call(), call(), call(ALL_GATHER, axis="dp+tp"))
        assert_comms(trace)
        assert_comms(trace, all_reduce=2, all_gather=1, total=3, bytes_at_most=192,
                     by_axis={"tp": 2, "dp+tp": {"all_gather": 1}})
        assert_comms(make_trace(), total=0, all_reduce=0, by_axis={})

    @pytest.mark.parametrize("budget, words", [
        ({"all_reduce": 1, "all_gather": 1}, "expected 1 all_reduce, but found 2"),
        ({"all_reduce": 2}, "expected 0 all_gather, but found 1"),
        ({"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1},
         "expected 1 reduce_scatter, but found 0"),
        ({"total": 2}, "expected 2 collectives, but there are 3"),
        ({"bytes_at_most": 191}, "expected at most 191 bytes, but the rank sends 192"),
        ({"by_axis": {"tp": 2}}, "expected 0 all_gather along dp+tp, but found 1"),
        ({"by_axis": {"tp": 1, "dp+tp": 1}}, "expected 1 collectives along tp, but there are 2"),
        ({"by_axis": {"tp": {"all_gather": 2}, "dp+tp": 1}},
         "expected 2 all_gather along tp, but found 0"),
        ({"by_axis": {"tp": 2, "dp+tp": 1, "cp": 1}},
         "expected 1 collectives along cp, but there are 0"),
    ])
    def test_not_kept(self, budget, words):
        message = failure_of(make_trace(call(), call(), call(ALL_GATHER, axis="dp+tp")), **budget)
        assert f"  {words}\n" in message
        assert "Collective(differentiable_all_gather_concat) group_size=2" in message

    def test_incomplete(self):
        trace = make_trace()
        trace._failure = "ValueError: x"
        assert "the trace is incomplete: ValueError: x" in failure_of(trace)

    @pytest.mark.parametrize("budget", [{"allreduce": 1}, {"by_axis": {"tp": {"allreduce": 1}}}])
    def test_unknown_kind(self, budget):
        with pytest.raises(TypeError, match="but got 'allreduce'"):
            assert_comms(make_trace(), **budget)

    def test_fixture(self, monkeypatch):
        cls = type(get_platform())
        monkeypatch.setattr(cls, ALL_REDUCE, staticmethod(lambda data, op, group: data))
        pair = torch.distributed.ProcessGroup(0, 2)
        budget = comm_budget.__wrapped__()
        with budget(all_reduce=1) as mode:
            cls.differentiable_all_reduce(torch.zeros(2), "sum", pair)
        assert isinstance(mode, CommDebugMode)
        with pytest.raises(AssertionError, match="expected 2 all_reduce, but found 0"):
            with budget(all_reduce=2):
                pass
        with pytest.raises(ZeroDivisionError):
            with budget(all_reduce=2):
                raise ZeroDivisionError


def test_diff():
    before = make_trace(call(), call(ALL_GATHER), call(EXCHANGE))
    after = make_trace(call(), call(), call(EXCHANGE), call(ALL_GATHER, module="c"))
    assert diff_traces(before, before) == []
    common = "axis=tp phase=forward dtype=torch.float32"
    assert diff_traces(before, after) == [
        f"- module=b op=linear type={ALL_GATHER} {common}: 1 calls, 64 bytes",
        f"~ module=b op=linear type={ALL_REDUCE} {common}: 1 -> 2 calls, 64 -> 128 bytes",
        f"+ module=c op=linear type={ALL_GATHER} {common}: 1 calls, 64 bytes"]


class TestCheck:
    """The first place where ranks part."""

    def test_agreement(self):
        both = [make_trace(call(), call(ALL_GATHER), call(ranks=(rank, rank + 2)), rank=rank)
                for rank in (0, 1)]
        assert check_traces(both) is None
        assert check_traces([]) is None

    def test_pieces_of_an_uneven_exchange_may_differ(self):
        assert check_traces([make_trace(call(EXCHANGE, input_shape=(rank,)), rank=rank)
                             for rank in (0, 1)]) is None

    @pytest.mark.parametrize("change", [
        {"kind": ALL_GATHER}, {"input_dtype": "torch.int64"}, {"input_shape": (4, 5)},
        {"reduce_op": "max"}])
    def test_each_difference_is_found(self, change):
        text = check_traces([make_trace(call(), call(), rank=0),
                             make_trace(call(), call(**{"call_site": "other.py:9", **change}),
                                        rank=1)])
        first, here, there = text.split("\n")
        assert first == "group (0, 1), call 1: its ranks do not do the same"
        assert here == ("  rank 0: differentiable_all_reduce sum of torch.float32 (4, 4), forward "
                        "of module b, operator linear, at model.py:7")
        assert there.startswith("  rank 1: ") and there.endswith("at other.py:9")

    def test_missing_call(self):
        text = check_traces([make_trace(call(), rank=1), make_trace(rank=0)])
        assert text.split("\n")[1] == "  rank 0: nothing, its trace ends before"

    def test_the_earliest_difference_counts(self):
        late = [make_trace(call(ranks=(0, 1, 2)), call(), call(op, ranks=(0, 1, 2)), rank=rank)
                for rank, op in ((0, ALL_REDUCE), (1, ALL_GATHER))]
        assert check_traces(late).startswith("group (0, 1, 2), call 1:")
        early = [make_trace(call(ranks=(0, 1, 2)), call(op), call(op, ranks=(0, 1, 2)), rank=rank)
                 for rank, op in ((0, ALL_REDUCE), (1, ALL_GATHER))]
        assert check_traces(early).startswith("group (0, 1), call 0:")

    def test_what_cannot_be_compared(self):
        with pytest.raises(ValueError, match="rank 0 came twice"):
            check_traces([make_trace(), make_trace()])
        with pytest.raises(ValueError, match="rank 0 does not hold all"):
            check_traces([make_trace(call(), max_records=0)])


class TestCommand:
    """Exit statuses and output of ``python -m hyper_parallel.debug``."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Callable[..., str]:
        """Writes a trace and gives its path."""
        def write(name: str, *calls: CollectiveCall, rank: int = 0) -> str:
            make_trace(*calls, rank=rank).generate_json_dump(tmp_path / name, noise_level=3)
            return str(tmp_path / name)

        return write

    def test_show(self, file, capsys):
        path = file("a", call())
        assert main(["show", path, "--by", "axis,phase"]) == 0
        out = capsys.readouterr().out
        trace = CommTrace.load(path)
        assert out == (f"{trace.generate_tracing_table(3)}\n\n"
                       f"{trace.generate_comm_summary_table(('axis', 'phase'))}\n")
        assert main(["show", path, "--level", "0"]) == 0
        assert "Module" not in capsys.readouterr().out

    def test_chrome(self, file, tmp_path):
        assert main(["chrome", file("a", call()), "-o", str(tmp_path / "out")]) == 0
        assert ALL_REDUCE in (tmp_path / "out").read_text()

    def test_diff(self, file, capsys):
        paths = file("a", call()), file("b", call(), call())
        assert main(["diff", paths[0], paths[0]]) == 0 and capsys.readouterr().out == ""
        assert main(["diff", *paths]) == 1
        assert capsys.readouterr().out.startswith("~ module=b op=linear")

    def test_check(self, file, capsys):
        paths = [file(f"r{rank}", call(op), rank=rank)
                 for rank, op in ((0, ALL_REDUCE), (1, ALL_GATHER))]
        assert main(["check", paths[0]]) == 0 and capsys.readouterr().out == ""
        assert main(["check", *paths]) == 1
        assert capsys.readouterr().out.startswith("group (0, 1), call 0:")

    @pytest.mark.parametrize("words", [["show", "missing"], ["check", "missing"],
                                       ["diff", "missing", "missing"]])
    def test_unreadable_file(self, words, capsys):
        assert main(words) == 2
        assert "missing" in capsys.readouterr().err

    def test_as_a_program(self, file):
        for words, status, out in ((["--help"], 0, "check"), ([], 2, ""),
                                   (["diff", file("a", call()), file("b")], 1, "- module=b")):
            done = subprocess.run([sys.executable, "-m", "hyper_parallel.debug", *words],
                                  capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == status and out in done.stdout

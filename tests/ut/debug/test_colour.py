"""Colour comes where a terminal is, and leaves the text as it is."""
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.core.dtensor.debug._call_records import (
    AnnotateCall, CollectiveCall, OpCall, RedistributeCall)
from hyper_parallel.core.dtensor.debug._call_tree import CallTree
from hyper_parallel.core.dtensor.debug._colour import coloured, wants_colour
from hyper_parallel.core.dtensor.debug._render import without_ansi
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.debug import CommTrace

VARIABLES = ("NO_COLOR", "FORCE_COLOR", "TERM")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def make_trace() -> CommTrace:
    """One record of every kind, the last record dropped, and an error."""
    tree = CallTree(4)
    for record in (AnnotateCall("b"), OpCall("linear", fallback=True),
                   RedistributeCall((Partial(),), (Replicate(),), (4, 8), needed_by="linear")):
        tree.open(record, tree.innermost)
    for _ in range(2):
        tree.add_collective(CollectiveCall(
            "differentiable_all_reduce", 2, (4, 8), (4, 8), phase="backward", wire_bytes=64))
    tree.close(lambda record: isinstance(record, AnnotateCall))
    trace = CommTrace(tree, 0, 2, 3)
    trace._failure = "ValueError: no"
    return trace


def printed(stream: io.StringIO) -> str:
    """What the method prints to a stream."""
    make_trace().print_comm_debug_tracing_table(3, stream)
    return stream.getvalue()


@pytest.mark.parametrize("level", range(4))
def test_only_escapes_are_added(level: int) -> None:
    trace = make_trace()
    table = trace.generate_comm_debug_tracing_table(level)
    assert "\x1b" not in table
    assert coloured(table) != table and without_ansi(coloured(table)) == table
    summary = trace.generate_comm_summary_table(("module", "phase"))
    assert without_ansi(coloured(summary)) == summary


def test_what_is_coloured() -> None:
    lines = coloured(make_trace().generate_comm_debug_tracing_table(3)).split("\n")
    assert lines[0] == "\x1b[1mType                 Detail\x1b[0m"
    assert lines[1] == "\x1b[2m" + "-" * 80 + "\x1b[0m"
    assert lines[2] == "\x1b[1mModule\x1b[0m               Module(b) [enter]"
    assert lines[3] == ("  \x1b[36mOp\x1b[0m                 Op(linear) inputs=[] outputs=[]"
                        "\x1b[31m fallback\x1b[0m")
    assert lines[4] == ("    \x1b[33mRedistribute\x1b[0m     Redistribute(Partial(sum) -> "
                        "Replicate()) tensor_shape=(4, 8)\x1b[31m implicit for \x1b[0mlinear")
    assert lines[5].startswith("      \x1b[1;35mCollective\x1b[0m     Collective(")
    assert "\x1b[33m phase=backward\x1b[0m" in lines[5]
    assert lines[5].endswith("\x1b[1m wire_bytes=64\x1b[0m")
    assert lines[6:] == ["(1 records dropped: max_records was reached)",
                         "\x1b[31m(incomplete: ValueError: no)\x1b[0m"]


def test_a_terminal_has_colour_and_a_file_has_none() -> None:
    plain = make_trace().generate_comm_debug_tracing_table(3) + "\n"
    assert printed(io.StringIO()) == plain
    assert printed(Terminal()) == coloured(plain)


@pytest.mark.parametrize(("environment", "of_terminal", "of_file"), [
    ({}, True, False),
    ({"NO_COLOR": "1"}, False, False),
    ({"NO_COLOR": "", "FORCE_COLOR": ""}, True, False),
    ({"FORCE_COLOR": "1"}, True, True),
    ({"TERM": "dumb"}, False, False),
    ({"TERM": "xterm-256color"}, True, False),
    ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
    ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
])
def test_environment(environment: dict[str, str], of_terminal: bool, of_file: bool,
                     monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Terminal()) is of_terminal
    assert wants_colour(io.StringIO()) is of_file


def test_standard_output_is_that_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    make_trace().print_comm_debug_tracing_table()
    assert capsys.readouterr().out == make_trace().generate_comm_debug_tracing_table() + "\n"


def run_show(file: Path, **more: str) -> str:
    """What the command prints on a real terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "hyper_parallel.debug", "show", str(file)],
                          stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
                          env=environment | more) as process:
        os.close(theirs)
        out = bytearray()
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux's word for the end of a terminal
                break
            out += piece
        assert process.wait(120) == 0
    os.close(ours)
    return out.decode().replace("\r\n", "\n")


def test_command_on_a_terminal(tmp_path: Path) -> None:
    trace, file = make_trace(), tmp_path / "trace.json"
    trace.generate_json_dump(file, noise_level=3)
    plain = (trace.generate_comm_debug_tracing_table(3) + "\n\n"
             + trace.generate_comm_summary_table() + "\n")
    assert run_show(file, NO_COLOR="1") == plain
    shown = run_show(file, TERM="xterm")
    assert shown != plain and without_ansi(shown) == plain
    assert "\x1b[1;35mCollective\x1b[0m" in shown and "\x1b[1mtotal" in shown

"""Runs worker files of tests on real MindSpore processes.

A worker file ``_test_x.py`` holds plain functions ``def test_*() -> None``. Every rank calls
them, one after another, in the order in which they stand, with the default group initialised.
The file may set integers at its top level: ``NPROC``, the number of ranks (default 2),
``TIMEOUT``, the seconds that the whole file may take from the start of its processes (default
120), and ``WAIT``, the seconds that a rank waits for others in a collective (default 60); and
``BROKEN`` to True if its cases leave the communication broken. The entry file beside it that pytest
collects is three lines:

    @pytest.mark.parametrize("case", worker_cases(__file__, "_test_x.py"))
    def test_x(case: Case) -> None:
        run_case(case)

The first case of an entry file starts its processes, which run all of its cases: a start takes
seconds, so there is one for each entry file, which may name several worker files of one NPROC. They
are a scheduler, which MindSpore needs, and the ranks
(``_rank.py``), each in a session of its own. A rank in which a case fails ends there, since after
a failed collective nothing in a process can be relied on; the others are then killed, and the
file's later cases fail as not run. Nothing outlives the launch.
"""

import ast
import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Started by its path: the frames below `python -m` have no source, which jit by trace asks for.
RANK = Path(__file__).with_name("_rank.py")
GRACE = 5.0  # seconds that the other ranks get to report once one rank has failed
TAIL_LINES = 40
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOG_v": "3",
    "HYPER_PARALLEL_PLATFORM": "mindspore",
    "PYTHONPATH": str(ROOT),
    # Seconds that MindSpore waits for a rank before it gives up; a busy machine needs more than
    # the default.
    "MS_TOPO_TIMEOUT": "120",
}
NEEDS_MINDSPORE = pytest.mark.skipif(
    importlib.util.find_spec("mindspore") is None,
    reason="mindspore is not installed here: `make test-mindspore` has an environment with it")
SCHEDULER = "from mindspore.communication import init; init()"


@dataclass(frozen=True)
class Case:
    """One test function of some worker files that run together."""

    files: tuple[Path, ...]
    name: str


@dataclass(frozen=True)
class Launched:
    """What became of the worker files.

    Attributes:
        reports: for each rank the outcome (``"passed"``, or else a traceback) of each case that
            it came to, by name.
        logs: for each rank, the end of what it printed.
        reason: why the launch ended early, or an empty text.
    """

    reports: list[dict[str, str]]
    logs: list[str]
    reason: str


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _integer(tree: ast.Module, name: str, default: int) -> int:
    """The integer that a worker file assigns to ``name`` at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) \
                and node.targets[0].id == name:
            return int(ast.literal_eval(node.value))
    return default


def worker_cases(entry: str, *workers: str) -> list[Any]:
    """The cases of the worker files beside the entry file ``entry``, which one launch runs.

    They are read from the source, so that collecting imports nothing. A worker file without any
    case, or two cases of one name, is a ValueError.
    """
    files = tuple(Path(entry).resolve().parent / worker for worker in workers)
    found = [[node.name for node in _tree(file).body
              if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
             for file in files]
    names = sum(found, [])
    if not all(found) or len(set(names)) < len(names):
        raise ValueError(f"{files} must hold functions 'test_*', each name once, got {found}")
    return [pytest.param(Case(files, name), id=name, marks=NEEDS_MINDSPORE) for name in names]


def run_case(case: Case) -> None:
    """Fails with every rank's traceback and last output unless ``case`` passed on all ranks."""
    launched = launch(case.files)
    outcomes = [report.get(case.name, "not run") for report in launched.reports]
    if set(outcomes) == {"passed"}:
        return
    parts = [f"{case.name} on {len(outcomes)} ranks. {launched.reason}"]
    for rank, (outcome, log) in enumerate(zip(outcomes, launched.logs)):
        if outcome != "passed":
            parts.append(f"--- rank {rank} ---\n{outcome.rstrip()}")
        if log:
            parts.append(f"--- rank {rank}, end of its output ---\n{log}")
    pytest.fail("\n".join(parts), pytrace=False)


@functools.lru_cache(maxsize=None)
def launch(files: tuple[Path, ...]) -> Launched:
    """Runs worker files once, one after another in the same processes."""
    trees = [_tree(file) for file in files]
    nproc, = {_integer(tree, "NPROC", 2) for tree in trees}
    limit = sum(_integer(tree, "TIMEOUT", 120) for tree in trees)
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_ms_") as name:
        folder = Path(name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = os.environ | ENVIRONMENT | {
            "MS_WORKER_NUM": str(nproc), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
        wait = str(max(_integer(tree, "WAIT", 60) for tree in trees))
        processes: list[subprocess.Popen] = []
        try:
            processes.append(_start([sys.executable, "-c", SCHEDULER], folder, "scheduler",
                                    common | {"MS_ROLE": "MS_SCHED", "MS_NODE_TIMEOUT": "120"}))
            for rank in range(nproc):
                processes.append(_start(
                    [sys.executable, str(RANK), str(folder / f"report{rank}.jsonl"), str(limit),
                     *map(str, files)], folder, f"rank{rank}",
                    common | {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank),
                              "RANK_ID": str(rank), "MS_NODE_TIMEOUT": wait,
                              "MS_CPU_COMM_OP_TIMEOUT": wait}))
            reason = _wait(processes[1:], limit)
        finally:
            for process in processes:
                _kill(process)
        return Launched([_report(folder / f"report{rank}.jsonl") for rank in range(nproc)],
                        [_tail(folder / f"rank{rank}.log") for rank in range(nproc)], reason)


def _start(command: list[str], folder: Path, name: str, env: dict[str, str]) -> subprocess.Popen:
    with open(folder / f"{name}.log", "wb") as log:
        # Not in the project: MindSpore leaves files where it runs, such as graphs that failed.
        return subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                stderr=log, start_new_session=True)


def _wait(ranks: list[subprocess.Popen], limit: float) -> str:
    """Waits for the ranks; why not all of them ended well, or an empty text."""
    deadline = time.monotonic() + limit
    reason = ""
    while any(rank.poll() is None for rank in ranks):
        if not reason:
            failed = {index: rank.returncode for index, rank in enumerate(ranks)
                      if rank.returncode not in (None, 0)}
            if failed:
                reason = f"Exit codes by rank: {failed}."
                deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            return reason or f"Not finished within {limit:g} s, so the ranks were killed."
        time.sleep(0.05)
    failed = {index: rank.returncode for index, rank in enumerate(ranks) if rank.returncode}
    return f"Exit codes by rank: {failed}." if failed else ""


def _kill(process: subprocess.Popen) -> None:
    """Ends a process with all that it started; it may have ended already."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left of it
    process.wait()


def _report(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def _tail(path: Path) -> str:
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])

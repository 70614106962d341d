"""Runs worker files of tests on real ranks, started by torchrun.

A worker file ``_test_x.py`` holds plain functions ``def test_*() -> None``. Every rank calls
them, one after another, under an initialised gloo group with a bounded timeout and one thread.
The file may set two integers at its top level: ``NPROC``, the number of ranks (default 2), and
``TIMEOUT``, the group's timeout in seconds (default 60; a case is ended after twice that).
The entry file beside it that pytest collects is three lines:

    @pytest.mark.parametrize("case", worker_cases(__file__, "_test_x.py"))
    def test_x(case: Case) -> None:
        run_case(case)

How it works, since a launch costs seconds on a small machine:

* A *launch* is one torchrun for each number of ranks. It lives as long as the pytest session.
  Its ranks (``_rank.py``) import torch and nothing else, and then wait.
* A *crew* is one forked child of every rank of a launch. It runs the cases of one worker file,
  so that a file meets fresh processes but pays for no start of Python and torch. Each crew gets
  a store of its own, as the processes of each torchrun restart do.
* The launcher sends the name of a case to the whole crew and waits for every report. A crew in
  which a case failed, died, hung or replaced the default group is killed, and the next case gets
  a new one: no case ever starts from what a broken one left.

Nothing outlives pytest: a rank whose connection closes kills its child and ends.
"""

import ast
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT = 180.0  # seconds that torchrun and the ranks may take to come up
GRACE = 5.0  # seconds that the other ranks get to report once one rank has failed
TAIL_LINES = 40
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # torch's store looks up the name of every peer, 127.0.0.1 in its IPv6 form, which no hosts
    # file answers: a name server that drops such a question costs one second then, not ten.
    "RES_OPTIONS": "timeout:1 attempts:1",
}
MAX_LOST = 3  # cases of one file that may hang before its remaining cases are not run


@dataclass(frozen=True)
class Case:
    """One test function of a worker file.

    ``nproc`` is the number of ranks, ``timeout`` the default group's timeout in seconds.
    """

    file: Path
    name: str
    nproc: int
    timeout: int

    @property
    def limit(self) -> float:
        """Seconds after which a rank that has not finished this case is ended."""
        return 2.0 * self.timeout


@dataclass(frozen=True)
class Report:
    """What became of a case on one rank.

    ``outcome`` is ``passed``, ``failed``, ``skipped``, ``died`` or ``hung``; ``text`` holds the
    traceback or the reason; ``clean`` says that the crew's default group is still in place;
    ``output`` is the end of what the rank printed during the case.
    """

    outcome: str
    text: str
    clean: bool
    output: str = ""


def _integer(tree: ast.Module, name: str, default: int) -> int:
    """The integer that a worker file assigns to ``name`` at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == name:
                return int(ast.literal_eval(node.value))
    return default


def worker_cases(entry: str, worker: str) -> list[Any]:
    """The cases of the worker file ``worker`` beside the entry file ``entry``.

    They are read from the source, so that collecting costs no import. The result goes into
    ``pytest.mark.parametrize``. A worker file without any case is a ValueError.
    """
    file = Path(entry).resolve().parent / worker
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    names = [name for name in names if name.startswith("test_")]
    if not names:
        raise ValueError(f"{file} holds no function 'test_*': a worker file needs at least one")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{file} defines {twice} more than once: only the last would run")
    nproc = _integer(tree, "NPROC", 2)
    timeout = _integer(tree, "TIMEOUT", 60)
    return [pytest.param(Case(file, name, nproc, timeout), id=name) for name in names]


def run_case(case: Case) -> None:
    """Runs ``case`` on its ranks; fails with every failing rank's traceback and last output."""
    reports = run_ranks(case)
    outcomes = {report.outcome for report in reports}
    if outcomes == {"passed"}:
        return
    if outcomes == {"skipped"}:
        pytest.skip(reports[0].text)
    parts = [f"{case.name} on {case.nproc} ranks: {[r.outcome for r in reports]}"]
    for rank, report in enumerate(reports):
        if report.outcome != "passed":
            parts.append(f"--- rank {rank} {report.outcome} ---\n{report.text.rstrip()}")
        if report.output:
            parts.append(f"--- rank {rank}, end of its output ---\n{report.output.rstrip()}")
    pytest.fail("\n".join(parts), pytrace=False)


def run_ranks(case: Case) -> list[Report]:
    """Runs ``case`` and gives one report for each rank, in rank order."""
    launch = _launches.get(case.nproc)
    if launch is None:
        launch = _launches[case.nproc] = _Launch(case.nproc)
    try:
        return launch.run(case)
    except (EOFError, OSError) as error:
        # A rank itself is gone, not its child: nothing of this launch can be relied on.
        _launches.pop(case.nproc).close()
        lost = f"the launch of {case.nproc} ranks was lost: {error!r}\n{launch.torchrun_output()}"
        return [Report("died", lost, clean=False)] * case.nproc


def close_all() -> None:
    """Ends every launch; called once, when the pytest session finishes."""
    while _launches:
        _launches.popitem()[1].close()


class _Launch:
    """One torchrun with ``nproc`` ranks and a connection to each of them."""

    def __init__(self, nproc: int) -> None:
        self._held = ExitStack()
        self._folder = Path(self._held.enter_context(
            tempfile.TemporaryDirectory(prefix="hyper_parallel_ranks_")))
        self._connections: list[Connection] = []
        self._file: Path | None = None  # what the present crew serves; None: there is no crew
        self._pids: list[int] = []
        self._lost: Counter[Path] = Counter()
        log = self._held.enter_context(open(self._folder / "torchrun.log", "wb"))
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self._folder / "socket"))
            server.listen(nproc)
            # A session of its own, so that a Ctrl-C reaches pytest alone.
            self._torchrun = self._held.enter_context(subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc-per-node={nproc}", "-m", "tests.torch._rank", str(self._folder)],
                cwd=ROOT, env=os.environ | RANK_ENVIRONMENT, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True))
            try:
                self._connections = self._accept(server, nproc)
            except BaseException:
                self.close()
                raise

    def _accept(self, server: socket.socket, nproc: int) -> list[Connection]:
        """Waits for every rank's connection; RuntimeError with torchrun's output otherwise."""
        found: dict[int, Connection] = {}
        server.settimeout(1.0)
        deadline = time.monotonic() + START_LIMIT
        while len(found) < nproc:
            try:
                connection = Connection(server.accept()[0].detach())
                found[connection.recv()] = connection
            except TimeoutError:
                if self._torchrun.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"torchrun started {len(found)} of {nproc} ranks within "
                        f"{START_LIMIT:g} s:\n{self.torchrun_output()}") from None
        return [found[rank] for rank in range(nproc)]

    def torchrun_output(self) -> str:
        """The end of what torchrun itself printed."""
        return self._output("torchrun.log", 0)

    def _output(self, log: str, start: int) -> str:
        path = self._folder / log
        text = path.read_bytes()[start:].decode(errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def _sizes(self) -> list[int]:
        logs = [self._folder / f"rank{r}.log" for r in range(len(self._connections))]
        return [log.stat().st_size if log.exists() else 0 for log in logs]

    def run(self, case: Case) -> list[Report]:
        """Runs ``case`` with the present crew, or a new one where that serves another file."""
        if self._lost[case.file] >= MAX_LOST:
            text = f"not run: {MAX_LOST} cases of {case.file.name} hung before this one"
            return [Report("failed", text, clean=True)] * case.nproc
        starts = self._sizes()
        if self._file != case.file:
            self._dismiss()
            reports = self._hire(case)
            if reports is not None:
                return self._finish(case, reports, starts)
        for connection in self._connections:
            connection.send(case.name)
        return self._finish(case, self._collect(case.limit), starts)

    def _finish(self, case: Case, reports: list[Report], starts: list[int]) -> list[Report]:
        """Adds the ranks' output, and dismisses a crew that is not fit for another case."""
        self._lost[case.file] += any(report.outcome == "hung" for report in reports)
        if not all(report.outcome in ("passed", "skipped") and report.clean for report in reports):
            self._dismiss()
        return [Report(r.outcome, r.text, r.clean, self._output(f"rank{rank}.log", starts[rank]))
                for rank, r in enumerate(reports)]

    def _hire(self, case: Case) -> list[Report] | None:
        """Forks a crew for the case's file; reports if the file cannot be imported."""
        for connection in self._connections:
            connection.send((str(case.file), case.timeout))
        pids, ports = zip(*(connection.recv() for connection in self._connections))
        self._pids = list(pids)
        for connection in self._connections:
            connection.send(ports[0])  # where rank 0 opened the crew's store
        self._file = case.file
        reports = self._collect(case.limit)
        return None if all(report.outcome == "passed" for report in reports) else reports

    def _collect(self, limit: float) -> list[Report]:
        """One report of every rank. The crew is killed when a rank is late."""
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + limit
        while len(reports) < len(self._connections):
            waiting = [c for r, c in enumerate(self._connections) if r not in reports]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank, report = self._connections.index(connection), Report(*connection.recv())
                reports[rank] = report
                if report.outcome == "died":
                    self._pids[rank] = 0
                if report.outcome not in ("passed", "skipped"):
                    deadline = min(deadline, time.monotonic() + GRACE)
            if not ready:
                for rank in range(len(self._connections)):
                    if rank not in reports:
                        reports[rank] = self._kill(rank)
        return [reports[rank] for rank in range(len(self._connections))]

    def _kill(self, rank: int) -> Report:
        """Ends a late child, which first prints the stack of every thread it has."""
        os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.2)
        os.killpg(self._pids[rank], signal.SIGKILL)
        while self._connections[rank].recv()[0] != "died":
            pass  # it may have finished after all while it was being killed
        self._pids[rank] = 0
        return Report("hung", "killed: it had not finished; its output ends with its stacks",
                      clean=False)

    def _dismiss(self) -> None:
        """Kills what is left of the crew and waits until it is gone."""
        if self._file is None:
            return
        self._file = None
        for pid in filter(None, self._pids):
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it died by itself
        for pid, connection in zip(self._pids, self._connections):
            if pid and connection.poll(GRACE):
                while connection.recv()[0] != "died":
                    pass

    def close(self) -> None:
        """Ends the crew, the ranks and torchrun, and waits until they are gone."""
        try:
            self._dismiss()
        except (EOFError, OSError):
            pass  # a rank that is gone has no crew to dismiss
        for connection in self._connections:
            connection.close()
        self._torchrun.terminate()  # it would notice by itself that its ranks end, but later
        self._held.close()  # waits for torchrun, and removes the folder


_launches: dict[int, _Launch] = {}

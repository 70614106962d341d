"""Two real ranks that try sample after sample, and a leader that compares what they say.

The ranks are forked from the leader, which has everything imported, so that a fresh pair costs
little. Every trial is a meeting: a rank says what it is about to try, reports, and
waits for leave to go on. Where one of them
does not come in time, dies, or raises while the other does not, the verdict is wrong, both are
killed, and a fresh pair goes on with the next trial: no trial starts from what a broken one left.
"""

import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.torch.opdb.database import Entry
from tests.torch.opdb.libraries import LIBRARIES, Library
from tests.torch.opdb.trial import (
    CRASHED, EXCLUDED, LAYOUTS, ORDER, REFUSED, WRONG, Verdict, dense_outcome, run)

RANKS = 2
LIMIT = 30.0  # seconds that a trial may take
START = 120.0  # seconds that a pair may take to come up
GRACE = 10.0  # seconds that a rank may be later than the other

_fork = multiprocessing.get_context("fork")


class Trial(NamedTuple):
    """A sample of an entry in a layout."""

    entry: int
    number: int
    layout: str


def verdicts(entries: Sequence[Entry], library: str, limit: float = LIMIT, grace: float = GRACE
             ) -> Iterator[tuple[Trial, Verdict]]:
    """Try every sample of every entry in every layout.

    Args:
        entries: what to try.
        library: one of ``LIBRARIES``.
        limit: seconds after which a trial counts as a hang.
        grace: seconds that one rank may be later than the other.
    """
    start = (0, 0)
    while start[0] < len(entries):
        crew = _Crew(entries, library, start)
        try:
            for trial, verdict, go_on in crew.reports(limit, grace):
                yield trial, verdict
                start = (trial.entry, trial.number + 1)
                if not go_on:
                    break
            else:
                return
        finally:
            crew.close()


class _Crew:
    """A pair of ranks at work from trial ``start`` of an entry on."""

    def __init__(self, entries: Sequence[Entry], library: str, start: tuple[int, int]) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self._trial: Trial | None = None  # the one that a rank began last
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(RANKS):
            mine, other = _fork.Pipe()
            process = _fork.Process(target=_rank, args=(rank, port, other, entries, library, start),
                                    daemon=True)
            process.start()
            other.close()
            self._pipes.append(mine)
            self._ranks.append(process)

    def reports(self, limit: float, grace: float) -> Iterator[tuple[Trial, Verdict, bool]]:
        """Each trial, its verdict, and whether the crew can go on."""
        while True:
            found = self._collect(limit, grace)
            if all(report is None for report in found):
                return
            if self._trial is None:
                raise RuntimeError(f"the ranks did not get as far as a trial: {found}")
            verdict, go_on = _joined(found)
            yield self._trial, verdict, go_on
            if not go_on:
                return
            for pipe in self._pipes:
                pipe.send(True)

    def _collect(self, limit: float, grace: float) -> list:
        """What each rank says: a verdict, None at the end, or why there is nothing.

        A rank first says which trial it begins, so that a hang is put down to the right one.
        """
        found: dict[int, object] = {}
        # The first trial of a pair comes after its start, which takes its time on a busy machine.
        deadline = time.monotonic() + (max(limit, START) if self._trial is None else limit)
        while len(found) < RANKS:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                try:
                    said = pipe.recv()
                except EOFError:
                    said = "died"
                if isinstance(said, Trial):
                    if self._trial is None:
                        deadline = time.monotonic() + limit
                    self._trial = said
                    continue
                found[self._pipes.index(pipe)] = said
                deadline = min(deadline, time.monotonic() + grace)
            if not ready:
                found.update({rank: "hung" for rank in range(RANKS) if rank not in found})
        return [found[rank] for rank in range(RANKS)]

    def close(self) -> None:
        """End both ranks."""
        for process in self._ranks:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _joined(reports: Sequence[Verdict | str | None]) -> tuple[Verdict, bool]:
    """One verdict from what the ranks say, and whether they are still in step."""
    if not all(isinstance(report, Verdict) for report in reports):
        texts = [report.kind if isinstance(report, Verdict) else str(report) for report in reports]
        return Verdict(WRONG, "rank by rank: " + ", ".join(texts)), False
    kinds = {report.kind for report in reports}
    worst = max(reports, key=lambda report: ORDER.index(report.kind))
    raised = kinds & {REFUSED, CRASHED}
    if len(kinds) > 1 and raised:
        # Whoever raised did not do the collectives that the other did.
        return Verdict(WRONG, f"on one rank alone {worst.kind}: {worst.note}"), False
    return Verdict(worst.kind, worst.note, max(report.gathers for report in reports)), True


def _rank(rank: int, port: int, pipe: Connection, entries: Sequence[Entry], library: str,
          start: tuple[int, int]) -> None:
    """Runs in a process of its own."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, RANKS, is_master=rank == 0,
                          timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS,
                            timeout=timedelta(seconds=2 * LIMIT))
    backend = LIBRARIES[library](RANKS)
    for index in range(start[0], len(entries)):
        skip = start[1] if index == start[0] else 0
        _try_entry(index, entries[index], backend, skip, pipe)
    pipe.send(None)
    pipe.recv()


def _meet(pipe: Connection, trial: Trial, judge: Callable[[], Verdict]) -> None:
    pipe.send(trial)
    pipe.send(judge())
    pipe.recv()


def _try_entry(index: int, entry: Entry, backend: Library, skip: int, pipe: Connection) -> None:
    """Report the trials of an entry, the first ``skip`` of which are done."""
    try:
        samples = entry.samples()
    except Exception as error:
        if not skip:
            text = f"has no samples here: {error}"
            _meet(pipe, Trial(index, 0, LAYOUTS[0]), lambda: Verdict(EXCLUDED, text))
        return
    for place, sample in enumerate(samples):
        first = place * len(LAYOUTS)
        if first + len(LAYOUTS) <= skip:
            continue
        wanted = dense_outcome(sample)
        for number, layout in enumerate(LAYOUTS, first):
            if number >= skip:
                _meet(pipe, Trial(index, number, layout),
                      partial(run, sample, layout, wanted, backend))

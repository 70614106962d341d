"""The launcher reports what ranks do, ends those that hang, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torch import launcher
from tests.torch.launcher import ROOT, Case, Report, run_case, run_ranks, worker_cases

CASES: dict[str, Case] = {
    param.id: param.values[0] for param in worker_cases(__file__, "_test_faults.py")
}


def outcomes(name: str) -> list[str]:
    """What became of a case of the worker file, in rank order."""
    return [report.outcome for report in run_ranks(CASES[name])]


def failure(name: str) -> str:
    """The message with which a case of the worker file fails in pytest."""
    with pytest.raises(pytest.fail.Exception) as failed:
        run_case(CASES[name])
    return str(failed.value)


def gone(pid: int) -> bool:
    """Whether a process has ended, within five seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except FileNotFoundError:
            return True
        if state[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_cases_of_a_file_share_their_processes() -> None:
    """Importing the worker and making the group is paid once for a file."""
    assert outcomes("test_sum") == ["passed", "passed"]
    assert outcomes("test_same_process") == ["passed", "passed"]


def test_one_failing_rank_fails_the_case() -> None:
    """The message has the traceback of the rank that failed and the output of all."""
    text = failure("test_fails_on_one_rank")
    assert "['passed', 'failed']" in text
    assert "ValueError: the reason of rank 1" in text
    assert "spoken by rank 0" in text and "spoken by rank 1" in text
    assert outcomes("test_fresh_process") == ["passed", "passed"]


def test_ranks_waiting_for_a_failed_one_are_ended() -> None:
    """Rank 0's group times out or the launcher ends it; it does not wait for ever."""
    reports = run_ranks(CASES["test_fails_while_the_other_waits"])
    assert reports[0].outcome in ("failed", "hung")
    assert reports[1].outcome == "failed"
    assert outcomes("test_fresh_process") == ["passed", "passed"]


def test_a_rank_that_dies() -> None:
    """The exit code is told, and the next case runs."""
    assert "exit code 7" in failure("test_dies")
    assert outcomes("test_fresh_process") == ["passed", "passed"]


def test_a_rank_that_hangs() -> None:
    """It is ended at the limit with its stack, and so is what it started."""
    start = time.monotonic()
    text = failure("test_hangs")
    assert time.monotonic() - start < CASES["test_hangs"].limit + 2
    assert "['passed', 'hung']" in text
    assert "in test_hangs" in text
    sleeper = text.split("sleeper ")[1].split()[0]
    assert gone(int(sleeper))
    assert outcomes("test_fresh_process") == ["passed", "passed"]


def test_a_missing_group_is_made_again() -> None:
    """A case that destroys the default group passes; the next one finds a working group."""
    assert outcomes("test_leaves_no_group") == ["passed", "passed"]
    assert outcomes("test_fresh_process") == ["passed", "passed"]


def test_skipped_on_all_ranks_is_skipped() -> None:
    """pytest.skip works inside a worker file."""
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        run_case(CASES["test_skips"])


def test_warnings_are_errors() -> None:
    """On the ranks as in pytest itself."""
    assert outcomes("test_warns") == ["passed", "passed"]


def test_a_worker_that_cannot_be_imported(tmp_path: Path) -> None:
    """The import's traceback is the report of each rank."""
    file = tmp_path / "_test_broken.py"
    file.write_text("import no_such_module\n\n\ndef test_never() -> None:\n    pass\n")
    case = worker_cases(str(tmp_path / "test_broken.py"), file.name)[0].values[0]
    reports = run_ranks(case)
    assert [report.outcome for report in reports] == ["failed", "failed"]
    assert "No module named 'no_such_module'" in reports[0].text


def test_nproc_and_timeout_are_read_from_the_worker(tmp_path: Path) -> None:
    """And four ranks really are four."""
    file = tmp_path / "_test_four.py"
    file.write_text(
        "import torch.distributed as dist\n\nNPROC = 4\nTIMEOUT = 30\n\n\n"
        "def test_four() -> None:\n    assert dist.get_world_size() == 4\n")
    case = worker_cases(str(tmp_path / "test_four.py"), file.name)[0].values[0]
    assert (case.nproc, case.timeout) == (4, 30)
    assert [report.outcome for report in run_ranks(case)] == ["passed"] * 4


@pytest.mark.parametrize(("source", "message"), [
    ("def helper(): pass\n", "holds no function"),
    ("def test_a(): pass\n\n\ndef test_a(): pass\n", "more than once"),
])
def test_bad_worker_files(tmp_path: Path, source: str, message: str) -> None:
    """A file from which nothing, or less than it shows, would run is refused."""
    (tmp_path / "_test_bad.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        worker_cases(str(tmp_path / "test_bad.py"), "_test_bad.py")


def test_after_three_hangs_the_rest_of_a_file_is_not_run(monkeypatch: pytest.MonkeyPatch,
                                                         tmp_path: Path) -> None:
    """Each hang costs its limit: a file in which every case hangs must not."""
    monkeypatch.setattr(launcher, "MAX_LOST", 1)
    file = tmp_path / "_test_stuck.py"
    file.write_text("import time\n\nTIMEOUT = 1\n\n\ndef test_stuck() -> None:\n"
                    "    time.sleep(1000)\n")
    case = worker_cases(str(tmp_path / "test_stuck.py"), file.name)[0].values[0]
    assert [report.outcome for report in run_ranks(case)] == ["hung", "hung"]
    assert run_ranks(case) == [
        Report("failed", "not run: 1 cases of _test_stuck.py hung before this one", True)] * 2


def test_a_killed_pytest_leaves_no_process() -> None:
    """Ranks, their children and torchrun end when the launcher is gone without a word."""
    program = (
        "from tests.torch.launcher_cases.test_launcher import CASES\n"
        "from tests.torch.launcher import run_ranks\n"
        "print(run_ranks(CASES['test_tells_its_processes'])[0].output, flush=True)\n"
        "run_ranks(CASES['test_hangs'])\n")
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        time.sleep(0.5)
        process.kill()
    assert len(pids) == 3 and os.getpid() not in pids
    assert all(gone(pid) for pid in pids)


def test_a_lost_rank_is_reported_and_replaced() -> None:
    """When a rank itself is killed, the case fails and the next one gets a new launch."""
    reports = run_ranks(CASES["test_tells_its_processes"])
    rank = int(reports[0].output.split()[1])
    os.kill(rank, signal.SIGKILL)
    assert gone(rank)
    assert "was lost" in failure("test_sum")
    assert outcomes("test_sum") == ["passed", "passed"]

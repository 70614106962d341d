"""Cases that misbehave on purpose, for ``test_launcher.py`` to report on."""

import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

TIMEOUT = 3
history: list[str] = []


def test_sum() -> None:
    """Passes; remembers that it ran in this process."""
    history.append("sum")
    value = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(value)
    assert value.item() == 3


def test_same_process() -> None:
    """Passes only in the process in which ``test_sum`` ran."""
    assert history == ["sum"]


def test_fresh_process() -> None:
    """Passes only in a process in which no case ran before, and under a working group."""
    assert not history
    test_sum()


def test_fails_on_one_rank() -> None:
    """Rank 1 fails, rank 0 passes."""
    print("spoken by rank", dist.get_rank())
    if dist.get_rank() == 1:
        raise ValueError("the reason of rank 1")


def test_fails_while_the_other_waits() -> None:
    """Rank 1 fails, rank 0 waits for it in a collective."""
    if dist.get_rank() == 1:
        raise ValueError("the reason of rank 1")
    dist.barrier()


def test_dies() -> None:
    """Rank 0 ends without a word."""
    if dist.get_rank() == 0:
        os._exit(7)


def test_hangs() -> None:
    """Rank 1 never comes back, and has started a process of its own."""
    if dist.get_rank() == 1:
        with subprocess.Popen(["sleep", "1000"]) as sleeper:
            print("sleeper", sleeper.pid)
            time.sleep(1000)


def test_leaves_no_group() -> None:
    """Destroys the default group."""
    history.append("destroyed")
    dist.destroy_process_group()


def test_skips() -> None:
    """Is skipped on every rank."""
    pytest.skip("no such device")


def test_warns() -> None:
    """A warning is an error on a rank, as it is in pytest."""
    with pytest.raises(UserWarning, match="careful"):
        __import__("warnings").warn("careful")


def test_tells_its_processes() -> None:
    """Prints the ids of this child, of its rank and of torchrun."""
    rank = os.getppid()
    with open(f"/proc/{rank}/stat", encoding="utf-8") as stat:
        torchrun = stat.read().rsplit(")", 1)[1].split()[1]
    print(os.getpid(), rank, torchrun)

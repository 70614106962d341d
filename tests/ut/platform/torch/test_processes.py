"""Ranks, worlds and lives of the default group, as far as one process can show them."""
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from hyper_parallel.platform import checks
from hyper_parallel.platform.torch import groups
from hyper_parallel.platform.torch.platform import TorchPlatform
from tests.torch.launcher import ROOT


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that nobody launched."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run_alone(code: str) -> str:
    """Output of ``code`` in a fresh process without a launcher's variables."""
    unwanted = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    done = subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
                          env=environment | {"OMP_NUM_THREADS": "1"}, cwd=ROOT,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_that_nobody_launched() -> None:
    """It is rank 0 of 1, and of a world of unknown size."""
    assert TorchPlatform.get_rank() == 0
    assert TorchPlatform.get_world_size() == 1
    assert TorchPlatform.known_world_size() is None
    assert TorchPlatform.is_initialized() is False


def test_a_process_that_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows rank and world before the default group exists."""
    monkeypatch.setenv("RANK", "3")
    assert TorchPlatform.get_rank() == 0  # one of the two variables is no launcher
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert TorchPlatform.get_rank() == 3
    assert TorchPlatform.get_world_size() == TorchPlatform.known_world_size() == 8


@pytest.mark.parametrize("text", ["", "three", "-1", "1.5"])
def test_a_launcher_that_says_nonsense(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """ValueError that names the variable and what it holds."""
    monkeypatch.setenv("RANK", text)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=f"RANK must be a whole number, got '{text}'"):
        TorchPlatform.get_rank()


def test_lives_of_a_world_of_one() -> None:
    """init without an environment, groups, collectives, destroy; and the count of lives.

    A life counts when it was seen, whoever began and ended it.
    """
    assert run_alone("""
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from hyper_parallel.platform import get_platform
        from hyper_parallel.platform.torch import groups
        platform = get_platform()

        def show():
            default = dist.group.WORLD
            timeout = groups._timeout_of(default).total_seconds() if default else None
            print(platform.generation(), platform.is_initialized(), timeout)

        show()
        platform.init_process_group(device="cpu", timeout=timedelta(seconds=7))
        show()
        default = dist.group.WORLD
        assert dist.get_backend() == "gloo"
        assert platform.create_group([0]) is default
        assert platform.get_group_ranks(None) == platform.get_group_ranks(default) == (0,)
        assert platform.get_group_size(None) == platform.known_world_size() == 1
        assert platform.get_group_rank(None) == 0
        two = platform.differentiable_all_reduce(torch.tensor([2.0]), "sum", None)
        assert two.item() == 2.0
        try:
            platform.init_process_group()
        except RuntimeError as error:
            assert "exists already; call destroy_process_group()" in str(error)
        else:
            raise SystemExit("a second default group was made")
        platform.destroy_process_group()
        platform.destroy_process_group()
        show()
        for look in (True, False):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            if look:
                platform.generation()
            dist.destroy_process_group()
        show()
        platform.init_process_group("gloo")
        show()
        """) == "0 False None\n0 True 7.0\n1 False None\n2 False None\n2 True 1800.0\n"


def test_the_fake_backend_has_groups_without_peers() -> None:
    """A large job can be planned in one process: no member is waited for."""
    assert run_alone("""
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from hyper_parallel.core.device_mesh import init_device_mesh
        from hyper_parallel.platform import get_platform
        platform = get_platform()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=1024)
        group = platform.create_group([7, 5, 3])
        print(platform.get_group_ranks(group), platform.get_group_rank(group))
        mesh = init_device_mesh((256, 4), ("dp", "tp"))
        print(platform.get_group_ranks(mesh.get_group("tp")), mesh.get_group("dp").size())
        """) == "(7, 5, 3) 1\n(4, 5, 6, 7) 256\n"


@pytest.mark.parametrize("ranks, error, message", [
    ([], ValueError, "at least one rank"),
    ([0, -1], ValueError, "none below 0"),
    ([0, 1, 0], ValueError, "each rank once"),
    ([0, 1.0], TypeError, "a list of ranks"),
    ("01", TypeError, "a list of ranks"),
    (3, TypeError, "a list of ranks"),
    ([0, 1], RuntimeError, "start the program with torchrun --nproc-per-node=N"),
])
def test_groups_that_are_refused(ranks: Any, error: type, message: str) -> None:
    """Before anything is asked of torch; a lone process is told how to start."""
    with pytest.raises(error, match=message):
        TorchPlatform.create_group(ranks)


def test_a_torch_without_the_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """RuntimeError that names it and the release."""
    monkeypatch.delattr(distributed_c10d, "_new_process_group_helper")
    with pytest.raises(RuntimeError, match="torch .* has no .*_new_process_group_helper"):
        groups._internal("_new_process_group_helper")


def test_long_lists_of_ranks_are_shortened() -> None:
    """In messages, in the middle."""
    assert checks.shown(range(3)) == "[0, 1, 2]"
    text = checks.shown(range(1000))
    assert text.startswith("[0, 1, 2") and ", 31, ..., 968, " in text and text.endswith("999]")

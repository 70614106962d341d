"""A rank of ``launcher.py``: torchrun starts it, and it forks a child for every crew.

It imports torch, which takes seconds, and nothing of what is under test, so that each child
starts at once and yet loads the library afresh. It starts no thread and touches no device before
it forks. The one argument is the launcher's folder, which holds the socket and the logs.
"""

import ctypes
import faulthandler
import importlib.util
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

HOST = "localhost"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Forks a child for each crew that the launcher asks for, until it hangs up."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(folder / "socket"))
        connection = Connection(os.dup(link.fileno()))
    connection.send(rank)
    while True:
        try:
            file, timeout = connection.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            try:
                _child(connection, rank, folder / f"rank{rank}.log", Path(file), timeout)
            finally:
                os._exit(0)  # a fork must not run what its parent registered for the exit
        _outlive(pid, connection)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        try:
            connection.send(("died", f"the rank's process ended: {reason}", False))
        except BrokenPipeError:
            return


def _outlive(pid: int, connection: Connection) -> None:
    """Waits for the child's end, or ends it and all that it started if the launcher hangs up."""
    child = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(connection.fileno(), 0)  # no event but the hang-up: the child reads the rest
    if child not in (fd for fd, _ in poll.poll()):
        os.killpg(pid, signal.SIGKILL)
    os.close(child)


def _child(connection: Connection, rank: int, log: Path, file: Path, timeout: int) -> None:
    """Loads a worker file under a fresh default group and runs the cases it is told to."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # As for each restart under torchrun, the store is a new one: no key of an earlier crew is in
    # it. It lives as long as the object.
    server = None
    if rank == 0:
        server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    connection.send((os.getpid(), server.port if server else None))
    port = connection.recv()
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    names: dict[str, Any] = {}
    connection.send((*_call(lambda: names.update(_prepare(file, port, timeout))), True))
    world = dist.group.WORLD
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        outcome, text = _call(names[name])
        clean = dist.is_initialized() and dist.group.WORLD is world
        connection.send((outcome, text, clean))


def _prepare(file: Path, port: int, timeout: int) -> dict[str, Any]:
    """Makes the default group and imports a worker file by its path; the names it defines."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Under a prefix, so that a case which makes its own default group finds an unused store.
    store = dist.PrefixStore("launcher", dist.TCPStore(HOST, port, size, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return vars(module)


def _call(function: Callable[[], object]) -> tuple[str, str]:
    """Calls a case; its outcome and, unless it passed, the traceback or the reason."""
    try:
        function()
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except BaseException:  # pytest.fail is not an Exception, and a SystemExit must be reported
        return "failed", traceback.format_exc()
    return "passed", ""


if __name__ == "__main__":
    main()

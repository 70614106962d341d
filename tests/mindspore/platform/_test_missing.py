"""A rank that never comes: the one that waits for it gets an error, and soon."""
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor
from mindspore.graph.api import _pynative_executor

from hyper_parallel import get_platform

NPROC = 2
TIMEOUT = 90
WAIT = 3
BROKEN = True  # is the communication at the end

platform = get_platform()
DONE = Path(sys.argv[1]).with_name("rank 0 has seen it all")


def test_a_member_that_never_comes() -> None:
    """Neither to a group nor to a collective; the error says what to do."""
    x = Tensor(np.ones(4, np.float32))
    assert platform.differentiable_all_reduce(x, "sum", None).asnumpy().tolist() == [2] * 4
    if platform.get_rank() == 1:
        deadline = time.monotonic() + 60
        while not DONE.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return
    for call, message in (
            (lambda: platform.create_group([1, 0]), r"could not make the group \[1, 0\]"),
            (lambda: platform.differentiable_all_reduce(x, "sum", None),
             r"ranks \[0, 1\] ended without a result")):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=f"{message}.*timeout=.*Start the program anew"):
            call()
        assert time.monotonic() - started < 4 * WAIT
    with pytest.raises(RuntimeError, match="unique id"):
        _pynative_executor.sync()  # MindSpore tells of the group once more
    DONE.touch()

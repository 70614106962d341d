"""M1: a member that never asks for the group. The others get an error in bounded time."""
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform.torch.platform import TorchPlatform as platform

NPROC = 4
TIMEOUT = 4


def test_the_error_names_the_group_and_the_missing_ranks() -> None:
    """Ranks 1 and 2 do not come. The world goes on, and the group can still be had later."""
    rank = dist.get_rank()
    start = time.monotonic()
    if rank in (0, 3):
        with pytest.raises(RuntimeError, match=r"waited 4 s for the group \[2, 0, 1, 3\], but "
                                               r"\[2, 1\] never asked for it: every member"):
            DeviceMesh([2, 0, 1, 3], ("tp",)).get_group()
        assert 3.9 < time.monotonic() - start < 8
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {rank} is through", "")
    for other in range(4):
        store.wait([f"rank {other} is through"], timedelta(seconds=30))
    group = platform.create_group([2, 0, 1, 3])
    value = platform.differentiable_all_reduce(torch.ones(1), "sum", group)
    assert value.item() == 4.0

"""The group of one process answers every call of torch.distributed as a real one would."""
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.platform.torch.platform import TorchPlatform
from tests.ut.platform.torch.test_processes import run_alone

Call = Callable[[Tensor, Tensor, dist.ProcessGroup], object]

FILLING: dict[str, Call] = {
    "all_gather": lambda out, x, g: dist.all_gather([out], x, group=g),
    "all_gather_single": lambda out, x, g: dist.all_gather_single(out, x, group=g),
    "all_gather_stacked": lambda out, x, g: dist.all_gather_single(out[None], x, group=g),
    "gather": lambda out, x, g: dist.gather(x, [out], group_dst=0, group=g),
    "scatter": lambda out, x, g: dist.scatter(out, [x], group_src=0, group=g),
    "reduce_scatter": lambda out, x, g: dist.reduce_scatter(out, [x], group=g),
    "reduce_scatter_single": lambda out, x, g: dist.reduce_scatter_single(out, x, group=g),
    "all_to_all": lambda out, x, g: dist.all_to_all([out], [x], group=g),
    "all_to_all_single": lambda out, x, g: dist.all_to_all_single(out, x, group=g),
    "all_to_all_splits": lambda out, x, g: dist.all_to_all_single(out, x, [2], [2], group=g),
}
KEEPING: dict[str, Call] = {
    "all_reduce": lambda _, x, g: dist.all_reduce(x, group=g),
    "all_reduce_max": lambda _, x, g: dist.all_reduce(x, dist.ReduceOp.MAX, group=g),
    "all_reduce_avg": lambda _, x, g: dist.all_reduce(x, dist.ReduceOp.AVG, group=g),
    "broadcast": lambda _, x, g: dist.broadcast(x, group_src=0, group=g),
    "reduce": lambda _, x, g: dist.reduce(x, group_dst=0, group=g),
    "barrier": lambda _out, _x, g: dist.barrier(group=g),
}

def values() -> tuple[Tensor, Tensor]:
    """Something to fill and something to send."""
    return torch.zeros(2, 3), torch.arange(6.0).reshape(2, 3)


@pytest.fixture(name="group")
def _group() -> dist.ProcessGroup:
    """The group as a process without a default group has it."""
    return TorchPlatform.self_group()


def test_what_it_is(group: dist.ProcessGroup) -> None:
    """A ProcessGroup of rank 0 of 1, always the same, and no default group comes with it."""
    assert isinstance(group, dist.ProcessGroup)
    assert TorchPlatform.self_group() is group
    assert (group.rank(), group.size(), group.name()) == (0, 1, "solo")
    assert TorchPlatform.get_group_size(group) == 1
    assert TorchPlatform.get_group_rank(group) == 0
    assert TorchPlatform.get_group_ranks(group) == (TorchPlatform.get_rank(),)
    assert repr(group) == "SoloGroup()"
    assert not dist.is_initialized()


def check_every_call(group: dist.ProcessGroup) -> None:
    """Each call leaves the result that a group of one must give."""
    for name, call in FILLING.items():
        out, x = values()
        call(out, x, group)
        assert torch.equal(out, x) and torch.equal(x, values()[1]), name
    for name, call in KEEPING.items():
        out, x = values()
        call(out, x, group)
        assert torch.equal(x, values()[1]) and not out.any(), name


def test_in_a_world() -> None:
    """Every call, objects, ranks, backend, DistributedDataParallel, destroy and init again.

    torch's list of groups grows by the group itself and by nothing else.
    """
    assert run_alone("""
    import torch
    import torch.distributed as dist
    from hyper_parallel.platform import get_platform
    from tests.ut.platform.torch.test_solo_group import check_every_call, values
    platform = get_platform()
    before = platform.self_group()
    platform.init_process_group("gloo")
    known = len(dist.distributed_c10d._world.pg_map)
    group = platform.self_group()
    assert group is before is platform.self_group()
    assert platform.create_group([0]) is dist.group.WORLD
    check_every_call(group)
    assert dist.get_rank(group) == 0 and dist.get_world_size(group) == 1
    assert dist.get_process_group_ranks(group) == [0]
    assert dist.get_global_rank(group, 0) == dist.get_group_rank(group, 0) == 0
    assert dist.get_backend(group) == "gloo"
    objects = [None]
    dist.all_gather_object(objects, {"a": 1}, group=group)
    assert objects == [{"a": 1}]
    dist.broadcast_object_list(objects, group_src=0, group=group)
    assert objects == [{"a": 1}]
    x = values()[1]
    work = dist.all_reduce(x, group=group, async_op=True)
    work.synchronize()
    assert work.is_completed() and work.wait() and work.is_success()
    assert work.get_future().value()[0] is x and work.result()[0] is x
    assert len(dist.distributed_c10d._world.pg_map) == known + 1

    model = torch.nn.Linear(2, 1)
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    parallel(torch.ones(3, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[3.0, 3.0]]

    platform.destroy_process_group()
    platform.init_process_group("gloo")
    assert platform.self_group() is group
    assert dist.get_rank(group) == 0 and dist.get_process_group_ranks(group) == [0]
    dist.destroy_process_group(group)
    assert dist.is_initialized()
    """) == ""


@pytest.mark.parametrize("name", [*FILLING, *KEEPING])
def test_without_a_world(group: dist.ProcessGroup, name: str) -> None:
    """The same calls work before any default group exists."""
    out, x = values()
    (FILLING | KEEPING)[name](out, x, group)
    assert torch.equal(out, x if name in FILLING else values()[0])
    assert torch.equal(x, values()[1])

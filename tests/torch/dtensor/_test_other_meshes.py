"""Tensors that move between a mesh, its sub-meshes and its flattened mesh, on four ranks."""
import itertools

import pytest
import torch

from hyper_parallel import (
    CommDebugMode, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh)
from tests.torch.against_dense import normal, part, spread

NPROC = 4
TIMEOUT = 90


def _meshes():
    root = init_device_mesh((2, 2), ("dp", "tp"))
    return root, root["tp"], root["dp"], root.flatten("all")


def _ways(mesh, ndim):
    kinds = [Replicate(), Partial(), *map(Shard, range(ndim))]
    return list(itertools.product(kinds, repeat=mesh.ndim))


def _check(dense, source, before, target, after):
    x = spread(dense, source, before)
    y = x.redistribute(target, after)
    assert y.device_mesh is target and y.placements == tuple(after) and y.shape == dense.shape
    whole = y.full_tensor()
    torch.testing.assert_close(whole, dense.detach(), rtol=1e-12, atol=1e-12)
    (whole ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * dense.detach(), rtol=1e-12, atol=1e-12)


def test_every_pair_of_meshes_keeps_value_and_gradient():
    for shape in ((4, 8), (5, 3)):
        dense = normal(*shape)
        for source, target in itertools.permutations(_meshes(), 2):
            for before, after in itertools.product(_ways(source, 2)[::2], _ways(target, 2)):
                _check(dense, source, before, target, after)


def test_parts_lie_as_the_target_says():
    root, tp, _, flat = _meshes()
    dense = normal(5, 6)
    x = spread(dense, root, [Shard(0), Shard(0)])
    for mesh, placements in ((flat, [Shard(0)]), (tp, [Shard(1)])):
        y = x.redistribute(mesh, placements)
        torch.testing.assert_close(y.to_local(), part(dense, y.layout).detach())


def test_what_divides_evenly_is_not_gathered_first():
    root, _, _, flat = _meshes()
    x = distribute_tensor(torch.arange(16.).reshape(8, 2), root, [Shard(0), Shard(0)])
    with CommDebugMode() as mode:
        y = x.redistribute(flat, [Shard(0)])
        back = y.redistribute(root, [Shard(0), Shard(0)])
    assert mode.get_total_counts() == 0
    assert torch.equal(back.to_local(), x.to_local()) and y.to_local().shape == (2, 2)


def test_the_plan_is_what_runs():
    root, tp, _, flat = _meshes()
    for source, target in itertools.permutations((root, tp, flat), 2):
        for before, after in itertools.product(_ways(source, 2), _ways(target, 2)):
            x = spread(normal(8, 4).detach(), source, before)
            plan = x.plan_to(after, target)
            with CommDebugMode() as mode:
                x.redistribute(target, after)
            assert mode.get_total_counts() == plan.collectives, plan
            if "all-to-all" not in str(plan):  # of which a single rank may send more than the mean
                assert sum(mode.get_comm_bytes().values()) == plan.wire_bytes, plan


def test_a_plan_prints_steps_groups_and_bytes():
    root = _meshes()[0]
    x = distribute_tensor(torch.zeros(8, 4), root, [Shard(0), Replicate()])
    assert str(x.plan_to([Shard(0), Replicate()])) == "nothing to do"
    group = (0, 2) if root.rank in (0, 2) else (1, 3)
    assert str(x.plan_to([Replicate(), Shard(1)])) == (
        "slice over tp: Replicate() -> Shard(dim=1)\n"
        f"all-gather over dp: Shard(dim=0) -> Replicate(), group {group}, 32 bytes\n"
        "total: 1 collectives, 32 bytes sent by a rank")
    assert str(x.plan_to([Replicate(), Shard(0)])) == (
        "all-to-all over dp+tp: Shard(dim=0), Replicate() -> Replicate(), Shard(dim=0), "
        "group (0, 1, 2, 3), 32 bytes\ntotal: 1 collectives, 32 bytes sent by a rank")


def test_a_mesh_of_another_root_is_refused():
    x = distribute_tensor(torch.zeros(4), _meshes()[0], [Shard(0), Replicate()])
    other = init_device_mesh((4,), ("x",))
    for call in (x.redistribute, lambda mesh, placements: x.plan_to(placements, mesh)):
        with pytest.raises(ValueError, match=r"meshes of one root.*full_tensor\(\)"):
            call(other, [Replicate()])
    with pytest.raises(ValueError, match="needs placements.*'tp'"):
        x.redistribute(_meshes()[1])
    assert isinstance(x, DTensor) and x.placements == (Shard(0), Replicate())

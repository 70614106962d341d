"""PyTorch's own meshes and DTensors become ours and the other way round, on four ranks."""
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as their_mesh

from hyper_parallel import (
    DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh)
from tests.torch.against_dense import normal, spread

NPROC = 4
TIMEOUT = 90
OURS = (Replicate(), Shard(0), Shard(1), Partial())
THEIRS = (theirs.Replicate(), theirs.Shard(0), theirs.Shard(1), theirs.Partial())


def test_a_mesh_keeps_ranks_names_and_groups():
    mesh = their_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = DeviceMesh.from_torch(mesh)
    assert ours == init_device_mesh((2, 2), ("dp", "tp"))
    assert [ours.get_group(name) for name in ("dp", "tp")] == [
        mesh.get_group(name) for name in ("dp", "tp")]
    back = ours.to_torch()
    assert back == mesh and back is ours.to_torch()
    assert back.get_group("tp") is mesh.get_group("tp")
    row = DeviceMesh.from_torch(mesh["tp"])
    assert row.alias_name == ("tp",) and list(row.rank_list) == mesh["tp"].mesh.tolist()
    assert DeviceMesh.from_torch(their_mesh("cpu", (4,))).alias_name == ("dim0",)


def test_a_mesh_of_ours_makes_its_groups_for_theirs():
    for shape, names in (((4,), ("x",)), ((2, 2), ("a", "b")), ((1, 4), ("one", "four"))):
        back = init_device_mesh(shape, names).to_torch()
        x = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(x, group=back.get_group(names[-1]))
        assert x.tolist() == [float(sum(back[names[-1]].mesh.tolist()))] * 3
        assert tuple(back.shape) == shape and back.mesh_dim_names == names


def test_tensors_keep_parts_values_and_gradients():
    mesh = their_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = DeviceMesh.from_torch(mesh)
    for dense in (normal(4, 6), normal(5, 3)):
        for index in itertools.product(range(4), repeat=2):
            x = spread(dense, ours, [OURS[each] for each in index])
            torchs = x.to_torch()
            assert torchs.placements == tuple(THEIRS[each] for each in index)
            assert torchs.shape == x.shape and torchs.stride() == dense.stride()
            assert torchs.to_local().data_ptr() == x.to_local().data_ptr()
            back = DTensor.from_torch(torchs)
            assert back.layout is x.layout and back.shape == x.shape
            assert back.to_local().data_ptr() == x.to_local().data_ptr()
            whole = back.full_tensor()
            torch.testing.assert_close(whole, dense.detach())
            (whole ** 2).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), 2 * dense.detach())


def test_gradients_flow_into_theirs():
    mesh = their_mesh("cpu", (4,), mesh_dim_names=("x",))
    x = theirs.distribute_tensor(normal(8, 3).detach(), mesh, [theirs.Shard(0)]).requires_grad_()
    (DTensor.from_torch(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * x.detach().full_tensor())


def test_what_has_no_counterpart_is_refused():
    for call, given in ((DTensor.from_torch, torch.ones(2)), (DeviceMesh.from_torch, [0, 1]),
                        (DTensor.from_torch, distribute_tensor(
                            torch.ones(4), init_device_mesh((4,), ("x",)), [Shard(0)]))):
        with pytest.raises(TypeError, match="from_torch takes a torch.distributed"):
            call(given)
    with pytest.raises(ValueError, match="ascending order"):
        init_device_mesh((4,), ("x",), rank_list=[3, 1, 2, 0]).to_torch()
    root = init_device_mesh((2, 2), ("dp", "tp"))
    x = distribute_tensor(torch.ones(8), root, [Shard(0), Shard(0)]).redistribute(
        placements=[Shard(0), Shard(0)], shard_order={0: ("tp", "dp")})
    with pytest.raises(ValueError, match="mesh order"):
        x.to_torch()

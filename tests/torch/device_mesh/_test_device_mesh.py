"""DeviceMesh on four ranks: the M cases that need real groups."""
import os
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.platform import get_platform

NPROC = 4
TIMEOUT = 30

platform = get_platform()


def gathered(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group, in the order in which a collective joins their pieces."""
    size = platform.get_group_size(group)
    return platform.differentiable_all_gather_concat(
        torch.tensor([dist.get_rank()]), group, size, 0).tolist()


def crew_store() -> dist.TCPStore:
    """The store that outlives every default group of these processes."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                         is_master=False)


def test_m1_two_ranks_alone() -> None:
    """Ranks 0 and 1 use a mesh that 2 and 3 never hear of."""
    rank = dist.get_rank()
    if rank < 2:
        mesh = DeviceMesh([0, 1], ("tp",))
        assert gathered(mesh.get_group()) == [0, 1]
        assert mesh.get_coordinate() == (rank,)
    else:
        assert gathered(init_device_mesh((2, 2), ("dp", "tp")).get_group("tp")) == [2, 3]


def test_m1_a_rank_outside() -> None:
    """It may build the mesh and slice it; a group it does not get."""
    mesh = DeviceMesh([[1], [0]], ("dp", "tp"))
    rank = dist.get_rank()
    assert mesh["dp"].rank_list == (1, 0)
    if rank < 2:
        assert gathered(mesh.get_group("dp")) == [1, 0]
        assert mesh.get_local_rank("dp") == 1 - rank
    else:
        assert mesh.get_coordinate() is None
        for call in (mesh["dp"].get_group, mesh["dp"].get_local_rank):
            with pytest.raises(ValueError, match=f"rank {rank} is not in"):
                call()


def test_m3_the_order_of_the_mesh() -> None:
    """Rank 3 is first: its piece is piece 0, sent and received."""
    order = [3, 1, 2, 0]
    mesh = DeviceMesh(order, ("tp",))
    rank, place = dist.get_rank(), order.index(dist.get_rank())
    group = mesh.get_group()
    assert mesh.get_coordinate() == (place,) and mesh.get_local_rank() == place
    assert gathered(group) == order
    own = torch.arange(4)[mesh.get_local_rank():][:1]
    joined = platform.differentiable_all_gather_concat(own, group, 4, 0)
    assert joined.tolist() == [0, 1, 2, 3]
    assert platform.differentiable_reduce_scatter(torch.arange(4), 4, 0, "sum", group).item() \
        == 4 * place
    assert platform.differentiable_all_to_all(
        torch.full((4,), rank), (4,), group).tolist() == order
    assert platform.broadcast(torch.tensor([rank]), 0, group).item() == 3
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    assert total.item() == 6


def test_m8_crossed_meshes() -> None:
    """Same names and shape, other ranks in the middle: other groups."""
    plain = init_device_mesh((2, 2), ("dp", "tp"))
    crossed = init_device_mesh((2, 2), ("dp", "tp"), rank_list=(0, 2, 1, 3))
    rank = dist.get_rank()
    assert gathered(plain.get_group("tp")) == ([0, 1] if rank < 2 else [2, 3])
    assert gathered(crossed.get_group("tp")) == ([0, 2] if rank % 2 == 0 else [1, 3])
    assert gathered(plain.get_group("dp")) == gathered(crossed.get_group("tp"))
    assert plain.get_group("dp") is crossed.get_group("tp")


def test_m13_a_mesh_larger_than_the_world() -> None:
    """ValueError, which says how large the world is."""
    for make in (lambda: init_device_mesh((2, 4), ("dp", "tp")),
                 lambda: DeviceMesh([2, 4], ("tp",))):
        with pytest.raises(ValueError, match="ranks of the world, 0 to 3"):
            make()


def test_m14_when_groups_are_made() -> None:
    """The first request makes one group for its ranks, and no other."""
    made: list[list[int]] = []
    real = distributed_c10d._new_process_group_helper

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args[2])
        return real(*args, **kwargs)

    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_new_process_group_helper", counted)
        mesh = init_device_mesh((1, 2, 2), ("pp", "dp", "tp"), rank_list=(0, 3, 2, 1))
        tp, both = mesh["tp"], mesh["dp", "tp"].flatten("x")
        other = DeviceMesh([[0, 3], [2, 1]], ("a", "b"))
        assert made == []
        alone = mesh.get_group("pp")
        assert made == [] and dist.get_process_group_ranks(alone) == [rank]
        pair = [0, 3] if rank in (0, 3) else [2, 1]
        group = mesh.get_group("tp")
        assert made == [pair]
        assert tp.get_group() is other.get_group("b") is mesh["pp", "tp"].get_group(1) is group
        assert made == [pair]
        assert gathered(both.get_group()) == [0, 3, 2, 1]
        assert mesh.get_group("x") is both.get_group()
        assert mesh.get_group_over_axes((1, 2)) is both.get_group()
        assert made == [pair, [0, 3, 2, 1]]
        whole = init_device_mesh((2, 2), ("dp", "tp")).flatten().get_group()
        assert whole is dist.group.WORLD
        assert len(made) == 2


def test_size_one_axes_never_communicate() -> None:
    """One rank uses its group while the others do not."""
    mesh = init_device_mesh((4, 1), ("dp", "tp"))
    if dist.get_rank() == 2:
        value = torch.ones(2)
        dist.all_reduce(value, group=mesh.get_group("tp"))
        assert value.tolist() == [1, 1]
        assert platform.differentiable_all_reduce(value, "sum", mesh.get_group("tp")).tolist() \
            == [1, 1]


def test_pickle_between_ranks() -> None:
    """A mesh that rank 3 sends is the same mesh everywhere; its groups are not sent."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    mesh["dp", "tp"].flatten("all").get_group()
    sent = [mesh["tp"], mesh] if dist.get_rank() == 3 else [None, None]
    dist.broadcast_object_list(sent, src=3)
    assert sent[0].rank_list == (2, 3)
    assert sent[1] is mesh
    if dist.get_rank() >= 2:
        assert gathered(sent[0].get_group()) == [2, 3]
    else:
        with pytest.raises(ValueError, match="is not in"):
            sent[0].get_group()


def test_m10_init_again() -> None:
    """A mesh from before says so; the new one has groups of the new world."""
    old = init_device_mesh((2, 2), ("dp", "tp"))
    assert sum(gathered(old.get_group("tp"))) in (1, 5)
    layout = pickle.dumps(old["tp"])
    dist.barrier()
    dist.destroy_process_group()
    for mesh, axis in ((old, "tp"), (old["tp"], None), (old, "dp")):
        with pytest.raises(RuntimeError, match="has been destroyed since; build the mesh again"):
            mesh.get_group(axis)
    dist.init_process_group("gloo", store=dist.PrefixStore("m10", crew_store()),
                            rank=int(os.environ["RANK"]), world_size=4,
                            timeout=timedelta(seconds=TIMEOUT))
    with pytest.raises(RuntimeError, match="has been destroyed since; build the mesh again"):
        old.get_group("tp")
    new = init_device_mesh((2, 2), ("dp", "tp"))
    assert new is not old and new != old
    assert gathered(new.get_group("tp")) == gathered(pickle.loads(layout).get_group())
    assert gathered(new.get_group("dp")) == list(new["dp"].rank_list)
    dist.barrier()


def test_the_first_group_starts_a_launched_process() -> None:
    """Nobody called init_process_group: the launcher's environment is enough.

    The mesh is made before there is a default group, and stays valid in the first one.
    """
    rank, store = dist.get_rank(), crew_store()
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) \
        if rank == 0 else None
    if server is not None:
        store.set("port of the start", str(server.port))
    port = store.get("port of the start").decode()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", port)
        mesh = init_device_mesh((2, 2), ("dp", "tp"))
        assert mesh.rank == rank and mesh.get_coordinate() == (rank // 2, rank % 2)
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="ranks of the world, 0 to 3"):
            init_device_mesh((8,), ("tp",))
        assert gathered(mesh.get_group("tp")) == [rank - rank % 2, rank - rank % 2 + 1]
        assert dist.is_initialized() and dist.get_world_size() == 4
        assert dist.get_backend() == "gloo"
        dist.barrier()

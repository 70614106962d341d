"""DTensors in torch.distributed.checkpoint: any layout into any other, each box written once."""
import itertools
import pickle
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import tensor as native
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh as init_native_mesh

from hyper_parallel import (
    CommDebugMode, DeviceMesh, DTensor, Layout, Partial, Replicate, Shard, distribute_tensor,
    init_device_mesh)
from tests.torch.dtensor.checkpoint_worlds import (
    dense, mesh_of, parallel, put_in, same_losses, state_of, train)

NPROC = 4
SHAPES = ((5, 7), (3, 2), (0, 3))
SHIFTS = (0, 1, 4, 7, 10)  # target layouts that each saved one is loaded into


def _folder() -> str:
    """A new folder, the same on all ranks."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


def _layouts() -> list[Layout]:
    """Every kind of placement on one and two axes, a custom order, other ranks and sub-meshes."""
    line, plane = init_device_mesh((4,), ("x",)), init_device_mesh((2, 2), ("a", "b"))
    ways = [Replicate(), Shard(0), Shard(1)]
    return [*(Layout(line, [way]) for way in ways),
            *(Layout(plane, pair) for pair in itertools.product(ways, ways)),
            Layout(plane, [Shard(0), Shard(0)], {0: ("b", "a")}),
            Layout(DeviceMesh(torch.tensor([3, 1, 2, 0]), ("x",)), [Shard(0)]),
            Layout(plane["b"], [Shard(1)]),
            Layout(plane.flatten("ab"), [Shard(0)])]


def _lay(value: torch.Tensor, layout: Layout) -> DTensor:
    whole = DTensor.from_local(value.clone(), layout.device_mesh)
    return whole.redistribute(placements=layout.placements, shard_order=dict(layout.shard_order))


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_every_layout_into_others() -> None:
    layouts = _layouts()
    folder = _folder()
    saved = {f"{shape} {number}": _lay(_values(shape), layout)
             for shape in SHAPES for number, layout in enumerate(layouts)}
    saved["plain"] = _values((5, 7))
    saved["number"] = _lay(torch.tensor(3.0), Layout(layouts[0].device_mesh, [Replicate()]))
    with CommDebugMode() as mode:
        dcp.save(saved, checkpoint_id=folder)
    assert mode.get_comm_counts() == {} and mode.get_total_counts() == 0
    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, value in saved.items():
        assert sum(box.sizes.numel() for box in known[name].chunks) == value.numel()
        assert name != "(5, 7) 0" or len(known[name].chunks) == 1  # all ranks hold it
    for shift in SHIFTS:
        target = {f"{shape} {number}": _lay(-_values(shape), layouts[number - shift])
                  for shape in SHAPES for number in range(len(layouts))}
        target["plain"] = _lay(-_values((5, 7)), layouts[shift])
        target["number"] = torch.tensor(0.0)
        if shift == 0:
            target["(5, 7) 1"] = -_values((5, 7))  # into a plain one
        memory = {name: value.data_ptr() for name, value in target.items()}
        dcp.load(target, checkpoint_id=folder)
        for name, value in target.items():
            assert value.data_ptr() == memory[name], name
            wanted = torch.tensor(3.0) if name == "number" else _values(tuple(value.shape))
            assert torch.equal(_whole(value), wanted), (name, shift)


def test_only_the_shard_is_written_and_read() -> None:
    mesh = init_device_mesh((4,), ("x",))
    folder = _folder()
    big = torch.randn(256, 256)
    cut = DTensor.from_local(big[:64], mesh, [Shard(0)])  # a view of more memory than the shard
    dcp.save({"cut": cut}, checkpoint_id=folder)
    sizes = [info.length for info in dcp.FileSystemReader(folder).read_metadata()
             .storage_data.values()]
    assert len(sizes) == 4 and all(64 * 256 * 4 <= size < 64 * 256 * 4 + 4096 for size in sizes)


def test_a_mesh_of_some_ranks() -> None:
    folder = _folder()
    some = DeviceMesh(torch.tensor([1, 3]), ("x",))
    state = {"plain": torch.ones(2)}
    if dist.get_rank() in some.rank_list:
        state["some"] = _lay(_values((5, 7)), Layout(some, [Shard(0)]))
    dcp.save(state, checkpoint_id=folder)
    loaded = {"some": distribute_tensor(torch.zeros(5, 7), init_device_mesh((4,), ("x",)),
                                        [Shard(1)])}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["some"].full_tensor(), _values((5, 7)))


def test_a_partial_tensor_is_refused_by_name() -> None:
    mesh = init_device_mesh((4,), ("x",))
    summand = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    whole = {"layer.weight": distribute_tensor(torch.ones(3), mesh)}
    folder = _folder()
    with pytest.raises(dcp.CheckpointException, match="'layer.weight' lies as .*Partial.*redistr"):
        dcp.save({"layer.weight": summand}, checkpoint_id=folder)
    dcp.save(whole, checkpoint_id=folder)
    with pytest.raises(dcp.CheckpointException, match="Partial.*redistribute it to Shard"):
        dcp.load({"layer.weight": summand}, checkpoint_id=folder)
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load({"layer.weight": distribute_tensor(torch.ones(4), mesh, [Shard(0)])},
                 checkpoint_id=folder)
    dcp.load(whole, checkpoint_id=folder)


def test_files_of_pytorchs_own_tensors() -> None:
    value, folder, back = _values((5, 7)), _folder(), _folder()
    theirs = native.distribute_tensor(value, init_native_mesh("cpu", (4,)), [native.Shard(1)])
    ours = distribute_tensor(torch.zeros(5, 7), init_device_mesh((2, 2), ("a", "b")),
                             [Shard(0), Shard(1)])
    dcp.save({"w": theirs}, checkpoint_id=folder)
    dcp.load({"w": ours}, checkpoint_id=folder)
    assert torch.equal(ours.full_tensor(), value)
    dcp.save({"w": ours}, checkpoint_id=back)
    with torch.no_grad():
        theirs.zero_()
    dcp.load({"w": theirs}, checkpoint_id=back)
    assert torch.equal(theirs.full_tensor(), value)


def _save_later(state: dict, folder: str) -> None:
    dcp.async_save(state, checkpoint_id=folder).result()


def _save_later_by_blocking(state: dict, folder: str) -> None:
    dcp.async_save(state, checkpoint_id=folder,
                   async_stager=dcp.staging.BlockingAsyncStager()).result()


def _saves_and_goes_on(save: Callable[[dict, str], None]) -> None:
    folder = _folder()
    model, optimizer = parallel(mesh_of((2, 2)), "mlp", seed=0)
    train(model, optimizer, 2)
    save(state_of(model, optimizer), folder)
    wanted = train(model, optimizer, 2)
    other, other_optimizer = parallel(mesh_of((4,)), "half", seed=3)
    state = state_of(other, other_optimizer)
    dcp.load(state, checkpoint_id=folder)
    put_in(other, other_optimizer, state)
    same_losses(train(other, other_optimizer, 2), wanted)


def test_an_asynchronous_save() -> None:
    _saves_and_goes_on(_save_later)
    _saves_and_goes_on(_save_later_by_blocking)


def test_a_full_state_dict() -> None:
    model, optimizer = parallel(mesh_of((2, 2)), "mlp", seed=0)
    train(model, optimizer, 2)
    plain = dense(0)
    train(*plain, 2)
    wanted = state_of(*plain)
    for offload in (False, True):
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=offload)
        got = dict(zip(("model", "optimizer"),
                       states.get_state_dict(model, optimizer, options=options)))
        if offload and dist.get_rank() > 0:
            assert got == {"model": {}, "optimizer": {}}
            continue
        for name, value in wanted["model"].items():
            assert type(got["model"][name]) is torch.Tensor
            assert torch.allclose(got["model"][name], value, rtol=0, atol=1e-12)
        for name, state in wanted["optimizer"]["state"].items():
            found = got["optimizer"]["state"][name]["exp_avg"]
            assert type(found) is torch.Tensor
            assert torch.allclose(found, state["exp_avg"], rtol=0, atol=1e-12)
    for rank0_only in (True, False):
        other, _ = parallel(mesh_of((4,)), "other way round", seed=5)
        full = wanted["model"] if dist.get_rank() == 0 or not rank0_only else {}
        states.set_model_state_dict(other, dict(full), options=states.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=rank0_only))
        for name, value in other.state_dict().items():
            assert torch.equal(_whole(value), wanted["model"][name]), name


def test_a_model_of_meta_tensors_is_filled() -> None:
    folder, mesh = _folder(), init_device_mesh((4,), ("x",))
    dcp.save({"weight": distribute_tensor(_values((5, 7)), mesh, [Shard(0)])},
             checkpoint_id=folder)
    local = torch.empty(Layout(mesh, [Shard(1)]).local_shape((5, 7)), device="meta")
    module = nn.Module()
    module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(1)], shape=(5, 7)))
    module.to_empty(device="cpu")
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(module.weight.full_tensor(), _values((5, 7)))


def test_a_mesh_is_pickled_without_arrays() -> None:
    for mesh in (init_device_mesh((4,), ("x",)), init_device_mesh((2, 2), ("a", "b"))["b"]):
        assert pickle.loads(pickle.dumps(mesh)) == mesh
        assert b"numpy" not in pickle.dumps(mesh)

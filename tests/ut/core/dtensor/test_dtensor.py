"""DTensor's construction, metadata and errors, in one process."""
import pytest
import torch

from hyper_parallel import (
    DeviceMesh, DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, init_device_mesh)


@pytest.fixture(name="mesh")
def _mesh():
    return init_device_mesh((1,), ("x",))


@pytest.fixture(name="elsewhere")
def _elsewhere():
    """A mesh that this process is no part of."""
    return DeviceMesh([5, 6], ("x",))


def test_from_local_dresses_an_alias(mesh):
    local = torch.ones(3, 4)
    x = DTensor.from_local(local, mesh, [Shard(0)])
    assert type(local) is torch.Tensor and type(x) is DTensor and isinstance(x, torch.Tensor)
    assert x.data_ptr() == local.data_ptr() and type(x.to_local()) is torch.Tensor
    local[0, 0] = 7.0
    assert x.to_local()[0, 0] == 7.0
    assert DTensor.from_local(local, mesh).placements == (Replicate(),)
    assert DTensor.from_local(local, mesh, (Shard(-1),)).placements == (Shard(1),)
    checked = DTensor.from_local(local, mesh, [Shard(0)], run_check=True, stride=(4, 1))
    assert checked.shape == (3, 4)
    assert DTensor.from_local(local, mesh, [Shard(0)], shape=(3, 4)).shape == (3, 4)
    parameter = torch.nn.Parameter(torch.ones(2))
    y = DTensor.from_local(parameter, mesh, [Replicate()])
    y.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(2)) and type(parameter.grad) is torch.Tensor


@pytest.mark.parametrize("value", [[1.0, 2.0], 3.0, None, "tensor"])
def test_what_is_no_tensor(mesh, value):
    with pytest.raises(TypeError, match="plain tensor, but got a"):
        DTensor.from_local(value, mesh, [Replicate()])
    with pytest.raises(TypeError, match="distribute_tensor takes a tensor, but got a"):
        distribute_tensor(value, mesh, [Replicate()])


def test_what_is_spread_already(mesh):
    x = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="plain tensor, but got a DTensor"):
        DTensor.from_local(x, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="spread already.*use redistribute"):
        distribute_tensor(x, mesh, [Shard(0)])


PLACEMENTS = [
    ([], ValueError, "one placement is needed for each of the 1 axes"),
    ([Shard(0), Shard(1)], ValueError, "but got 2"),
    ([Shard(2)], ValueError, r"Shard\(dim=2\) on axis 'x' names a dim .* 2 dims .* -2 to 1"),
    ([Shard(-3)], ValueError, "-2 to 1"),
    (Shard(0), TypeError, r"write \[Shard\(dim=0\)\]"),
    (["Shard(0)"], TypeError, "a placement is Shard"),
    ([0], TypeError, "a placement is Shard"),
    ("R", TypeError, "list or tuple"),
]


@pytest.mark.parametrize("placements, error, message", PLACEMENTS)
def test_placements_that_do_not_fit(mesh, placements, error, message):
    tensor = torch.ones(3, 4)
    x = distribute_tensor(tensor, mesh, [Shard(0)])
    for make in (lambda: DTensor.from_local(tensor, mesh, placements),
                 lambda: distribute_tensor(tensor, mesh, placements),
                 lambda: x.redistribute(placements=placements),
                 lambda: x.to_local(grad_placements=placements),
                 lambda: DTensor.from_local(tensor, mesh, [Shard(0)], grad_placements=placements)):
        with pytest.raises(error, match=message):
            make()


def test_meshes_that_are_none(mesh):
    for wrong in (None, "mesh", (1,), torch.arange(2)):
        with pytest.raises(TypeError, match="needs a DeviceMesh"):
            DTensor.from_local(torch.ones(3), wrong, [Shard(0)])
        with pytest.raises(TypeError, match="needs a DeviceMesh"):
            distribute_tensor(torch.ones(3), wrong, [Shard(0)])
    with pytest.raises(TypeError, match="needs a DeviceMesh"):
        Layout(mesh.rank, [Shard(0)])


def test_a_local_tensor_that_is_not_this_ranks_part(mesh):
    for shape in ((4, 4), (3,), (3, 4, 1)):
        with pytest.raises(ValueError, match=r"rank 0 holds a part of shape .* local tensor has "
                                             r"the shape \(3, 4\)"):
            DTensor.from_local(torch.ones(3, 4), mesh, [Replicate()], shape=shape)


def test_a_process_outside_of_the_mesh_holds_nothing(elsewhere):
    for make in (lambda: DTensor.from_local(torch.ones(3), elsewhere, [Shard(0)]),
                 lambda: distribute_tensor(torch.ones(3), elsewhere, [Shard(0)]),
                 lambda: distribute_tensor(torch.ones(3), elsewhere, [Replicate()],
                                           src_data_rank=None)):
        with pytest.raises(ValueError, match="rank 0 is not in"):
            make()


def test_a_tensor_with_a_history_is_not_distributed(mesh):
    leaf = torch.ones(3, requires_grad=True)
    assert distribute_tensor(leaf, mesh, [Shard(0)]).requires_grad
    with pytest.raises(RuntimeError, match="makes a leaf.*from_local"):
        distribute_tensor(leaf * 2, mesh, [Shard(0)])


def test_redistribute_says_what_it_lacks(mesh):
    x = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"needs placements.*\('x',\)"):
        x.redistribute()
    other = init_device_mesh((1,), ("y",))
    with pytest.raises(ValueError, match="moves between meshes of one root"):
        x.redistribute(other, [Shard(0)])
    assert x.redistribute(mesh, [Shard(1)]).placements == (Shard(1),)
    assert x.redistribute(placements=[Shard(-1)], async_op=True).placements == (Shard(1),)
    same = x.redistribute(placements=[Shard(0)])
    assert same is not x and same.data_ptr() == x.data_ptr()


def test_full_tensor_and_gradients_on_one_rank(mesh):
    for placement in (Shard(0), Replicate(), Partial(), Partial("max"), Partial("avg")):
        leaf = torch.arange(3.0, requires_grad=True)
        x = DTensor.from_local(leaf, mesh, [placement])
        assert type(x.full_tensor()) is torch.Tensor
        assert torch.equal(x.full_tensor(), torch.arange(3.0))
        (x.full_tensor() * torch.arange(3.0)).sum().backward()
        assert torch.equal(leaf.grad, torch.arange(3.0))


def test_its_repr(mesh):
    x = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    assert repr(x) == (f"DTensor(local_tensor={torch.ones(2)!r}, device_mesh={mesh!r}, "
                       "placements=(Shard(dim=0),))")
    assert str(x) == repr(x) == repr(x.requires_grad_()) == repr((x * 1))

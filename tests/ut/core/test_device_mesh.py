"""DeviceMesh in one process: numbers, names, caches, groups and size, under a mock platform."""
import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hyper_parallel.core import device_mesh
from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from tests.ut.core.mesh_world import Runtime, World, cube

pytestmark = pytest.mark.usefixtures("world")


# ---- M3: the order of the array is the order of everything ----

def test_rank_order_is_kept(world: World) -> None:
    """On [3, 1, 2, 0] rank 3 is first and its group is made in that order."""
    mesh = DeviceMesh([3, 1, 2, 0], ("tp",))
    for position, rank in enumerate([3, 1, 2, 0]):
        world.rank = rank
        assert mesh.get_coordinate() == (position,)
        assert mesh.get_local_rank() == position
        mesh.get_group()
    assert world.made == [[3, 1, 2, 0]]


def test_a_process_that_learns_its_rank_later(world: World) -> None:
    """Everything that was cut at the old place is cut anew, flattened names included."""
    mesh = cube()
    mesh["dp", "cp"].flatten("x")
    assert mesh["tp"].rank_list == (0, 1)
    assert mesh.get_rank_list_along_axis("dp") == [0, 4]
    mesh.get_group_over_axes((0, 1))
    world.rank = 7
    assert mesh["tp"].rank_list == (6, 7)
    assert mesh["x"].rank_list == (1, 3, 5, 7)
    assert mesh.get_rank_list_along_axis("dp") == [3, 7]
    assert mesh.get_coordinate() == (1, 1, 1)
    mesh.get_group_over_axes((0, 1))
    assert world.made == [[0, 2, 4, 6], [1, 3, 5, 7]]


# ---- M5: flattened names ----

def test_a_flattened_name_keeps_its_meaning() -> None:
    """The second axes to ask for the name get an error, the first keep it."""
    mesh = cube()
    mesh["dp", "cp"].flatten("x")
    with pytest.raises(ValueError, match=r"name of \('dp', 'cp'\) flattened"):
        mesh["cp", "tp"].flatten("x")
    assert mesh["x"].rank_list == (0, 2, 4, 6)


def test_a_flattened_name_must_not_be_an_axis() -> None:
    """Of the root, also when the sub-mesh itself lacks that axis."""
    mesh = cube()
    with pytest.raises(ValueError, match="that is an axis of"):
        mesh["dp", "cp"].flatten("tp")
    other = init_device_mesh((2, 2, 2), ("dp", "cp", "dp_cp"))
    with pytest.raises(ValueError, match="that is an axis of"):
        other["dp", "cp"].flatten()


@pytest.mark.parametrize("name, error", [("", ValueError), ("None", ValueError), (3, TypeError)])
def test_names_that_nothing_can_be_flattened_to(name: Any, error: type) -> None:
    """The rules for the names of axes hold."""
    with pytest.raises(error, match="an axis name must"):
        cube().flatten(name)


def test_flattening_twice_gives_the_same_object() -> None:
    """Also through another path to the same axes, and for a mesh that is flat already."""
    mesh = cube()
    flat = mesh["dp", "cp"].flatten()
    assert mesh["dp", "cp"].flatten() is flat
    assert flat.flatten() is flat
    assert mesh["tp"].flatten() is mesh["tp"]
    renamed = mesh["dp", "cp"].flatten("x")
    assert renamed is not flat and mesh["x"] is renamed
    assert renamed == DeviceMesh([0, 2, 4, 6], ("x",))


def test_flattened_names_work_like_axes(world: World) -> None:
    """In slices beside other axes, in sub-meshes that hold them, for sizes and groups."""
    world.rank = 3
    mesh = cube()
    flat = mesh["dp", "cp"].flatten("x")
    both = mesh["x", "tp"]
    assert both.mesh_shape == (4, 2)
    assert both.rank_list == (0, 1, 2, 3, 4, 5, 6, 7)
    assert both["x"] is flat and both["tp"] is mesh["tp"]
    assert both.get_coordinate() == (1, 1)
    assert both["x", "tp"] is both
    assert mesh["dp", "cp"]["x"] is flat
    assert mesh.size("x") == both.size(0) == flat.size() == 4
    assert mesh["tp"].get_rank_list_along_axis("x") == [1, 3, 5, 7]
    assert both.get_group("x") == mesh.get_group("x") == flat.get_group() == "group 1"
    assert both.flatten("all").rank_list == tuple(range(8))
    with pytest.raises(KeyError, match="no axis 'x'"):
        _ = mesh["dp", "tp"]["x"]
    with pytest.raises(ValueError, match="order of the mesh, each once"):
        _ = mesh["dp", "x"]
    with pytest.raises(ValueError, match="order of the mesh, each once"):
        _ = mesh["tp", "x"]


# ---- M8: the whole rank list tells meshes apart ----

def test_meshes_that_differ_in_the_middle(world: World) -> None:
    """Same names, shape, first and last rank."""
    plain = init_device_mesh((2, 2), ("dp", "tp"))
    crossed = init_device_mesh((2, 2), ("dp", "tp"), rank_list=(0, 2, 1, 3))
    assert plain != crossed
    assert hash(plain) != hash(crossed)
    assert plain.to_hash() == ((2, 2), ("dp", "tp"), (0, 3))
    assert crossed.to_hash() == ((2, 2), ("dp", "tp"), (0, 2, 1, 3))
    assert set(device_mesh._DEVICE_MESH_MAP.values()) == {plain, crossed}
    assert init_device_mesh((2, 2), ("dp", "tp"), rank_list=[0, 2, 1, 3]) is crossed
    plain.get_group("tp")
    crossed.get_group("tp")
    assert world.made == [[0, 1], [0, 2]]


def test_equality() -> None:
    """By shape, names and ranks, whatever way the mesh was made; not with other types."""
    mesh = cube()
    same = DeviceMesh(np.arange(8).reshape(2, 2, 2), ("dp", "cp", "tp"))
    assert mesh == same and hash(mesh) == hash(same) and mesh is not same
    assert mesh["tp"] == DeviceMesh([0, 1], ("tp",))
    assert mesh["tp"] != DeviceMesh([0, 1], ("ep",))
    assert mesh["tp"] != DeviceMesh([[0, 1]], ("pp", "tp"))
    assert mesh not in ("mesh", None, 8)
    consecutive = DeviceMesh([4, 5], ("tp",))
    assert consecutive.to_hash() == ((2,), ("tp",), (4, 5))


# ---- M10: lives of the default group ----

def test_a_mesh_from_before_is_refused(world: World, runtime: Runtime) -> None:
    """Its groups are gone; a mesh made now gets groups of its own."""
    old = init_device_mesh((2, 2), ("dp", "tp"))
    sub, flat = old["tp"], old.flatten()
    assert old.get_group("tp") == "group 1"
    runtime.lives = 1
    for mesh, axis in ((old, "tp"), (old, "dp"), (sub, None), (flat, None), (old["dp"], None)):
        with pytest.raises(RuntimeError, match="destroyed since; build the mesh again"):
            mesh.get_group(axis)
    new = init_device_mesh((2, 2), ("dp", "tp"))
    assert new is not old and new != old and hash(new) != hash(old)
    assert new.to_hash() == old.to_hash()
    assert new.get_group("tp") == "group 2"
    assert init_device_mesh((2, 2), ("dp", "tp")) is new
    assert old.get_local_rank("tp") == 0
    assert world.made == [[0, 1], [0, 1]]


def test_a_group_of_one_from_before_is_refused_too(runtime: Runtime) -> None:
    """Though it needs no communication: the whole mesh is out of date."""
    mesh = init_device_mesh((1, 2), ("dp", "tp"))
    assert mesh.get_group("dp") == "alone"
    runtime.lives = 1
    with pytest.raises(RuntimeError, match="destroyed since"):
        mesh.get_group("dp")


# ---- M14: when groups are made ----

def test_groups_are_made_when_asked_for(world: World) -> None:
    """Not by construction, slices or flattening; once for each list of ranks."""
    mesh = cube()
    sub = mesh["dp", "tp"]
    flat = sub.flatten("x")
    cross = DeviceMesh([[0, 1], [2, 3]], ("a", "b"))
    assert world.made == []
    mesh.get_group("tp")
    assert world.made == [[0, 1]]
    for again in (mesh, sub, sub["tp"], mesh["tp"], cross["b"], cross):
        assert again.get_group(again.alias_name[-1]) == "group 1"
    assert world.made == [[0, 1]]
    flat.get_group()
    assert world.made == [[0, 1], [0, 1, 4, 5]]


def test_an_axis_of_size_one_makes_no_group(world: World) -> None:
    """It gets the real group of this process alone."""
    world.rank = 2
    mesh = init_device_mesh((4, 1), ("dp", "pp"))
    group = mesh.get_group("pp")
    assert world.made == []
    assert group.size() == 1
    assert device_mesh._group_map == {}
    value = torch.tensor([3.0])
    torch.distributed.all_reduce(value, group=group)
    assert value.item() == 3.0


def test_groups_of_other_ranks(world: World) -> None:
    """A rank given by number leads to its group, if this process is in it."""
    world.rank = 3
    mesh = cube()
    assert mesh.get_devices_for_axis("cp", 4) == [4, 6]
    assert mesh.get_devices_for_axis(0, 6) == [2, 6]
    assert mesh.get_comm_group_by_axis("tp", 2) == "group 1"
    assert mesh.get_comm_group_by_axis("tp", 3) == "group 1"
    assert world.made == [[2, 3]]
    with pytest.raises(ValueError, match=r"rank 3 is not among the ranks \(4, 5\)"):
        mesh.get_comm_group_by_axis("tp", 4)
    with pytest.raises(ValueError, match="rank 8 is not in"):
        mesh.get_devices_for_axis("tp", 8)
    with pytest.raises(ValueError, match="rank 5 is not in"):
        mesh["tp"].get_devices_for_axis("tp", 5)


def test_group_over_axes(world: World) -> None:
    """Spans the axes in the order given."""
    world.rank = 5
    mesh = cube()
    mesh.get_group_over_axes((0, 2))
    mesh.get_group_over_axes((2, 0))
    mesh.get_group_over_axes([1])
    mesh["dp", "tp"].get_group_over_axes((0, 1))
    assert world.made == [[0, 1, 4, 5], [0, 4, 1, 5], [5, 7]]
    world.rank = 9
    with pytest.raises(ValueError, match="rank 9 is not in"):
        mesh.get_group_over_axes((0, 1))


# ---- the rest of the surface ----

def test_axes_from_the_left_and_from_the_right() -> None:
    """MindSpore counts axes from the right."""
    mesh = cube()
    assert [mesh.axis_index(name) for name in ("dp", "cp", "tp")] == [0, 1, 2]
    assert [mesh.axis_id(name) for name in ("dp", "cp", "tp", "None")] == [2, 1, 0, -1]
    with pytest.raises(ValueError, match="no axis 'pp'"):
        mesh.axis_index("pp")
    with pytest.raises(ValueError, match="no axis 'pp'"):
        mesh.axis_id("pp")


def test_sizes() -> None:
    """Of the mesh and along axes."""
    mesh = init_device_mesh((2, 3, 4), ("dp", "cp", "tp"))
    assert mesh.size() == 24
    assert [mesh.size(name) for name in ("dp", "cp", "tp")] == [2, 3, 4]
    assert [mesh.size(axis) for axis in (0, 1, 2, -1, np.int64(-3))] == [2, 3, 4, 4, 2]
    assert mesh.get_device_num_along_axis("cp") == 3
    assert mesh["cp", "tp"].size() == 12


def test_rank_list_along_axis_is_a_copy() -> None:
    """What the caller does to it stays with the caller."""
    mesh = cube()
    mesh.get_rank_list_along_axis("tp").append(7)
    assert mesh.get_rank_list_along_axis("tp") == [0, 1]
    assert mesh._cache_rank_list_along_axis == {"tp": [0, 1]}
    mesh._cache_rank_list_along_axis.clear()
    assert mesh.get_rank_list_along_axis(2) == [0, 1]


def test_global_shape() -> None:
    """Each dim times the sizes of the axes that split it."""
    mesh = init_device_mesh((2, 3, 5), ("dp", "cp", "tp"))
    assert mesh.get_global_shape((4, 6), (2, 0)) == (8, 30)
    assert mesh.get_global_shape([4, 6, 1], [-1, (2, 1), [0]]) == (4, 36, 5)
    assert mesh.get_global_shape(torch.Size((4,)), (-1,)) == (4,)
    assert mesh.get_global_shape((), ()) == ()
    assert mesh._global_shape_map[(4, 6), (2, 0)] == (8, 30)
    mesh._global_shape_map[(4, 6), (2, 0)] = (0, 0)
    assert mesh.get_global_shape((4, 6), (2, 0)) == (0, 0)


@pytest.mark.parametrize("tensor_map, error", [
    ((2,), ValueError), ((3, 0), ValueError), ((-2, 0), ValueError), (((0, 3), 1), ValueError),
    (("dp", 0), TypeError), ((1.0, 0), TypeError),
])
def test_tensor_maps_that_are_refused(tensor_map: tuple, error: type) -> None:
    """Wrong length, no such axis, not numbers."""
    with pytest.raises(error, match="tensor_map"):
        cube().get_global_shape((4, 6), tensor_map)


@pytest.mark.parametrize("mesh, text", [
    (lambda: init_device_mesh((2, 4), ("dp", "tp")),
     "DeviceMesh((dp=2, tp=4), rank_list=(0, ..., 7))"),
    (lambda: DeviceMesh([3, 1, 2, 0], ("tp",)), "DeviceMesh((tp=4), rank_list=(3, 1, 2, 0))"),
    (lambda: DeviceMesh([5], ("tp",)), "DeviceMesh((tp=1), rank_list=(5,))"),
    (lambda: DeviceMesh(list(range(0, 64, 2)), ("tp",)),
     "DeviceMesh((tp=32), rank_list=(0, 2, 4, 6, 8, 10, 12, 14, ..., 62))"),
])
def test_repr(mesh: Any, text: str) -> None:
    """Names, sizes and ranks; short for many."""
    assert repr(mesh()) == text


def test_the_root_is_its_own_root() -> None:
    """And the mesh of all axes in order is the mesh itself."""
    mesh = cube()
    assert mesh.root_mesh is mesh
    assert mesh["dp", "cp", "tp"] is mesh
    assert mesh.sub_mesh == ()


def test_arrays_are_taken_by_value() -> None:
    """Later writes to the caller's array or to the tensor do not reach the mesh."""
    array = np.array([0, 1, 2, 3], dtype=np.int32)
    mesh = DeviceMesh(array, ("tp",))
    array[0] = 3
    mesh.mesh[1] = 3
    assert mesh.rank_list == (0, 1, 2, 3)
    assert mesh.mesh.tolist() == [0, 1, 2, 3]


def test_no_data_no_device() -> None:
    """The mesh tensor is real under a meta device and under fake tensors."""
    with torch.device("meta"):
        mesh = init_device_mesh((2, 4), ("dp", "tp"))
        assert mesh["dp"].flatten("x").mesh.tolist() == [0, 4]
    with FakeTensorMode():
        mesh = init_device_mesh((4, 2), ("dp", "tp"))
        assert mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert type(mesh["tp"].mesh) is torch.Tensor


# ---- many ranks ----

@pytest.mark.parametrize("ranks", [16_384, 65_536])
@pytest.mark.parametrize("shuffled", [False, True])
def test_many_ranks(world: World, ranks: int, shuffled: bool) -> None:
    """Build, slice and flatten within 50 ms, whatever the order of the ranks."""
    order = np.random.default_rng(0).permutation(ranks) if shuffled else None
    world.rank = ranks - 1
    spent = []
    for name in "abc":
        start = time.perf_counter()
        mesh = init_device_mesh((ranks // 64, 8, 8), (name, "cp", "tp"), rank_list=order)
        flat = mesh[name, "cp"].flatten()
        flat.get_local_rank()
        spent.append(time.perf_counter() - start)
        assert flat.size() == ranks // 8 and world.rank in flat.rank_list
    assert min(spent) < 0.05


def test_coordinates_of_every_rank(world: World) -> None:
    """Follow the array."""
    shape = (3, 1, 4)
    order = np.random.default_rng(1).permutation(12)
    mesh = init_device_mesh(shape, ("dp", "pp", "tp"), rank_list=order)
    for place, rank in zip(itertools.product(*map(range, shape)), order):
        world.rank = int(rank)
        assert mesh.get_coordinate() == place
        assert mesh.mesh[place].item() == rank

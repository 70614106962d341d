"""Copies of a DeviceMesh: in the process they are the mesh, through pickle its layout."""
import copy
import pickle

import pytest

from hyper_parallel.core import device_mesh
from hyper_parallel.core.device_mesh import DeviceMesh
from tests.ut.core.mesh_world import Runtime, World, cube

pytestmark = pytest.mark.usefixtures("world")


def test_copies_are_the_mesh_itself() -> None:
    """Shallow, deep, and inside other objects."""
    mesh = cube()
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy(mesh) is mesh
    assert copy.deepcopy({"mesh": [mesh["tp"]]})["mesh"][0] is mesh["tp"]


def test_pickle_carries_the_layout(world: World) -> None:
    """And no group; in the same process the cached root comes back."""
    mesh = cube()
    mesh["dp", "cp"].flatten("x")
    mesh.get_group("tp")
    for original in (mesh, mesh["tp"], mesh["x"], mesh["x", "tp"], mesh["dp", "tp"]):
        data = pickle.dumps(original)
        assert b"group" not in data
        assert pickle.loads(data) is original
    data = pickle.dumps(mesh["x", "tp"])
    device_mesh._DEVICE_MESH_MAP.clear()
    loaded = pickle.loads(data)
    assert loaded == mesh["x", "tp"] and loaded is not mesh["x", "tp"]
    assert loaded.root_mesh == mesh
    assert loaded.root_mesh["x"].rank_list == (0, 2, 4, 6)
    assert loaded["tp"] == mesh["tp"]
    assert world.made == [[0, 1]]


def test_pickle_from_another_rank(world: World) -> None:
    """The ranks of a sub-mesh are those that were pickled, not those of the loader."""
    world.rank = 7
    foreign = pickle.dumps(cube()["dp", "cp"])
    world.rank = 0
    device_mesh._DEVICE_MESH_MAP.clear()
    loaded = pickle.loads(foreign)
    assert loaded.rank_list == (1, 3, 5, 7)
    assert loaded.get_coordinate() is None
    assert loaded["cp"].rank_list == (1, 3)
    assert loaded.flatten("x").rank_list == (1, 3, 5, 7)
    assert loaded.root_mesh["x"].rank_list == (0, 2, 4, 6)
    assert loaded.root_mesh["dp", "cp"].rank_list == (0, 2, 4, 6)


def test_pickle_meets_another_meaning_of_a_name() -> None:
    """The loaded mesh keeps its own; neither root learns the other's."""
    mesh = cube()
    mesh["cp", "tp"].flatten("x")
    data = pickle.dumps(mesh["x"])
    device_mesh._DEVICE_MESH_MAP.clear()
    here = cube()
    here["dp", "cp"].flatten("x")
    loaded = pickle.loads(data)
    assert loaded.rank_list == (0, 1, 2, 3)
    assert here["x"].rank_list == (0, 2, 4, 6)
    assert cube() is here


def test_pickle_is_of_the_present_life(runtime: Runtime) -> None:
    """A mesh from before comes back as one that can be used now."""
    data = pickle.dumps(DeviceMesh([0], ("tp",)))
    runtime.lives = 1
    assert pickle.loads(data).get_group() == "alone"

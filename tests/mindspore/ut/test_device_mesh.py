"""The specification's cases for DeviceMesh, under a mock platform: no MindSpore is needed."""
from collections.abc import Iterator
from unittest.mock import MagicMock, patch

import numpy as np
import pytest

from hyper_parallel.core import device_mesh
from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh

GRID = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(name="platform", autouse=True)
def _platform() -> Iterator[MagicMock]:
    """A platform of which topology may use three methods; this process is rank 5."""
    mock = MagicMock(spec=["get_rank", "create_group", "tensor_to_numpy"])
    mock.get_rank.return_value = 5
    mock.create_group.side_effect = lambda ranks: ("group", *ranks)
    mock.tensor_to_numpy.side_effect = lambda tensor: np.array(tensor.tolist())
    with patch.object(device_mesh, "platform", mock):
        device_mesh._group_map.clear()
        device_mesh._DEVICE_MESH_MAP.clear()
        yield mock
    device_mesh._group_map.clear()
    device_mesh._DEVICE_MESH_MAP.clear()


def a_tensor(values: list) -> object:
    """The values as a tensor of the real framework."""
    return device_mesh._runtime.tensor_from_numpy(np.array(values))


# ---- 4.1, one to eight ----

def test_init_device_mesh_basic() -> None:
    """Ranks are counted row by row."""
    mesh = init_device_mesh(mesh_shape=(2, 4), alias_name=("dp", "tp"))
    assert mesh.rank_list == (0, 1, 2, 3, 4, 5, 6, 7)
    assert mesh.mesh_shape == (2, 4)
    assert mesh.alias_name == ("dp", "tp")
    assert mesh.ndim == 2
    assert mesh.rank == 5


def test_init_device_mesh_cache() -> None:
    """The same shape and names give the same object, others do not."""
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    assert init_device_mesh((2, 4), ("dp", "tp")) is mesh
    assert init_device_mesh((4, 2), ("dp", "tp")) is not mesh
    assert init_device_mesh((2, 4), ("dp", "cp")) is not mesh
    assert len(device_mesh._DEVICE_MESH_MAP) == 3
    device_mesh._DEVICE_MESH_MAP.clear()
    again = init_device_mesh((2, 4), ("dp", "tp"))
    assert again is not mesh and again == mesh


@pytest.mark.parametrize("make", [a_tensor, list, np.array], ids=["tensor", "list", "numpy"])
def test_device_mesh_direct_construction(make) -> None:
    """A layout that does not count up is read row by row."""
    mesh = DeviceMesh(make([[3, 1], [2, 0]]), ("dp", "tp"))
    assert mesh.mesh_shape == (2, 2)
    assert mesh.rank_list == (3, 1, 2, 0)


def test_device_mesh_getitem_valid() -> None:
    """Sub-meshes pass through the place of this process and know their root."""
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    assert mesh["tp"].rank_list == (4, 5, 6, 7)
    assert mesh["dp"].rank_list == (1, 5)
    assert mesh["tp"].alias_name == ("tp",)
    assert mesh["tp"].root_mesh is mesh
    assert mesh["tp"] is mesh["tp"]
    assert mesh.sub_mesh == (mesh["tp"], mesh["dp"])
    cube = init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))
    assert cube["dp", "tp"].rank_list == (0, 1, 4, 5)
    assert cube["dp", "tp"].mesh_shape == (2, 2)
    assert cube["cp", "tp"].rank_list == (4, 5, 6, 7)
    assert cube["cp", "tp"]["cp"].rank_list == (5, 7)
    assert cube["cp", "tp"]["cp"].root_mesh is cube


def test_device_mesh_get_group_valid(platform: MagicMock) -> None:
    """Groups are made once for their ranks, by one positional list."""
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    assert mesh.get_group("tp") == ("group", 4, 5, 6, 7)
    platform.create_group.assert_called_once_with([4, 5, 6, 7])
    assert mesh.get_group(1) == mesh.get_group(-1) == mesh["tp"].get_group()
    assert platform.create_group.call_count == 1
    assert mesh.get_group(0) == ("group", 1, 5)
    assert platform.create_group.call_count == 2
    assert device_mesh._group_map == {(4, 5, 6, 7): ("group", 4, 5, 6, 7),
                                      (1, 5): ("group", 1, 5)}
    device_mesh._group_map.clear()
    mesh.get_group("tp")
    assert platform.create_group.call_count == 3


def test_device_mesh_get_local_rank(platform: MagicMock) -> None:
    """Rank 5 of a 2 by 4 mesh is at (1, 1); every other rank is at its own place."""
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    assert (mesh.get_local_rank("dp"), mesh.get_local_rank("tp")) == (1, 1)
    assert mesh["tp"].get_local_rank() == 1
    for rank in range(8):
        platform.get_rank.return_value = rank
        assert mesh.get_coordinate() == (rank // 4, rank % 4)
        assert (mesh.get_local_rank(0), mesh.get_local_rank(1)) == (rank // 4, rank % 4)


def test_device_mesh_flatten() -> None:
    """Axes join to one, whose name joins theirs and which the root then knows."""
    mesh = init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))
    flat = mesh.flatten()
    assert flat.alias_name == ("dp_cp_tp",)
    assert flat.rank_list == (0, 1, 2, 3, 4, 5, 6, 7)
    assert flat.mesh_shape == (8,)
    assert flat.root_mesh is mesh
    fsdp = mesh["dp", "cp"].flatten()
    assert fsdp.alias_name == ("dp_cp",)
    assert fsdp.rank_list == (1, 3, 5, 7)
    assert mesh["dp_cp"] is fsdp
    assert mesh.get_group("dp_cp") == ("group", 1, 3, 5, 7)
    assert mesh.get_local_rank("dp_cp") == 2


def test_device_mesh_mesh_property() -> None:
    """The ranks as a tensor of 32-bit integers."""
    tensor = DeviceMesh([[3, 1], [2, 0]], ("dp", "tp")).mesh
    assert isinstance(tensor, device_mesh.Tensor)
    assert tensor.tolist() == [[3, 1], [2, 0]]
    assert device_mesh._runtime.tensor_to_numpy(tensor).dtype == np.int32


# ---- 4.2, what is refused ----

@pytest.mark.parametrize("names, error, message", [
    (("dp",), ValueError, "one name for each of the 2 axes"),
    (("dp", "cp", "tp"), ValueError, "one name for each of the 2 axes"),
    (("dp", "dp"), ValueError, "differ from each other"),
    (("dp", ""), ValueError, "must not be empty"),
    (("None", "tp"), ValueError, "not 'None'"),
    (("interleaved_parallel", "tp"), ValueError, "must be the last axis"),
    (["dp", "tp"], TypeError, "alias_name must be a tuple"),
    (("dp", 1), TypeError, "must be a string"),
])
def test_names_that_are_refused(names, error: type, message: str) -> None:
    """By the constructor and by the factory alike."""
    with pytest.raises(error, match=message):
        DeviceMesh(GRID, names)
    with pytest.raises(error, match=message):
        init_device_mesh((2, 4), names)


def test_interleaved_parallel_may_be_last() -> None:
    """The reserved name is allowed at the end."""
    mesh = init_device_mesh((2, 4), ("dp", "interleaved_parallel"))
    assert mesh["interleaved_parallel"].rank_list == (4, 5, 6, 7)


def test_several_axes_have_to_be_told_apart() -> None:
    """Group and local rank of a mesh of two axes need the axis."""
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    with pytest.raises(RuntimeError, match="pass one of .*'dp', 'tp'"):
        mesh.get_group()
    with pytest.raises(RuntimeError, match="pass one of .*'dp', 'tp'"):
        mesh.get_local_rank()


def test_getitem_of_an_unknown_name() -> None:
    """KeyError, which lists what there is."""
    with pytest.raises(KeyError, match="no axis 'pp'; its axes are .*'dp', 'tp'"):
        _ = init_device_mesh((2, 4), ("dp", "tp"))["pp"]


def test_a_rank_outside_the_mesh(platform: MagicMock) -> None:
    """It has no coordinate, no local rank and no group."""
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    platform.get_rank.return_value = 8
    assert mesh.get_coordinate() is None
    with pytest.raises(ValueError, match="rank 8 is not in"):
        mesh.get_local_rank("tp")
    with pytest.raises(ValueError, match="rank 8 is not in"):
        mesh.get_group("tp")
    assert mesh["tp"].rank_list == (0, 1, 2, 3)
    platform.create_group.assert_not_called()

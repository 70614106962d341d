"""M13: what cannot be a mesh, a slice of one or an axis, and what the error says."""
from typing import Any

import numpy as np
import pytest
import torch

from hyper_parallel.core import device_mesh
from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.platform import get_platform
from tests.ut.core.mesh_world import cube

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("ranks, error, message", [
    ([0, 1, 1, 2, 0], ValueError, r"each rank has one place in a mesh, but \(0, 1\) stands"),
    ([[0, 1], [2]], ValueError, "equal lengths along each axis"),
    ([], ValueError, "at least one rank"),
    ([[], []], ValueError, "at least one rank"),
    ([0, -1], ValueError, "ranks must be between 0 and"),
    ([0, 2 ** 31], ValueError, "ranks must be between 0 and"),
    (np.array(3), ValueError, "at least one dim"),
    (torch.tensor(3), ValueError, "at least one dim"),
    ([0.0, 1.0], TypeError, "whole numbers"),
    (["0", "1"], TypeError, "whole numbers"),
    ([True, False], TypeError, "whole numbers"),
    (3, TypeError, "a tensor, a list or a numpy array"),
    ("01", TypeError, "a tensor, a list or a numpy array"),
])
def test_ranks_that_are_refused(ranks: Any, error: type, message: str) -> None:
    """With the rule and the offender."""
    with pytest.raises(error, match=message):
        DeviceMesh(ranks, ("tp",))


@pytest.mark.parametrize("shape, error, message", [
    ((2, 0), ValueError, "at least one rank along each"),
    ((2, -2), ValueError, "at least one rank along each"),
    ((), ValueError, "at least one axis"),
    ([2, 2], TypeError, "mesh_shape must be a tuple"),
    (4, TypeError, "mesh_shape must be a tuple"),
    ((2, 2.0), TypeError, "whole numbers"),
    ((2, True), TypeError, "whole numbers"),
])
def test_shapes_that_are_refused(shape: Any, error: type, message: str) -> None:
    """With the rule and the offender."""
    with pytest.raises(error, match=message):
        init_device_mesh(shape, ("dp", "tp"))


@pytest.mark.parametrize("ranks, error, message", [
    ([0, 1, 2], ValueError, "one rank for each of the 4 places"),
    ([[0, 1], [2, 3]], ValueError, "one rank for each of the 4 places"),
    ([0, 1, 2, 2], ValueError, r"\(2,\) stands there more than once"),
    ([0, 1, 2, -3], ValueError, "between 0"),
    ([0.0, 1.0, 2.0, 3.0], TypeError, "whole numbers"),
    (4, TypeError, "a list or tuple of ranks"),
    ("0123", TypeError, "a list or tuple of ranks"),
])
def test_rank_lists_that_are_refused(ranks: Any, error: type, message: str) -> None:
    """With the rule and the offender."""
    with pytest.raises(error, match=message):
        init_device_mesh((2, 2), ("dp", "tp"), rank_list=ranks)


@pytest.mark.parametrize("ranks", [range(4, 8), (7, 5, 6, 4), np.array([4, 6, 5, 7])])
def test_rank_lists_that_are_taken(ranks: Any) -> None:
    """Any sequence of whole numbers."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"), rank_list=ranks)
    assert mesh.rank_list == tuple(ranks)


def test_a_mesh_larger_than_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused as soon as the world is known, also if it was described before."""
    real = get_platform()
    monkeypatch.setattr(device_mesh, "platform", real)
    planned = init_device_mesh((2, 4), ("dp", "tp"))
    assert planned.size() == 8
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert init_device_mesh((2, 2), ("dp", "tp")).get_coordinate() == (0, 1)
    for make in (lambda: init_device_mesh((2, 4), ("dp", "tp")),
                 lambda: DeviceMesh([0, 4], ("tp",))):
        with pytest.raises(ValueError, match="ranks of the world, 0 to 3"):
            make()


@pytest.mark.parametrize("names, error, message", [
    (("tp", "dp"), ValueError, "order of the mesh, each once"),
    (("dp", "dp"), ValueError, "order of the mesh, each once"),
    ((), ValueError, "at least one axis name"),
    ("", ValueError, "at least one axis name"),
    (("dp", ""), ValueError, "none that is empty"),
    ("pp", KeyError, "no axis 'pp'"),
    (("dp", "pp"), KeyError, "no axis 'pp'"),
    (0, TypeError, "indexed by an axis name"),
    (["dp"], TypeError, "indexed by an axis name"),
    (("dp", 0), TypeError, "indexed by an axis name"),
    (slice(None), TypeError, "indexed by an axis name"),
])
def test_slices_that_are_refused(names: Any, error: type, message: str) -> None:
    """With the rule and the offender, and the mesh is as before."""
    mesh = cube()
    with pytest.raises(error, match=message):
        _ = mesh[names]
    assert mesh.sub_mesh == ()


def test_a_sub_mesh_knows_its_own_axes_only() -> None:
    """The axes it left out are no names of it."""
    with pytest.raises(KeyError, match="no axis 'tp'"):
        _ = cube()["dp", "cp"]["tp"]


@pytest.mark.parametrize("axis, error", [
    ("pp", ValueError), (3, ValueError), (-4, ValueError), (1.0, TypeError), (True, TypeError),
])
@pytest.mark.parametrize("method", [
    "get_group", "get_local_rank", "size", "get_device_num_along_axis",
    "get_rank_list_along_axis",
])
def test_axes_that_are_refused(method: str, axis: Any, error: type) -> None:
    """By every method that takes one."""
    with pytest.raises(error, match="axis"):
        getattr(cube(), method)(axis)

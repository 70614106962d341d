"""Slicing and flattening against numpy: every sub-mesh is what indexing the rank array gives."""
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core import device_mesh
from hyper_parallel.core.device_mesh import DeviceMesh

NAMES = ("pp", "dp", "cp", "tp")


class Seat:
    """A platform that knows nothing but a rank."""

    rank = 0

    def get_rank(self) -> int:
        """Where the test sits."""
        return self.rank


@pytest.fixture(name="seat", scope="module")
def _seat() -> Iterator[Seat]:
    """Replaces the platform for the whole file, since hypothesis runs many examples in one test."""
    with pytest.MonkeyPatch.context() as patch:
        seat = Seat()
        patch.setattr(device_mesh, "platform", seat)
        yield seat


@st.composite
def grids(draw: st.DrawFn) -> np.ndarray:
    """Ranks in any order in a grid of one to four axes."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    count = int(np.prod(shape))
    order = draw(st.permutations(range(count)))
    return np.array(order).reshape(shape) + draw(st.integers(0, 5))


def expected(grid: np.ndarray, axes: list[int], rank: int) -> np.ndarray:
    """The ranks that share the place of ``rank`` on all axes but ``axes``, one by one."""
    found = np.argwhere(grid == rank)
    place = found[0] if found.size else np.zeros(grid.ndim, dtype=int)
    part = np.empty([grid.shape[axis] for axis in axes], dtype=int)
    for inner in itertools.product(*(range(grid.shape[axis]) for axis in axes)):
        at = place.copy()
        at[axes] = inner
        part[inner] = grid[tuple(at)]
    return part


def some_axes(data: st.DataObject, ndim: int) -> list[int]:
    """At least one axis, in mesh order."""
    picked = data.draw(st.lists(st.booleans(), min_size=ndim, max_size=ndim).filter(any))
    return [axis for axis in range(ndim) if picked[axis]]


def check(mesh: DeviceMesh, ranks: np.ndarray, names: tuple[str, ...], rank: int) -> None:
    """Everything a mesh says follows from its array."""
    assert mesh.mesh_shape == ranks.shape
    assert mesh.rank_list == tuple(ranks.reshape(-1))
    assert mesh.alias_name == names
    place = np.argwhere(ranks == rank)
    assert mesh.get_coordinate() == (tuple(place[0]) if place.size else None)
    assert mesh == DeviceMesh(ranks, names)
    assert hash(mesh) == hash(DeviceMesh(ranks, names))
    if place.size:
        for axis, name in enumerate(names):
            along = expected(ranks, [axis], rank)
            assert mesh.get_rank_list_along_axis(name) == along.tolist()
            assert mesh.get_local_rank(axis) == along.tolist().index(rank)
            assert mesh.size(name) == along.size


@settings(deadline=None, max_examples=150)
@given(grid=grids(), data=st.data())
def test_slices(seat: Seat, grid: np.ndarray, data: st.DataObject) -> None:
    """A slice, and a slice of that slice, from inside or outside the mesh."""
    seat.rank = data.draw(st.integers(0, int(grid.max()) + 1))
    names = NAMES[:grid.ndim]
    mesh = DeviceMesh(grid, names)
    check(mesh, grid, names, seat.rank)
    axes = some_axes(data, grid.ndim)
    outer = mesh[tuple(names[axis] for axis in axes)]
    check(outer, expected(grid, axes, seat.rank), tuple(names[a] for a in axes), seat.rank)
    inner_axes = [axes[position] for position in some_axes(data, len(axes))]
    inner = outer[tuple(names[axis] for axis in inner_axes)]
    check(inner, expected(grid, inner_axes, seat.rank), tuple(names[a] for a in inner_axes),
          seat.rank)
    assert inner == mesh[inner.alias_name]
    assert inner.root_mesh is outer.root_mesh is mesh


@settings(deadline=None, max_examples=150)
@given(grid=grids(), data=st.data())
def test_flattening(seat: Seat, grid: np.ndarray, data: st.DataObject) -> None:
    """A flattened slice is the slice's array reshaped, and stands beside the axes around it."""
    seat.rank = data.draw(st.integers(0, int(grid.max()) + 1))
    names = NAMES[:grid.ndim]
    mesh = DeviceMesh(grid, names)
    axes = some_axes(data, grid.ndim)
    part = expected(grid, axes, seat.rank)
    flat = mesh[tuple(names[axis] for axis in axes)].flatten("flat")
    check(flat, part.reshape(-1), ("flat",), seat.rank)
    assert mesh["flat"] is flat
    before = tuple(axis for axis in range(grid.ndim) if axis < axes[0])
    after = tuple(axis for axis in range(grid.ndim) if axis > axes[-1])
    both = mesh[(*(names[axis] for axis in before), "flat", *(names[axis] for axis in after))]
    whole = expected(grid, [*before, *axes, *after], seat.rank)
    shape = [grid.shape[axis] for axis in before], [grid.shape[axis] for axis in after]
    check(both, whole.reshape(*shape[0], -1, *shape[1]), both.alias_name, seat.rank)
    assert both["flat"] == flat


@settings(deadline=None, max_examples=60)
@given(grid=grids(), data=st.data())
def test_ranks_share_what_they_should(seat: Seat, grid: np.ndarray, data: st.DataObject) -> None:
    """All members of a line name the same ranks in the same order: no group can be lopsided."""
    mesh = DeviceMesh(grid, NAMES[:grid.ndim])
    axis = data.draw(st.integers(0, grid.ndim - 1))
    lines = {}
    for rank in grid.reshape(-1):
        seat.rank = int(rank)
        lines[seat.rank] = mesh.get_rank_list_along_axis(axis)
    for rank, line in lines.items():
        assert rank in line
        assert all(lines[other] == line for other in line)
        assert mesh.get_devices_for_axis(axis, rank) == line

"""Layouts and specs: bounds, orders, duals, equality and errors."""
import copy
import gc
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard
from hyper_parallel.core.layout import TensorSpec, chunk_bounds


def _mesh(*shape):
    names = ("dp", "cp", "tp")[-len(shape):]
    count = torch.Size(shape).numel()
    return DeviceMesh(torch.arange(count).reshape(shape), names)


def _coordinates(mesh):
    return itertools.product(*map(range, mesh.mesh_shape))


@given(st.integers(0, 40), st.integers(1, 9))
def test_pieces_are_those_of_chunk(size, pieces):
    tensor = torch.arange(size)
    chunks = list(tensor.chunk(pieces)) if size else []
    for index in range(pieces):
        start, length = chunk_bounds(size, pieces, index)
        wanted = chunks[index].tolist() if index < len(chunks) else []
        assert tensor[start:start + length].tolist() == wanted
        assert 0 <= start <= size and length >= 0


def test_equal_layouts_are_one_object():
    mesh = _mesh(2, 2)
    layout = Layout(mesh, [Shard(0), Replicate()])
    assert Layout(mesh, (Shard(0), Replicate())) is layout
    assert Layout(_mesh(2, 2), [Shard(0), Replicate()]) is layout
    assert Layout(mesh, [Shard(0), Shard(0)], {0: ("cp", "tp")}) is Layout(
        mesh, [Shard(0), Shard(0)])
    assert Layout(mesh, [Shard(0), Shard(0)], {0: ("tp", "cp")}) is Layout(
        mesh, [Shard(0), Shard(0)], {0: (1, 0)})
    assert Layout(mesh, [Shard(0), Shard(0)], {0: ("tp", "cp")}) != Layout(
        mesh, [Shard(0), Shard(0)])
    assert layout != Layout(mesh, [Replicate(), Shard(0)]) and layout != "layout"
    assert len({layout, Layout(mesh, [Shard(0), Replicate()])}) == 1
    for same in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert same is layout
    ordered = Layout(mesh, [Shard(0), Shard(0)], {0: ("tp", "cp")})
    assert pickle.loads(pickle.dumps(ordered)) is ordered
    with pytest.raises(AttributeError, match="frozen"):
        layout.placements = ()


def test_layouts_of_different_meshes_differ():
    one, other = DeviceMesh([0, 1], ("x",)), DeviceMesh([1, 0], ("x",))
    assert Layout(one, [Shard(0)]) is not Layout(other, [Shard(0)])


def test_unused_layouts_are_forgotten():
    mesh = DeviceMesh(torch.arange(6).reshape(2, 3), ("a", "b"))
    before = len(Layout._interned)
    for dim in range(50, 60):
        Layout(mesh, [Shard(dim), Replicate()])
    gc.collect()
    assert len(Layout._interned) <= before


def test_its_repr_names_axes_and_orders():
    mesh = _mesh(2, 2)
    assert repr(Layout(mesh, [Shard(0), Partial()])) == "Layout(cp=Shard(dim=0), tp=Partial(sum))"
    assert repr(Layout(mesh, [Shard(1), Shard(1)], {1: ("tp", "cp")})) == \
        "Layout(cp=Shard(dim=1), tp=Shard(dim=1), order of dim 1: tp > cp)"
    assert repr(TensorSpec(Layout(mesh, [Shard(0), Partial()]), (3, 4))) == \
        "TensorSpec([3, 4], Layout(cp=Shard(dim=0), tp=Partial(sum)))"


@st.composite
def _spread(draw):
    """A mesh, placements, an order for each shared dim, and a shape."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = _mesh(*shape)
    ndim = draw(st.integers(0, 3))
    kinds = [Replicate(), Partial(), *(Shard(dim) for dim in range(ndim))]
    placements = [draw(st.sampled_from(kinds)) for _ in shape]
    order = {}
    for dim in range(ndim):
        axes = [axis for axis, placement in enumerate(placements) if placement == Shard(dim)]
        order[dim] = tuple(draw(st.permutations(axes)))
    sizes = draw(st.lists(st.integers(0, 7), min_size=ndim, max_size=ndim))
    return mesh, placements, order, sizes


@given(_spread())
@settings(max_examples=200, deadline=None)
def test_the_parts_of_a_tensor_cover_it_once_for_each_replica(case):
    mesh, placements, order, sizes = case
    layout = Layout(mesh, placements, order)
    seen = torch.zeros(sizes, dtype=torch.int64)
    for coordinate in _coordinates(mesh):
        bounds = layout.local_bounds(sizes, coordinate)
        assert layout.local_shape(sizes, coordinate) == tuple(length for _, length in bounds)
        seen[tuple(slice(start, start + length) for start, length in bounds)] += 1
    replicas = 1
    for size, placement in zip(mesh.mesh_shape, placements):
        replicas *= 1 if placement.is_shard() else size
    assert (seen == replicas).all()


@given(_spread())
@settings(max_examples=200, deadline=None)
def test_the_outermost_axis_cuts_first(case):
    """The part is what cutting along one axis after the other, outermost first, gives."""
    mesh, placements, order, sizes = case
    layout = Layout(mesh, placements, order)
    dense = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    for coordinate in _coordinates(mesh):
        part = dense
        for dim in range(len(sizes)):
            assert layout.axes_of(dim) == order[dim]
            for axis in order[dim]:
                start, length = chunk_bounds(part.shape[dim], mesh.mesh_shape[axis],
                                             coordinate[axis])
                part = part.narrow(dim, start, length)
        bounds = layout.local_bounds(sizes, coordinate)
        wanted = dense[tuple(slice(start, start + length) for start, length in bounds)]
        assert torch.equal(part, wanted)


def test_orders_of_a_shared_dim():
    mesh = _mesh(2, 3)
    layout = Layout(mesh, [Shard(0), Shard(0)], {0: ("tp", "cp")})
    assert layout.axes_of(0) == (1, 0) and layout.sharded_dims == (0,)
    assert layout.local_bounds((12,), (1, 0)) == ((2, 2),)
    assert Layout(mesh, [Shard(0), Shard(0)]).local_bounds((12,), (1, 0)) == ((6, 2),)


@pytest.mark.parametrize("order, message", [
    ({0: ("tp",)}, r"order of dim 0 must name each axis that splits it once: \('cp', 'tp'\)"),
    ({0: ("tp", "tp")}, "order of dim 0"), ({1: ("tp",)}, "order of dim 1"),
    ({0: (0, 2)}, "order of dim 0"),
])
def test_an_order_that_does_not_fit(order, message):
    with pytest.raises(ValueError, match=message):
        Layout(_mesh(2, 2), [Shard(0), Shard(0)], order)


def test_an_order_is_a_mapping():
    with pytest.raises(TypeError, match="shard_order maps a tensor dim"):
        Layout(_mesh(2, 2), [Shard(0), Shard(0)], ("tp", "cp"))


def test_an_order_names_known_axes():
    with pytest.raises((KeyError, ValueError), match="zz"):
        Layout(_mesh(2, 2), [Shard(0), Shard(0)], {0: ("zz", "tp")})


def test_placements_that_do_not_fit():
    mesh = _mesh(2, 2)
    with pytest.raises(ValueError, match=r"one placement .* 2 axes \('cp', 'tp'\).* got 1"):
        Layout(mesh, [Shard(0)])
    with pytest.raises(ValueError, match="3"):
        Layout(mesh, [Shard(0)] * 3)
    with pytest.raises(TypeError, match=r"list or tuple .* write \[Shard\(dim=0\)\]"):
        Layout(mesh, Shard(0))
    for wrong in (0, "Shard(0)", None, Shard):
        with pytest.raises(TypeError, match="a placement is Shard"):
            Layout(mesh, [wrong, Replicate()])
    with pytest.raises(TypeError, match="needs a DeviceMesh"):
        Layout("mesh", [Shard(0)])
    with pytest.raises(ValueError, match="must commute"):
        Layout(mesh, [Partial("sum"), Partial("max")])
    assert Layout(mesh, [Partial("sum"), Partial("avg")])


def test_negative_dims_become_positive():
    mesh = _mesh(2, 2)
    layout = Layout(mesh, [Shard(-1), Shard(0)])
    assert layout.for_ndim(3) is Layout(mesh, [Shard(2), Shard(0)])
    assert layout.for_ndim(1) is Layout(mesh, [Shard(0), Shard(0)])
    assert TensorSpec(layout, (3, 4)).layout is Layout(mesh, [Shard(1), Shard(0)])
    ordered = Layout(mesh, [Shard(-1), Shard(-1)], {-1: ("tp", "cp")})
    assert ordered.for_ndim(2) is Layout(mesh, [Shard(1), Shard(1)], {1: ("tp", "cp")})
    for dim in (2, -3):
        with pytest.raises(ValueError, match=r"axis 'tp' .* 2 dims .* -2 to 1"):
            Layout(mesh, [Replicate(), Shard(dim)]).for_ndim(2)
    with pytest.raises(ValueError, match="0 dims"):
        Layout(mesh, [Shard(0), Replicate()]).for_ndim(0)


def test_an_order_and_negative_dims_that_meet():
    mesh = _mesh(2, 2)
    mixed = Layout(mesh, [Shard(0), Shard(-2)]).for_ndim(2)
    assert mixed is Layout(mesh, [Shard(0), Shard(0)])


def test_duals():
    mesh = _mesh(2, 2)
    assert Layout(mesh, [Shard(0), Replicate()]).dual is Layout(mesh, [Shard(0), Replicate()])
    assert Layout(mesh, [Partial(), Partial("avg")]).dual is Layout(mesh, [Replicate()] * 2)
    assert Layout(mesh, [Partial("max"), Shard(1)]).dual is Layout(mesh, [Partial(), Shard(1)])
    ordered = Layout(mesh, [Shard(0), Shard(0)], {0: ("tp", "cp")})
    assert ordered.dual is ordered


def test_replacing_placements_keeps_the_order():
    mesh = _mesh(2, 2, 2)
    layout = Layout(mesh, [Shard(0), Shard(0), Shard(0)], {0: ("tp", "dp", "cp")})
    assert layout.replaced({}) is layout
    assert layout.replaced({1: Replicate()}) is Layout(
        mesh, [Shard(0), Replicate(), Shard(0)], {0: ("tp", "dp")})
    # An axis that comes to split a dim is its innermost one.
    assert Layout(mesh, [Replicate(), Replicate(), Shard(0)]).replaced({0: Shard(0)}) is Layout(
        mesh, [Shard(0), Replicate(), Shard(0)], {0: ("tp", "dp")})


def test_specs_are_values():
    layout = Layout(_mesh(2, 2), [Shard(0), Replicate()])
    spec = TensorSpec(layout, (3, 4))
    assert TensorSpec(layout, torch.Size([3, 4])) is spec is TensorSpec(layout, [3, 4])
    assert isinstance(spec.shape, torch.Size) and spec.shape == (3, 4)
    assert TensorSpec(layout, (4, 3)) != spec
    for same in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert same is spec
    assert TensorSpec(Layout(_mesh(2, 2), [Partial(), Shard(1)]), (3, 4)).dual is TensorSpec(
        Layout(_mesh(2, 2), [Replicate(), Shard(1)]), (3, 4))
    with pytest.raises(ValueError, match="dim"):
        TensorSpec(layout, ())
    with pytest.raises(AttributeError, match="frozen"):
        spec.shape = (1,)


def test_a_rank_outside_of_the_mesh_holds_no_part():
    layout = Layout(DeviceMesh([5, 6], ("x",)), [Shard(0)])
    with pytest.raises(ValueError, match=r"rank 0 is not in .*get_coordinate\(\) is not None"):
        layout.local_shape((4,))
    assert layout.local_shape((4,), (1,)) == (2,)

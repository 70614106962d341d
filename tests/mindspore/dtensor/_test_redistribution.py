"""Meshes, groups and every change of layout on four MindSpore ranks, values and gradients."""
import itertools

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import (
    CommDebugMode, DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, get_platform,
    init_device_mesh)

NPROC = 4
TIMEOUT = 150

RANK = get_platform().get_rank()
ONE_AXIS = [Shard(0), Shard(1), Replicate(), Partial()]


def whole(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that are all different."""
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + 1


def spread(mesh: DeviceMesh, placements: list, array: np.ndarray) -> DTensor:
    """A tensor of which the summands differ between the ranks, where there are any."""
    x = distribute_tensor(Tensor(array), mesh, [
        Replicate() if placement.is_partial() else placement for placement in placements])
    return x.redistribute(placements=placements)


def test_groups_of_a_mesh() -> None:
    """Rows and columns, made by their members alone, when first asked for."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    rows, columns = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    assert mesh.get_group("tp").ranks == rows[RANK // 2]
    assert mesh.get_group("dp").ranks == columns[RANK % 2]
    assert mesh.get_group("tp") is mesh["tp"].get_group()
    assert mesh.flatten().get_group().ranks == (0, 1, 2, 3)
    assert mesh.get_coordinate() == (RANK // 2, RANK % 2)
    if RANK < 2:  # the others go on without it
        pair = DeviceMesh([1, 0], ("pair",))
        x = DTensor.from_local(Tensor(np.array([1.0 + RANK], np.float32)), pair, [Partial()])
        assert x.full_tensor().asnumpy() == 3
    with pytest.raises(ValueError, match="Mesh|mesh"):
        init_device_mesh((8,), ("tp",))


def test_the_order_of_the_ranks_is_kept() -> None:
    """On [3, 1, 2, 0] rank 3 holds piece 0."""
    mesh = DeviceMesh([3, 1, 2, 0], ("tp",))
    assert mesh.get_local_rank() == [3, 1, 2, 0].index(RANK)
    x = DTensor.from_local(Tensor(np.arange(4, dtype=np.float32)), mesh, [Replicate()])
    piece = x.redistribute(placements=[Shard(0)])
    assert piece.to_local().asnumpy().tolist() == [float([3, 1, 2, 0].index(RANK))]
    assert piece.full_tensor().asnumpy().tolist() == [0, 1, 2, 3]


def test_every_pair_on_one_axis() -> None:
    """Even shards and, where they need no uneven exchange, uneven and empty ones."""
    mesh = init_device_mesh((4,), ("tp",))
    for shape in ((8, 4), (5, 3), (2, 3)):
        array = whole(shape)
        for source, target in itertools.product(ONE_AXIS, repeat=2):
            x = spread(mesh, [source], array)
            moved = x.redistribute(placements=[target])
            assert tuple(moved.shape) == shape and moved.placements == (target,)
            assert moved.to_local().shape == moved._spec.local_shape
            assert np.array_equal(moved.full_tensor().asnumpy(), array), (shape, source, target)


def test_every_pair_on_two_axes() -> None:
    """All sixteen layouts of a (2, 2) mesh, each moved to each."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    array = whole((4, 8))
    layouts = list(itertools.product(ONE_AXIS, repeat=2))
    sources = [(placements, spread(mesh, list(placements), array)) for placements in layouts]
    for (source, x), target in itertools.product(sources, layouts):
        moved = x.redistribute(placements=list(target))
        if any(placement.is_partial() for placement in target):
            assert np.array_equal(moved.full_tensor().asnumpy(), array), (source, target)
            continue
        bounds = moved.layout.local_bounds((4, 8))
        part = array[tuple(slice(start, start + length) for start, length in bounds)]
        assert np.array_equal(moved.to_local().asnumpy(), part), (source, target)


def test_what_moves_is_as_little_as_on_other_platforms() -> None:
    """Swapped shards exchange pieces; two summands need one all-reduce over both axes."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    array = whole((4, 8))
    swapped = spread(mesh, [Shard(1), Shard(0)], array)
    summands = spread(mesh, [Partial(), Partial()], array)
    with CommDebugMode() as mode:
        result = swapped.redistribute(placements=[Shard(0), Shard(1)])
    assert "differentiable_all_gather_concat" not in mode.get_comm_counts()
    assert np.array_equal(result.full_tensor().asnumpy(), array)
    with CommDebugMode() as mode:
        result = summands.redistribute(placements=[Replicate(), Replicate()])
    assert mode.get_comm_counts() == {"differentiable_all_reduce": 1}
    assert np.array_equal(result.to_local().asnumpy(), array)
    with CommDebugMode() as mode:
        result.redistribute(placements=[Replicate(), Replicate()])
    assert mode.get_total_counts() == 0


def test_gradients_of_every_pair() -> None:
    """The table of the design: each move's gradient, for a result that is used as its type says.

    The loss is a weighted sum of all elements, so the gradient is the weights in the layout dual
    to the source's.
    """
    mesh = init_device_mesh((4,), ("tp",))
    for shape in ((8, 4), (5, 3)):
        array, weights = whole(shape), whole(shape)[::-1].copy()
        for source, target in itertools.product(ONE_AXIS, repeat=2):
            x = spread(mesh, [source], array)
            placed = spread(mesh, [Replicate() if target.is_partial() else target], weights)

            def loss(local: Tensor, x=x, target=target, placed=placed) -> Tensor:
                start = DTensor.from_local(local, mesh, x.placements, shape=tuple(x.shape))
                moved = start.redistribute(placements=[target])
                return (moved * placed).sum().full_tensor()

            gradient = mindspore.grad(loss)(x.to_local())
            bounds = x.layout.dual.local_bounds(shape)
            part = weights[tuple(slice(start, start + length) for start, length in bounds)]
            assert np.array_equal(gradient.asnumpy(), part), (shape, source, target, gradient, part)


def test_from_local_and_back() -> None:
    """The gradient of to_local comes as asked for."""
    mesh = init_device_mesh((4,), ("tp",))
    local = Tensor(np.full((2,), 1.0 + RANK, np.float32))

    def loss(part: Tensor) -> Tensor:
        x = DTensor.from_local(part, mesh, [Replicate()])
        # Each rank makes something else of the whole tensor, so its gradient is a summand.
        return (x.to_local(grad_placements=[Partial()]) * (RANK + 1)).sum()

    assert mindspore.grad(loss)(local).asnumpy().tolist() == [10.0, 10.0]


def test_what_cannot_be_is_refused() -> None:
    """The errors are those of the other platform."""
    mesh = init_device_mesh((4,), ("tp",))
    with pytest.raises(ValueError, match="names a dim"):
        distribute_tensor(Tensor(whole((2, 2))), mesh, [Shard(2)])
    with pytest.raises(TypeError, match="takes a tensor"):
        distribute_tensor([1.0], mesh, [Replicate()])
    with pytest.raises(TypeError, match="made by distribute_tensor"):
        DTensor(Tensor(whole((2, 2))))
    with pytest.raises(TypeError, match="no distributed tensor of its own"):
        DTensor.from_torch(Tensor(whole((2, 2))))
    with pytest.raises(ValueError, match="pass the right shape="):
        DTensor.from_local(Tensor(whole((3,))), mesh, [Shard(0)], shape=(5,))

"""Collectives of the MindSpore platform on two ranks: values, dtypes and gradients."""
import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint

from hyper_parallel import get_platform
from hyper_parallel.platform.mindspore import collectives

NPROC = 2

platform = get_platform()
RANK, SIZE = platform.get_rank(), platform.get_world_size()
WORLD = platform.create_group([0, 1])
TURNED = platform.create_group([1, 0])
DTYPES = [getattr(mindspore, name) for name in (
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "bool_", "complex64")]


def operand(rank: int, dtype: object, shape: tuple[int, ...] = (4, 3)) -> np.ndarray:
    """What a rank holds, in numbers that every dtype has."""
    values = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + rank) % 4
    return values > 1 if dtype == mindspore.bool_ else values.astype(np.float64)


def tensor(array: np.ndarray, dtype: object) -> Tensor:
    """The array in another dtype."""
    return Tensor(array).astype(dtype)


def check(result: Tensor, expected: np.ndarray, dtype: object) -> None:
    """Compare dtype, shape and every value."""
    assert result.dtype == dtype, (result.dtype, dtype)
    assert tuple(result.shape) == expected.shape, (result.shape, expected.shape)
    assert np.array_equal(collectives.to_numpy(result), np.asarray(expected)), (
        dtype, result, expected)


def test_every_collective_moves_every_dtype() -> None:
    """All-gather, all-to-all, its uneven form, broadcast and scatter, in the group's order."""
    for dtype in DTYPES:
        every = [operand(rank, dtype) for rank in range(SIZE)]
        own = tensor(every[RANK], dtype)
        for group in (WORLD, TURNED):
            place = group.rank()
            joined = [every[rank] for rank in group.ranks]
            for dim in (0, 1, -1):
                check(platform.differentiable_all_gather_concat(own, group, SIZE, dim),
                      np.concatenate(joined, dim), dtype)
            check(platform.differentiable_all_to_all(own, (4, 3), group),
                  np.concatenate([each[2 * place:2 * place + 2] for each in joined]), dtype)
            sent, received = ([1, 3], [1, 1]) if place == 0 else ([1, 3], [3, 3])
            output, work = platform.differentiable_all_to_all_single_async(
                own, sent, received, group)
            work.wait()
            check(output, np.concatenate(
                [each[:1] if place == 0 else each[1:] for each in joined]), dtype)
            for source in range(SIZE):
                target = tensor(every[RANK], dtype)
                assert platform.broadcast(target, source, group) is target
                check(target, joined[source], dtype)
                pieces = [tensor(operand(10 * index + source, dtype, (2,)), dtype)
                          for index in range(SIZE)] if place == source else None
                filled = platform.scatter(tensor(operand(0, dtype, (2,)), dtype), pieces, source,
                                          group)
                check(filled, operand(10 * place + source, dtype, (2,)), dtype)


def test_every_reduction_of_every_dtype() -> None:
    """All-reduce and reduce-scatter against numpy; what a dtype has not is refused on all ranks."""
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}
    for dtype in DTYPES:
        every = [operand(rank, dtype) for rank in range(SIZE)]
        for op, function in combine.items():
            if dtype == mindspore.complex64 and op in ("max", "min"):
                with pytest.raises(TypeError, match="complex numbers have no order"):
                    platform.differentiable_all_reduce(tensor(every[RANK], dtype), op, WORLD)
                continue
            expected = function(*every)
            for group in (WORLD, TURNED):
                check(platform.differentiable_all_reduce(tensor(every[RANK], dtype), op, group),
                      expected, dtype)
                place = group.rank()
                check(platform.differentiable_reduce_scatter(
                    tensor(every[RANK], dtype), SIZE, 0, op, group),
                    expected[2 * place:2 * place + 2], dtype)
        if dtype in (mindspore.float32, mindspore.float64, mindspore.complex64):
            check(platform.differentiable_all_reduce(tensor(every[RANK], dtype), "avg", WORLD),
                  np.add(*every) / 2, dtype)
        elif dtype not in (mindspore.float16, mindspore.bfloat16):
            with pytest.raises(TypeError, match="an average needs a floating"):
                platform.differentiable_all_reduce(tensor(every[RANK], dtype), "avg", WORLD)


def test_shapes_without_dims_or_elements() -> None:
    """A number is reduced, an empty tensor goes through everything."""
    number = platform.differentiable_all_reduce(Tensor(RANK + 1.0), "sum", WORLD)
    assert number.shape == () and number.asnumpy() == 3
    empty = Tensor(np.zeros((0, 3), np.float32))
    assert platform.differentiable_all_reduce(empty, "sum", WORLD).shape == (0, 3)
    assert platform.differentiable_all_gather_concat(empty, WORLD, 2, 0).shape == (0, 3)
    assert platform.differentiable_reduce_scatter(empty, 2, 0, "sum", WORLD).shape == (0, 3)


def test_inputs_stay_as_they_are() -> None:
    """No collective writes to its input, contiguous or not."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for given in (Tensor(array), Tensor(array.T.copy()).T):
        before = given.asnumpy().copy()
        platform.differentiable_all_reduce(given, "sum", WORLD)
        platform.differentiable_reduce_scatter(given, 2, 1, "sum", WORLD)
        platform.differentiable_all_gather_concat(given, WORLD, 2, 1)
        assert np.array_equal(given.asnumpy(), before)


def test_gradients() -> None:
    """Each collective's gradient on each rank, by the rule of its type."""
    x = Tensor(np.arange(8, dtype=np.float32).reshape(4, 2) + RANK + 1)
    weight = Tensor((np.arange(16, dtype=np.float32).reshape(8, 2) + 1))
    other = np.arange(8, dtype=np.float32).reshape(4, 2) + (1 - RANK) + 1
    weights = weight.asnumpy()
    cases = [
        (lambda t: platform.differentiable_all_reduce(t, "sum", WORLD), weights[:4]),
        (lambda t: platform.differentiable_all_reduce(t, "avg", WORLD), weights[:4] / 2),
        (lambda t: platform.differentiable_all_reduce(t, "max", WORLD), weights[:4] * (RANK == 1)),
        (lambda t: platform.differentiable_all_reduce(t, "min", WORLD), weights[:4] * (RANK == 0)),
        (lambda t: platform.differentiable_all_reduce(t, "product", WORLD), weights[:4] * other),
        (lambda t: platform.differentiable_all_gather_concat(t, WORLD, 2, 0),
         weights[4 * RANK:4 * RANK + 4]),
        (lambda t: platform.differentiable_reduce_scatter(t, 2, 0, "sum", WORLD),
         np.concatenate([weights[:2], weights[:2]])),
        (lambda t: platform.differentiable_all_to_all(t, (4, 2), WORLD),
         # Piece j of the gradient of rank i is what rank j has for its piece i.
         np.concatenate([weights[2 * RANK:2 * RANK + 2]] * 2)),
        (lambda t: platform.apply_with_gradient(
            lambda value: value,
            lambda grad: platform.differentiable_all_reduce(grad, "sum", WORLD), t),
         2 * weights[:4]),
    ]
    for function, expected in cases:
        def loss(t: Tensor, function=function) -> Tensor:
            result = function(t)
            return (result * weight[:result.shape[0]]).sum()

        got = mindspore.grad(loss)(x).asnumpy()
        assert np.array_equal(got, expected), (got, expected)


def test_second_derivative_of_an_all_gather() -> None:
    """The gradient's own gradient is gathered again."""
    x = Tensor(np.array([1.0 + RANK], np.float32))

    def cube(t: Tensor) -> Tensor:
        return (platform.differentiable_all_gather_concat(t, WORLD, 2, 0) ** 3).sum()

    second = mindspore.grad(lambda t: mindspore.grad(cube)(t).sum())(x)
    assert np.allclose(second.asnumpy(), 6 * (1.0 + RANK))


def test_groups() -> None:
    """Groups keep their order, are made once, and are MindSpore's own names for them."""
    assert platform.create_group([1, 0]) is TURNED
    assert TURNED.ranks == (1, 0) and TURNED.rank() == 1 - RANK
    assert platform.get_group_rank(TURNED) == 1 - RANK
    assert WORLD.ranks == (0, 1) and platform.get_group_ranks(None) == (0, 1)
    alone = platform.create_group([RANK])
    assert alone.size() == 1 and alone.rank() == 0
    given = Tensor(np.ones(2, np.float32))
    assert np.array_equal(
        platform.differentiable_all_reduce(given, "sum", alone).asnumpy(), [1, 1])
    mint.distributed.all_reduce(given, group=TURNED)
    assert np.array_equal(given.asnumpy(), [2, 2])


def test_what_is_refused() -> None:
    """Wrong arguments raise on every rank, before anything is sent."""
    x = Tensor(np.ones((3, 2), np.float32))
    for call, error, message in (
            (lambda: platform.differentiable_all_reduce(x, "median", WORLD), ValueError,
             "a reduction is one of"),
            (lambda: platform.differentiable_all_gather_concat(x, WORLD, 3, 0), ValueError,
             "must be the size of the group, which is 2"),
            (lambda: platform.differentiable_reduce_scatter(x, 2, 0, "sum", WORLD), ValueError,
             "do not divide its length 3"),
            (lambda: platform.differentiable_all_to_all(x, (3, 2), WORLD), ValueError,
             "do not divide 3 rows"),
            (lambda: platform.broadcast(x, 2, WORLD), ValueError, "0 to 1, got 2"),
            (lambda: platform.create_group([0, 2]), ValueError, "0 to 1, got"),
            (lambda: platform.create_group([1 - RANK]), ValueError, "only members make a group"),
            (lambda: platform.create_group([0, 0]), ValueError, "each rank once"),
            (lambda: platform.create_group(["a"]), TypeError, "list of ranks"),
            (lambda: platform.differentiable_all_to_all_single(x, None, None, WORLD),
             NotImplementedError, "no all-to-all with uneven splits"),
            (lambda: platform.board_of(None), NotImplementedError, "no store"),
            (lambda: platform.watch_native(None), NotImplementedError, "cannot be watched"),
            (lambda: platform.on_gradient(None, None), NotImplementedError,
             "does not tell when gradients are there"),
            (platform.init_process_group, RuntimeError, "exists already"),
    ):
        with pytest.raises(error, match=message):
            call()

"""Operators in all of MindSpore's spellings on two ranks, values and gradients against one process.

Each row is an expression of ``x`` (4, 6), ``y`` (4, 6), ``w`` (8, 6), ``b`` (8), ``v`` (6), of
places ``i`` (4) and of a mask ``m`` (4, 6). It is computed with ``x`` and ``y`` in every layout of
the table, the others replicated, and compared with the same expression of plain tensors, or with
the second expression where MindSpore has no kernel for the first on the CPU.
"""
import builtins
import warnings
from collections.abc import Callable
from types import FunctionType

import mindspore as ms
import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import (
    CommDebugMode, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh,
    register_rule)

NPROC = 2
TIMEOUT = 400

MESH = init_device_mesh((2,), ("tp",))

DIFFERENTIABLE = """
x + y | x + 1.5 | 1 - x | x - y | x * y | 2 * x | x / y | 2 / x | x ** 2 | -x | abs(x) | x @ w.T
w @ x.T | ops.matmul(x, w.T) | mint.matmul(x, w.T) | ops.MatMul(transpose_b=True)(x, w)
F.linear(x, w, b) | ops.dense(x, w, b) | ops.bias_add(x @ w.T, b) | x + v | x * v | plain + x
x.add(y, alpha=2) | ops.add(x, y) | ops.Add()(x, y) | mint.sub(x, y) | mint.div(x, y)
x.sum() | x.sum(0) | x.sum(axis=1, keepdims=True) | ops.ReduceSum(keep_dims=True)(x, 1)
mint.sum(x, (0, 1)) | x.mean() | x.mean(1) | ops.ReduceMean()(x, 0) | mint.mean(x, 1, True)
x.max() | x.amax(1) | x.min(axis=0) | x.reshape(6, 4) | x.reshape((2, 2, 6)) | x.view(-1)
ops.reshape(x, (24,)) | x.flatten() | x.T | x.t() | x.permute(1, 0) | ops.transpose(x, (1, 0))
mint.transpose(x, 0, 1) | x.unsqueeze(1) | ops.expand_dims(x, 0).squeeze(0) | x.broadcast_to((2, 4, 6))
ops.tile(x, (2, 1)) | x[1] | x[:, 1:3] | x[..., None] | x[1, 2] | x.split(2)[1] | x.chunk(2, 1)[0]
ops.split(x, 2)[0] | x.narrow(1, 2, 3) | ops.cat((x, y)) | mint.cat((x, y), 1) | ops.stack((x, y))
ops.stack([x, plain], 1) | ops.addn([x, y]) | x.exp() | x.log() | ops.sqrt(x) | mint.rsqrt(x)
x.square() | ops.tanh(x) | mint.sigmoid(x) | x.clamp(2, 5) | ops.erf(x) | ops.relu(x - 3)
F.relu(x - 3) | nn.ReLU()(x - 3) | ops.gelu(x) | ops.GeLU()(x) | nn.GELU()(x) | F.silu(x) | nn.SiLU()(x)
x.pow(3) | ops.maximum(x, y) | ops.where(m, x, y) | x.where(m, y) | mint.where(m, x, y)
x.masked_fill(m, 0.0) | ops.softmax(x) | F.softmax(x, 0) | nn.Softmax()(x) | ops.log_softmax(x)
ops.cumsum(x, 0) | ops.gather(w, i, 0) * x | ops.gather_elements(x, 1, places)
x.astype(ms.float64) | ops.stop_gradient(x) * y | ops.mse_loss(x, y) | nn.MSELoss()(x, y)
ops.cross_entropy(x, i) | nn.CrossEntropyLoss()(x, i) | ops.nll_loss(x, i)
F.dropout(x, 0.0) | x.logsumexp(1) | ops.prod(x, 1)
"""

SUBSTITUTED = """
F.gelu(x) = ops.gelu(x) | F.log_softmax(x, -1) = ops.log_softmax(x)
F.layer_norm(x, (6,), v, b6) = norm(x, 1e-5) * v + b6 | nn.LayerNorm((6,))(x) = norm(x, 1e-7)
 mint.stack((x, y)) = ops.stack((x, y))
F.embedding(i, w) * x = ops.gather(w, i, 0) * x | F.mse_loss(x, y) = ((x - y) ** 2).mean()
F.l1_loss(x, y) = ops.abs(x - y).mean() | F.cross_entropy(x, i) = ops.cross_entropy(x, i)
mint.zeros_like(x) + y = y + 0 * x | mint.cumsum(x, 0) = ops.cumsum(x, 0) | F.elu(x - 3) = ops.elu(x - 3)
F.leaky_relu(x - 3.1) = ops.leaky_relu(x - 3.1, 0.01) | F.pad(x, (1, 1)) = ops.pad(x, (1, 1))
x.clone() * 2 = x * 2 | mint.index_select(x, 1, i) = ops.gather(x, i, 1) | mint.logsumexp(x, 1) = x.exp().sum(1).log()
"""

PLAIN_VALUES = """
x > 3 | x >= y | x == 3 | x != y | ~m | m & m | x.argmax() | x.argmax(1) | m.any() | m.all(1) | x.isnan()
x.int() | x // 2 | x % 2 | ops.floor(x / 2) | x.max(1)[1] | ops.topk(x, 2)[1] | x.argsort() | x.sort()[0]
ops.zeros_like(x) | x.new_zeros((2,)) | ops.one_hot(i, 6) | x[m] | x.std() | x.var(1) | x.all()
"""


def rows(table: str) -> list[tuple[str, str]]:
    """Expressions, each with what it is compared to."""
    texts = [text.strip() for line in table.strip().split("\n") for text in line.split("|")]
    return [tuple(text.split(" = ")) if " = " in text else (text, text) for text in texts]


def values() -> dict[str, np.ndarray]:
    """The operands; no two elements of ``x`` are equal, so extrema are unique."""
    generator = np.random.default_rng(0)
    x = generator.permutation(24).reshape(4, 6).astype(np.float32) / 4 + 0.5
    return {
        "x": x, "y": generator.permutation(24).reshape(4, 6).astype(np.float32) / 4 + 1,
        "w": generator.standard_normal((8, 6)).astype(np.float32), "plain": x[::-1].copy(),
        "b": np.arange(8, dtype=np.float32), "v": np.arange(6, dtype=np.float32) + 1,
        "b6": np.arange(6, dtype=np.float32), "i": np.array([0, 5, 2, 3], np.int32),
        "m": x > 3, "places": np.array([[0, 1], [2, 3], [5, 4], [1, 0]])}


VALUES = values()


def norm(x: Tensor, eps: float) -> Tensor:
    """What a layer norm does before its affine map; MindSpore's own has no gradient on the CPU."""
    apart = x - x.mean(1, True)
    return apart / ops.sqrt((apart * apart).mean(1, True) + eps)


NAMES = {"ops": ops, "mint": mint, "nn": nn, "F": F, "ms": ms, "norm": norm,
         "__builtins__": builtins}  # which MindSpore looks up


def compute(text: str, operands: dict[str, Tensor]) -> Tensor:
    """The value of an expression."""
    return FunctionType(compile(text, text, "eval"), {**NAMES, **operands})()


def dense_operands() -> dict[str, Tensor]:
    """Plain tensors."""
    return {name: Tensor(array) for name, array in VALUES.items()}


def spread(array: np.ndarray, placement: object) -> DTensor:
    """A DTensor in a layout."""
    start = Replicate() if placement.is_partial() else placement
    return distribute_tensor(Tensor(array), MESH, [start]).redistribute(placements=[placement])


def spread_operands(placement: object) -> dict[str, Tensor]:
    """``x``, ``y`` and ``m`` in a layout, which a mask cannot have if it is Partial."""
    operands = {name: spread(array, placement if name in "xy" else Replicate())
                for name, array in VALUES.items() if name != "plain"}
    if not placement.is_partial():
        operands["m"] = spread(VALUES["m"], placement)
    return {**operands, "plain": Tensor(VALUES["plain"])}


def whole(result: object) -> np.ndarray:
    """What a single process would have."""
    return result.full_tensor().asnumpy() if isinstance(result, DTensor) else result.asnumpy()


def weighted(result: Tensor) -> Tensor:
    """A sum in which every element has another weight."""
    weights = np.arange(1, int(np.prod(result.shape)) + 1, dtype=np.float32).reshape(result.shape)
    return (result * Tensor(weights).astype(result.dtype)).sum()


def loss_and_gradient(text: str, operands: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The expression's value, and the gradient of its weighted sum by ``x``."""
    x = operands["x"]
    kept = []

    def loss(local: Tensor) -> Tensor:
        start = DTensor.from_local(local, x.device_mesh, x.placements, shape=x.shape) \
            if isinstance(x, DTensor) else local
        result = compute(text, {**operands, "x": start})
        kept.append(result)
        total = weighted(result)
        return total.full_tensor() if isinstance(total, DTensor) else total

    gradient = ms.grad(loss)(x.to_local() if isinstance(x, DTensor) else x)
    if isinstance(x, DTensor):
        gradient = DTensor.from_local(gradient, MESH, x.layout.dual.placements, shape=x.shape)
    return whole(kept[0]), whole(gradient)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal but for the order of sums."""
    return one.shape == other.shape and np.allclose(one, other, rtol=2e-5, atol=1e-5,
                                                    equal_nan=True)


def differences(text: str, reference: str, placement: object) -> str:
    """How an expression in a layout differs from its reference in value or gradient, or nothing."""
    value, gradient = loss_and_gradient(reference, dense_operands())
    mine, of_x = loss_and_gradient(text, spread_operands(placement))
    if not close(mine, value):
        return f"{mine} is not {value}"
    return "" if close(of_x, gradient) else f"gradient {of_x} is not {gradient}"


def differences_of_value(text: str, reference: str, placement: object) -> str:
    """As above for an expression that has no gradient."""
    expected = whole(compute(reference, dense_operands()))
    result = compute(text, spread_operands(placement))
    right = isinstance(result, DTensor) and close(whole(result), expected)
    return "" if right else f"{result} is not {expected}"


def check_rows(table: str, placements: tuple, differ: Callable[[str, str, object], str]) -> None:
    """Compare all rows in all layouts; one failure names all that are wrong."""
    warnings.simplefilter("ignore")
    wrong = []
    for text, reference in rows(table):
        for placement in placements:
            try:
                difference = differ(text, reference, placement)
            except (RuntimeError, TypeError, ValueError, AttributeError, KeyError,
                    IndexError) as error:
                difference = f"{type(error).__name__}: {error}"
            if difference:
                wrong.append(f"{text} under {placement}: {difference}")
                print(wrong[-1], flush=True)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)


def test_values_and_gradients() -> None:
    """Every differentiable row in every layout that is not whole on each rank."""
    check_rows(DIFFERENTIABLE, (Shard(0), Shard(1), Partial()), differences)


def test_substitutes() -> None:
    """What MindSpore itself lacks on the CPU."""
    check_rows(SUBSTITUTED, (Shard(0), Partial()), differences)


def test_values() -> None:
    """Rows without a gradient."""
    check_rows(PLAIN_VALUES, (Shard(0), Shard(1), Replicate()), differences_of_value)


def test_what_an_operator_sends() -> None:
    """A product over a sharded dim stays Partial, and pointwise operators send nothing."""
    x, w = spread(VALUES["x"], Shard(1)), spread(VALUES["w"], Shard(1))
    with CommDebugMode() as mode:
        result = F.linear(x, w)
        same = ops.relu(x * 2 + 1)
    assert mode.get_total_counts() == 0
    assert result.placements == (Partial(),) and same.placements == (Shard(1),)


def test_one_all_reduce_for_several_uses() -> None:
    """The gradient of what is replicated is summed once for all uses that vary."""
    wq, wk = (spread(VALUES["w"], Shard(0)) for _ in range(2))

    def loss(local: Tensor) -> Tensor:
        x = DTensor.from_local(local, MESH, [Replicate()]) * 1
        return (F.linear(x, wq) * F.linear(x, wk)).sum().full_tensor()

    with CommDebugMode() as mode:
        gradient = ms.grad(loss)(Tensor(VALUES["x"]))
    dense = Tensor(VALUES["w"])
    expected = ms.grad(lambda x: (F.linear(x, dense) * F.linear(x, dense)).sum())(
        Tensor(VALUES["x"]))
    assert close(gradient.asnumpy(), expected.asnumpy())
    assert mode.get_comm_counts() == {"differentiable_all_reduce": 2}


def test_python_values() -> None:
    """Numbers, truth, lists and iteration, of a Partial and of a shard."""
    s = spread(np.arange(8, dtype=np.float32), Shard(0)).sum()
    assert s.placements == (Partial(),)
    assert s.item() == 28 and float(s) == 28 and int(s) == 28 and bool(s > 20)
    x = spread(VALUES["x"], Shard(0))
    assert x.tolist() == VALUES["x"].tolist() and len(x) == 4
    assert [row.asnumpy().tolist() for row in x] == VALUES["x"].tolist()
    assert np.array_equal(x.asnumpy(), VALUES["x"]) and np.array_equal(np.asarray(x), VALUES["x"])
    assert (x.shape, x.ndim, x.size, x.nbytes) == ((4, 6), 2, 24, 96)
    total = 0.0
    for _ in range(3):
        total += spread(np.ones(4, np.float32), Shard(0)).sum()
    assert isinstance(total, DTensor) and float(total) == 12


def test_in_place() -> None:
    """Written where it lies, also where MindSpore's own operator writes nothing."""
    x = spread(VALUES["x"], Shard(0))
    same = x.add_(spread(VALUES["y"], Replicate()))
    assert same is x and close(whole(x), VALUES["x"] + VALUES["y"])
    x.mul_(2)
    x[1] = 7.0
    expected = (VALUES["x"] + VALUES["y"]) * 2
    expected[1] = 7
    assert close(whole(x), expected)
    ops.assign(x, spread(VALUES["y"], Shard(0)))
    assert close(whole(x), VALUES["y"])


def test_dropout_draws_alike_where_ranks_hold_the_same() -> None:
    """One mask on replicas, whatever the ranks' seeds; two on shards; and a seed repeats it."""
    ms.set_seed(10 + MESH.rank)
    ones = np.ones((8, 64), np.float32)
    for call in (lambda t: ops.dropout(t, 0.5), lambda t: F.dropout(t, 0.5),
                 nn.Dropout(p=0.5).set_train()):
        replicated = call(spread(ones, Replicate()))
        gathered = DTensor.from_local(replicated.to_local(), MESH, [Shard(0)]).full_tensor()
        first, second = gathered.asnumpy()[:8], gathered.asnumpy()[8:]
        assert np.array_equal(first, second) and set(np.unique(first)) == {0, 2}
        sharded = call(spread(ones, Shard(0))).full_tensor().asnumpy()
        assert not np.array_equal(sharded[:4], sharded[4:])
        assert 0.35 < (sharded > 0).mean() < 0.65


def test_random_tensors_draw_alike_where_ranks_hold_the_same() -> None:
    """As dropout does; what cannot be made to agree is refused."""
    ms.set_seed(20 + MESH.rank)
    halves = np.full((8, 64), 0.5, np.float32)
    for call, low, high in (
            (ops.rand_like, 0, 1), (mint.rand_like, 0, 1), (ops.randn_like, -7, 7),
            (mint.randn_like, -7, 7), (lambda t: ops.randint_like(t, 2, 5, dtype=ms.int32), 2, 4),
            (mint.bernoulli, 0, 1), (lambda t: ops.bernoulli(t, 0.5), 0, 1)):
        replicated = call(spread(halves, Replicate()))
        both = DTensor.from_local(replicated.to_local(), MESH, [Shard(0)]).full_tensor().asnumpy()
        sharded = call(spread(halves, Shard(0))).full_tensor().asnumpy()
        assert np.array_equal(both[:8], both[8:]) and not np.array_equal(sharded[:4], sharded[4:])
        for drawn in (both, sharded):
            assert low <= drawn.min() < drawn.max() <= high and abs(
                drawn.mean() - (low + high) / 2) < 0.2, (low, high, drawn.mean())
    for call in (ops.shuffle, ops.rrelu, ops.gumbel_softmax, lambda t: t.clone().uniform_(),
                 lambda t: t.clone().normal_(), lambda t: ops.multinomial(t, 2),
                 lambda t: ops.dropout2d(t.reshape((2, 4, 8, 8)))):
        with pytest.raises(NotImplementedError, match="would draw other numbers on each rank"):
            call(spread(halves, Replicate()))
    assert type(ops.rand_like(Tensor(halves))) is Tensor  # of which MindSpore's own is called


def test_operators_that_gather() -> None:
    """Where MindSpore cannot tell a shape without running; triangles of a batch do not."""
    images = np.arange(4 * 2 * 36, dtype=np.float32).reshape(4, 2, 6, 6) % 7
    kernel = Tensor(np.arange(2 * 2 * 9, dtype=np.float32).reshape(2, 2, 3, 3) % 5)
    gather = {"differentiable_all_gather_concat": 1}
    warnings.simplefilter("ignore")
    for call, sent in ((ops.tril, {}), (lambda t: mint.triu(t, 1), {}),
                       (lambda t: ops.pad(t, (1, 2)), gather),
                       (lambda t: ops.conv2d(t, kernel), gather),
                       (lambda t: ops.max_pool2d(t, 2), gather),
                       (lambda t: ops.avg_pool2d(t, 2, 2), gather),
                       (lambda t: ops.flip(t, (0,)), gather)):
        x = spread(images, Shard(0))
        with CommDebugMode() as mode:
            result = call(x)
        assert mode.get_comm_counts() == sent
        assert close(whole(result), call(Tensor(images)).asnumpy())


def test_an_operator_without_a_rule() -> None:
    """It warns once, runs on gathered operands, and takes a rule by its MindSpore name."""
    x = spread(VALUES["x"], Shard(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [ops.erfinv(x / 100) for _ in range(2)]
        results.append(ops.cdist(x, x))
        ops.cdist(x, x)
    assert [str(one.message).partition(" ")[0] for one in caught] == ["'Cdist'"]
    assert close(whole(results[-1]), ops.cdist(*[Tensor(VALUES["x"])] * 2).asnumpy())
    register_rule("Cdist", "m d, n d -> m n", whole="d")
    other = spread(VALUES["x"], Replicate())
    with CommDebugMode() as mode:
        result = ops.cdist(x, other)
    assert result.placements == (Shard(0),) and mode.get_total_counts() == 0
    register_rule("Cdist", None)


def test_parameters_beside_dtensors() -> None:
    """A plain parameter counts as replicated, its gradient is whole."""
    x = spread(VALUES["x"], Shard(0))
    scale = Parameter(Tensor(VALUES["v"]), name="scale")
    gradient, = ms.grad(lambda: (x * scale).sum().full_tensor(), None, [scale])()
    assert close(gradient.asnumpy(), VALUES["x"].sum(0))


def test_errors() -> None:
    """Tensors of two meshes, and what no operator takes."""
    other = init_device_mesh((1, 2), ("dp", "tp"))
    x = spread(VALUES["x"], Shard(0))
    with pytest.raises(ValueError, match="must be on one mesh"):
        _ = x + distribute_tensor(Tensor(VALUES["x"]), other, [Replicate(), Replicate()])
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        _ = x @ x

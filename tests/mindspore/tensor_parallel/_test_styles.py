"""Styles on MindSpore, four ranks on one axis and two by two, against the model of one process."""
import os
import tempfile
from collections.abc import Callable

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import (
    ColwiseParallel, CommDebugMode, DTensor, PrepareModuleInput, PrepareModuleInputOutput,
    PrepareModuleOutput, Replicate, RowwiseParallel, SequenceParallel, Shard, auto_plan, describe,
    init_device_mesh, loss_parallel, parallelize_module, replicate, unparallelize_module)
from tests.mindspore.weights import fill

NPROC = 4
TIMEOUT = 120

MESHES = [init_device_mesh((4,), ("tp",)), init_device_mesh((2, 2), ("dp", "tp"))["tp"]]
WORDS, HIDDEN, SENTENCES, LENGTH = 16, 8, 2, 4
RNG = np.random.default_rng(0)
IDS = Tensor(RNG.integers(0, WORDS, (SENTENCES, LENGTH)).astype(np.int32))
TARGETS = Tensor(RNG.integers(0, WORDS, (SENTENCES * LENGTH,)).astype(np.int32))
X = Tensor(RNG.standard_normal((SENTENCES, LENGTH, HIDDEN)).astype(np.float32))
BLOCK_PLAN = {"norm": SequenceParallel(), "fc1": ColwiseParallel(input_layouts=Shard(1)),
              "fc2": RowwiseParallel(output_layouts=Shard(1))}


class Lookup(nn.Cell):
    """One table."""

    def __init__(self, **options: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, HIDDEN, **options)

    def construct(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class RMSNorm(nn.Cell):
    """MindSpore's own norms have no gradient on the CPU for plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(HIDDEN, np.float32)), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return x * mint.rsqrt((x * x).mean(-1, True) + 1e-6) * self.weight


class Block(nn.Cell):
    """A norm and two layers, beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.fc1 = nn.Dense(HIDDEN, 4 * HIDDEN)
        self.fc2 = nn.Dense(4 * HIDDEN, HIDDEN)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.fc2(ops.gelu(self.fc1(self.norm(x))))


class Model(nn.Cell):
    """Words to scores of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, HIDDEN)
        self.head = mint.nn.Linear(HIDDEN, WORDS, bias=False)

    def construct(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def full(value: Tensor) -> np.ndarray:
    """The whole of a tensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).asnumpy()


def close(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal up to the order of float32 sums."""
    return one.shape == other.shape and np.allclose(one, other, rtol=5e-5, atol=5e-6)


def weighted(result: Tensor) -> Tensor:
    """A loss in which every element counts otherwise."""
    weights = np.arange(1, int(np.prod(result.shape)) + 1, dtype=np.float32).reshape(result.shape)
    return (result * result * Tensor(weights / 8)).sum()


def cross_entropy(scores: Tensor) -> Tensor:
    """Of all words at once."""
    return ops.cross_entropy(scores.reshape((-1, WORDS)), TARGETS)


def run(model: nn.Cell, given: Tensor, loss: Callable) -> list[np.ndarray]:
    """The output, the loss, and all gradients."""
    kept = []

    def compute(value: Tensor) -> Tensor:
        kept.append(model(value))
        total = loss(kept[0])
        return total.full_tensor() if isinstance(total, DTensor) else total

    position = 0 if given.is_floating_point() else None
    total, gradients = mindspore.value_and_grad(compute, position, model.trainable_params())(given)
    of_input, of_parameters = ([gradients[0]], gradients[1]) if position == 0 else ([], gradients)
    return [full(value) for value in (kept[0], total, *of_input, *of_parameters)]


def compare(make: Callable, plan: dict, given: Tensor, loss: Callable = weighted) -> None:
    """Values and gradients of the parallel model are the dense one's, on both meshes."""
    dense = run(fill(make()), given, loss)
    for mesh in MESHES:
        parallel = run(parallelize_module(fill(make()), mesh, plan), given, loss)
        for number, (one, other) in enumerate(zip(dense, parallel, strict=True)):
            assert close(one, other), (mesh, number, one, other)


def test_styles_of_embeddings() -> None:
    """By words and by features; the row of the padding has no gradient."""
    by_words = {"input_layouts": Replicate()}
    for options in ({}, {"padding_idx": 3}):
        compare(lambda options=options: Lookup(**options),
                {"table": RowwiseParallel(**by_words)}, IDS)
        compare(lambda options=options: Lookup(**options), {"table": ColwiseParallel()}, IDS)
    compare(Lookup, {"table": RowwiseParallel(**by_words, output_layouts=Shard(1))}, IDS)


def test_styles_of_sequences() -> None:
    """``SequenceParallel`` between layers, behind each of the three that prepare a module."""
    whole, part = (Replicate(),), (Shard(1),)
    entry = {"input_layouts": whole, "desired_input_layouts": part}
    leave = {"output_layouts": part, "desired_output_layouts": whole}
    compare(Block, {"": PrepareModuleInput(**entry), **BLOCK_PLAN}, X)
    compare(Block, {"": PrepareModuleInputOutput(**entry, **leave), **BLOCK_PLAN}, X)
    compare(Block, {"": [PrepareModuleInput(**entry), PrepareModuleOutput(**leave)],
                    **BLOCK_PLAN}, X)


def test_styles_of_losses_over_words() -> None:
    """The scores stay spread over the words: what is sent are their extrema and sums."""
    plan = {"table": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    compare(Model, plan, IDS, cross_entropy)
    with loss_parallel():
        compare(Model, plan, IDS, cross_entropy)
    for mesh in MESHES:
        scores = parallelize_module(fill(Model()), mesh, plan)(IDS)
        with CommDebugMode() as mode:
            cross_entropy(scores)
        assert set(mode.get_comm_counts()) == {"differentiable_all_reduce"}, mode.get_comm_counts()


def test_styles_are_described_and_undone() -> None:
    """The model is as before then, and no trace of the plan is left in it."""
    for mesh in MESHES:
        model = fill(Block())
        expected = full(model(X))
        parallelize_module(model, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        table = str(describe(model))
        assert "fc1     ColwiseParallel()" in table and "Shard(dim=1)" in table, table
        assert close(full(model(X)), expected)
        unparallelize_module(model)
        assert not any(isinstance(one, DTensor) for one in model.get_parameters())
        assert type(model.fc1) is nn.Dense and close(full(model(X)), expected)
        plan = auto_plan(fill(Block()), mesh, verbose=False)
        assert list(map(type, plan.values())) == [ColwiseParallel, RowwiseParallel]
        compare(Block, plan, X)


def test_checkpoints() -> None:
    """A file holds whole tensors; it goes into a model of any layout."""
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    saved = parallelize_module(fill(Block()), MESHES[0], plan)
    expected = full(saved(X))
    with tempfile.TemporaryDirectory() as folder:
        for number, what in enumerate((
                saved, saved.parameters_dict(), list(saved.get_parameters()),
                [{"name": one.name, "data": one} for one in saved.get_parameters()])):
            path = os.path.join(folder, f"{number}.ckpt")
            mindspore.save_checkpoint(what, path)
            values = mindspore.load_checkpoint(path)
            assert values["fc1.weight"].shape == (4 * HIDDEN, HIDDEN)
            for model in (Block(), parallelize_module(Block(), MESHES[1], plan)):
                layouts = [getattr(one, "placements", None) for one in model.get_parameters()]
                assert mindspore.load_param_into_net(model, values) == ([], [])
                assert close(full(model(X)), expected)
                assert layouts == [getattr(one, "placements", None)
                                   for one in model.get_parameters()]


def test_what_modules_cannot_be() -> None:
    """``replicate`` says why, and changes nothing."""
    model = fill(Block())
    with pytest.raises(NotImplementedError, match="does not tell when gradients are there"):
        replicate(model, MESHES[0])
    assert not any(isinstance(one, DTensor) for one in model.get_parameters())
    assert type(model) is Block and np.isfinite(full(model(X))).all()

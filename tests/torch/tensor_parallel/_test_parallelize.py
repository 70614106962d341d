"""Parallel modules trained beside their dense twins, on four ranks."""
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import ColwiseParallel, DTensor, Replicate, RowwiseParallel, Shard
from tests.torch.tensor_parallel.training import (
    OPTIMIZERS, collectives, make_mesh, meshes, parallel_twins, random, train)

NPROC = 4
ALL_REDUCE = "differentiable_all_reduce"
ALL_GATHER = "differentiable_all_gather_concat"
REDUCE_SCATTER = "differentiable_reduce_scatter"
MLP_PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
SEQUENCE_PLAN = {
    "embed": RowwiseParallel(output_layouts=Shard(1)),
    "fc1": ColwiseParallel(input_layouts=Shard(1)),
    "fc2": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


class MLP(nn.Module):
    """Two layers; sizes that do not divide give uneven pieces."""

    def __init__(self, hidden: int = 8, inner: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, inner, bias=bias)
        self.fc2 = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Recomputed(MLP):
    """Keeps no activations."""

    def __init__(self, reentrant: bool, split: bool) -> None:
        super().__init__()
        self.reentrant, self.split = reentrant, split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.split:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)
        hidden = checkpoint(self.fc1, x, use_reentrant=self.reentrant)
        return checkpoint(lambda h: self.fc2(F.gelu(h)), hidden, use_reentrant=self.reentrant)


class Lookup(nn.Module):
    """An embedding and a layer behind it."""

    def __init__(self, words: int, padding: int | None, width: int = 6, tied: bool = False
                 ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=padding)
        self.head = nn.Linear(width, words if tied else 4, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


class Block(nn.Module):
    """A residual block between an embedding and a head, with a norm that no plan names."""

    def __init__(self, words: int = 12, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width, bias=False)
        self.fc2 = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Attention(nn.Module):
    """Causal attention of four heads; the heads are a dim of their own, whatever their number."""

    def __init__(self, width: int = 8, head: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
                   for layer in (self.q, self.k, self.v))
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(values.transpose(1, 2).flatten(2))


def make_ids(words: int, length: int = 5) -> torch.Tensor:
    """Word numbers, some of them more than once."""
    return torch.randint(words, (3, length), generator=torch.Generator().manual_seed(2))


def test_mlp_with_every_optimizer() -> None:
    """With and without bias, on four ranks and on two."""
    for mesh, optimizer, bias in itertools.product(meshes(), OPTIMIZERS, (True, False)):
        train(lambda bias=bias: MLP(bias=bias), MLP_PLAN, mesh, [random(3, 8)], optimizer)


def test_uneven_sizes() -> None:
    """Ten features over four ranks, and three, of which one rank has none."""
    for mesh, inner, optimizer in itertools.product(
            meshes(), (10, 3), ("sgd", "adamw foreach", "adamw fused")):
        train(lambda inner=inner: MLP(7, inner), MLP_PLAN, mesh, [random(2, 5, 7)], optimizer)


def test_parts_as_plain_tensors() -> None:
    """Between the layers goes this rank's part alone, also where the parts are uneven."""
    seconds = [RowwiseParallel(),
               ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
               ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())]
    for mesh, inner, second in itertools.product(meshes(), (16, 10), seconds):
        plan = {"fc1": ColwiseParallel(use_local_output=True), "fc2": second}
        model, _ = train(lambda inner=inner: MLP(7, inner), plan, mesh, [random(2, 7)])
        hidden = model.fc1(random(2, 7))
        assert type(hidden) is torch.Tensor
        assert hidden.shape == (2, model.fc1.weight.to_local().shape[0])
        assert torch.equal(model.fc2(input=hidden), model.fc2(hidden))


def test_what_a_caller_gets() -> None:
    """Each use_local_output with a replicated and with a sharded result."""
    mesh = make_mesh()
    cases = [
        (ColwiseParallel(), DTensor), (ColwiseParallel(use_local_output=False), DTensor),
        (ColwiseParallel(use_local_output=True), torch.Tensor),
        (ColwiseParallel(output_layouts=Replicate()), torch.Tensor),
        (RowwiseParallel(input_layouts=Replicate()), torch.Tensor),
        (RowwiseParallel(input_layouts=Replicate(), use_local_output=False), DTensor),
        (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)), DTensor),
        (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0),
                         use_local_output=True), torch.Tensor),
    ]
    for style, kind in cases:
        model, dense = parallel_twins(lambda: nn.Linear(8, 12), style, mesh)
        output, expected = model(random(4, 8)), dense(random(4, 8))
        assert type(output) is kind, style
        placement = style.output_layouts or (
            Shard(-1) if isinstance(style, ColwiseParallel) else Replicate())
        if kind is torch.Tensor and placement.is_shard():
            expected = expected.chunk(4, placement.dim)[mesh.get_local_rank()]
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        elif kind is DTensor:
            assert output.placements == (Shard(1) if placement == Shard(-1) else placement,)
            torch.testing.assert_close(output.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        else:
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_inputs_of_any_form() -> None:
    """One dim, four dims, no rows, a keyword, and a DTensor in each layout."""
    mesh = make_mesh()
    for style in (ColwiseParallel(output_layouts=Replicate()),
                  RowwiseParallel(input_layouts=Replicate())):
        model, dense = parallel_twins(lambda: nn.Linear(8, 12), style, mesh)
        for shape in ((8,), (2, 3, 5, 8), (0, 8)):
            torch.testing.assert_close(model(random(*shape)), dense(random(*shape)),
                                       rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model(input=random(3, 8)), dense(random(3, 8)),
                                   rtol=1e-12, atol=1e-12)
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = DTensor.from_local(random(4, 8), mesh).redistribute(placements=[placement])
            torch.testing.assert_close(model(x), dense(random(4, 8)), rtol=1e-12, atol=1e-12)


def test_embedding() -> None:
    """Split by columns and by rows, one rank without any, with and without padding."""
    plans = [
        {"embed": ColwiseParallel(), "head": RowwiseParallel()},
        {"embed": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())},
        {"embed": RowwiseParallel(), "head": ColwiseParallel()},
        {"embed": ColwiseParallel(output_layouts=Replicate())},
    ]
    for words, padding in ((11, None), (11, 0), (11, 4), (11, -1), (5, 2)):
        for mesh, plan in itertools.product(meshes(), plans):
            train(lambda words=words, padding=padding: Lookup(words, padding), plan, mesh,
                  [make_ids(words)], "adamw foreach")


def test_tied_weights() -> None:
    """An embedding and a head with one weight keep one, also if the plan names only one."""
    plans = [
        {"embed": RowwiseParallel(), "head": ColwiseParallel(output_layouts=Replicate())},
        {"head": ColwiseParallel(output_layouts=Replicate()), "embed": RowwiseParallel()},
        {"embed": RowwiseParallel()},
        {"head": RowwiseParallel(input_layouts=Replicate())},
    ]
    for mesh, plan in itertools.product(meshes(), plans):
        model, _ = train(lambda: Lookup(11, None, tied=True), plan, mesh, [make_ids(11)], "adamw")
        assert model.head.weight is model.embed.weight
        assert isinstance(model.head.weight, DTensor)
        assert len(list(model.parameters())) == 1


def test_sequence_parallel() -> None:
    """Activations split along the sequence; the norm's plain weight gets the whole gradient."""
    for mesh in meshes():
        for length in (8, 5):
            model, dense = train(Block, SEQUENCE_PLAN, mesh, [make_ids(12, length)], "adamw")
            assert type(model.norm.weight) is nn.Parameter
            assert model.fc1.weight.placements == (Shard(0),)
            assert not torch.equal(dense.norm.weight, torch.ones_like(dense.norm.weight))


def test_sequence_parallel_sends_no_more_than_it_must() -> None:
    """All-gathers and reduce-scatters in pairs, and the two gradients of the norm."""
    mesh, batch, length, width, words = make_mesh(), 3, 8, 8, 12
    model, _ = parallel_twins(Block, SEQUENCE_PLAN, mesh)
    with collectives() as forward:
        output = model(make_ids(words, length))
    with collectives() as backward:
        output.sum().backward()
    value = 8 * batch * length
    assert forward == {
        REDUCE_SCATTER: 2, (REDUCE_SCATTER,): 2 * value * width,
        ALL_GATHER: 3, (ALL_GATHER,): (2 * value * width + value * words) // 4}
    assert backward == {
        REDUCE_SCATTER: 2, (REDUCE_SCATTER,): 2 * value * width,
        ALL_GATHER: 2, (ALL_GATHER,): 2 * value * width // 4,
        ALL_REDUCE: 2, (ALL_REDUCE,): 2 * 8 * width}


def test_sequence_parts_as_plain_tensors() -> None:
    """A rank that holds its own rows only: rows in, rows out, and their gradient."""
    mesh = make_mesh()
    plan = {"fc1": ColwiseParallel(input_layouts=Shard(1)),
            "fc2": RowwiseParallel(output_layouts=Shard(1), use_local_output=True)}
    model, dense = parallel_twins(MLP, plan, mesh)
    x = random(2, 8, 8).requires_grad_()
    expected = dense(x)
    expected.square().sum().backward()
    rank = mesh.get_local_rank()
    part = x.detach().chunk(4, 1)[rank].clone().requires_grad_()
    output = model(part)
    assert type(output) is torch.Tensor
    torch.testing.assert_close(output, expected.chunk(4, 1)[rank], rtol=1e-12, atol=1e-12)
    with collectives() as counts:
        output.square().sum().backward()
    torch.testing.assert_close(part.grad, x.grad.chunk(4, 1)[rank], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.fc1.weight.grad.full_tensor(), dense.fc1.weight.grad,
                               rtol=1e-12, atol=1e-12)
    assert {name: count for name, count in counts.items() if isinstance(name, str)} == {
        ALL_GATHER: 1, REDUCE_SCATTER: 1}


def test_attention() -> None:
    """Whole heads on each rank, as DTensors and as this rank's heads alone; two all-reduces."""
    for mesh, local in itertools.product(meshes(), (None, True)):
        plan = {"[qkv]": ColwiseParallel(use_local_output=local), "out": RowwiseParallel()}
        # Not AdamW: the gradient of k's bias is zero but for rounding, which it would blow up.
        model, _ = train(Attention, plan, mesh, [random(2, 5, 8)], "sgd foreach")
        x = DTensor.from_local(random(2, 5, 8).requires_grad_(), mesh)
        with collectives() as counts:
            model(x).sum().backward()
        assert counts == {ALL_REDUCE: 2, (ALL_REDUCE,): 2 * 2 * 5 * 8 * 8}


def test_mlp_has_two_all_reduces() -> None:
    """C1: one forward, one backward; none where the input needs no gradient."""
    for bias in (False, True):
        for needs_gradient in (True, False):
            model, _ = parallel_twins(lambda bias=bias: MLP(bias=bias), MLP_PLAN, make_mesh())
            x = random(3, 8).requires_grad_(needs_gradient)
            with collectives() as forward:
                output = model(x)
            with collectives() as backward:
                output.sum().backward()
            sent = {ALL_REDUCE: 1, (ALL_REDUCE,): 3 * 8 * 8}
            assert forward == sent
            assert backward == (sent if needs_gradient else {})
            with torch.no_grad(), collectives() as counts:
                model(x)
            assert counts == sent


def test_clipping_counts_every_part_once() -> None:
    """The norm over plain parameters and DTensors together is the dense one."""
    for mesh in meshes():
        for foreach in (None, True, False):
            for norm_type in (2.0, 1.0, float("inf")):
                train(Block, SEQUENCE_PLAN, mesh, [make_ids(12)], "adamw", steps=1,
                      clip={"max_norm": 0.1, "norm_type": norm_type, "foreach": foreach})
        train(MLP, MLP_PLAN, mesh, [random(3, 8)], "sgd",
              clip={"max_norm": 0.1, "norm_type": 2.0})


def test_recomputation() -> None:
    """Both forms of checkpoint, around the model and around single layers."""
    for mesh, reentrant, split in itertools.product(meshes(), (True, False), (True, False)):
        train(lambda reentrant=reentrant, split=split: Recomputed(reentrant, split), MLP_PLAN,
              mesh, [random(3, 8)], "adamw")

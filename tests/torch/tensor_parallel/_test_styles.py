"""Styles beyond single layers: norms, boundaries, several in one; on two ranks."""
import copy
import pickle
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import parallel as torch_parallel

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    SequenceParallel,
    Shard,
    describe,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    loss_parallel,
    parallelize_module,
    unparallelize_module,
)
from tests.torch.tensor_parallel.training import (
    assert_alike, assert_near, collectives, parallel_twins, pass_alike, random, seeded)

NPROC = 2
WORDS, WIDTH, HEADS = 12, 8, 4


class RMSNorm(nn.Module):
    """Llama's norm, as its own code has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """The attention of PyTorch's tutorial on tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)
                   for layer in (self.wq, self.wk, self.wv))
        scores = F.softmax(q @ k.transpose(2, 3) + mask, dim=-1)
        return self.wo((scores @ v).transpose(1, 2).reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Embedding, two blocks, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.output(self.norm(x))


HERE = SimpleNamespace(parallel=hyper_parallel, tensor=hyper_parallel)
TORCH = SimpleNamespace(parallel=torch_parallel, tensor=torch_tensor)


def tutorial_plan(library: Any, loss: bool) -> dict[str, Any]:
    """The plan of PyTorch's tutorial, sequence parallelism included, to the letter."""
    names: ModuleType = library.parallel
    place: ModuleType = library.tensor
    whole, parts = place.Replicate(), place.Shard(1)
    return {
        "tok_embeddings": names.RowwiseParallel(input_layouts=whole, output_layouts=parts),
        "layers.*.attention_norm": names.SequenceParallel(),
        "layers.*.attention": names.PrepareModuleInput(
            input_layouts=(parts, None), desired_input_layouts=(whole, None)),
        "layers.*.attention.w[qkv]": names.ColwiseParallel(use_local_output=True),
        "layers.*.attention.wo": names.RowwiseParallel(output_layouts=parts),
        "layers.*.ffn_norm": names.SequenceParallel(),
        "layers.*.feed_forward": names.PrepareModuleInput(
            input_layouts=(parts,), desired_input_layouts=(whole,)),
        "layers.*.feed_forward.w1": names.ColwiseParallel(),
        "layers.*.feed_forward.w2": names.RowwiseParallel(output_layouts=parts),
        "layers.*.feed_forward.w3": names.ColwiseParallel(),
        "norm": names.SequenceParallel(),
        "output": names.ColwiseParallel(
            input_layouts=parts, output_layouts=place.Shard(-1) if loss else whole,
            use_local_output=not loss),
    }


def make_mesh() -> DeviceMesh:
    """Both ranks."""
    return init_device_mesh((2,), ("tp",))


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, causal mask and labels, one of which does not count."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(WORDS, (3, 6), generator=generator) for _ in range(2))
    labels[0, 0] = -100
    return tokens, torch.full((6, 6), -1e9, dtype=torch.float64).triu(1), labels


def loss_of(model: nn.Module) -> torch.Tensor:
    """The cross-entropy on the batch."""
    tokens, mask, labels = batch()
    return F.cross_entropy(model(tokens, mask).flatten(0, 1), labels.flatten())


def test_a_plan_written_for_pytorch() -> None:
    """It runs by changing the import; loss and gradients are those of the dense model and theirs.

    Theirs has the norms' gradients of a part of the sequence as Partial DTensors; ours are whole.
    """
    dense = seeded(Decoder)
    expected = loss_of(dense)
    expected.backward()
    for loss in (False, True):
        model = parallelize_module(copy.deepcopy(dense), make_mesh(), tutorial_plan(HERE, loss))
        model.zero_grad()
        with loss_parallel():
            value = loss_of(model)
            value.backward()
        assert_near(value, expected, "loss")
        assert_alike(model, dense, "after the tutorial's plan")
    theirs = torch_parallel.parallelize_module(
        seeded(Decoder), init_torch_mesh("cpu", (2,)), tutorial_plan(TORCH, False))
    value = loss_of(theirs)
    value.backward()
    assert_near(value.detach(), expected, "loss under PyTorch")
    for (name, mine), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor(), rtol=1e-12,
                                   atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_several_inputs_share_one_gradient() -> None:
    """Three projections of one tensor, plain or not, leaf or not: one all-reduce back."""
    class Projections(nn.Module):
        """Sums three layers."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.q(x) * self.k(x) + self.v(x)).sum()

    model, dense = parallel_twins(Projections, {"*": ColwiseParallel()}, make_mesh())
    for make in (lambda x: x, lambda x: x * 2, lambda x: (x * 2)[1:].tanh()):
        x, y = (random(3, 4).requires_grad_() for _ in range(2))
        for again in range(2):
            with collectives() as counts:
                model(make(x)).backward()
            assert counts["differentiable_all_reduce"] == 1, (counts, again)
            dense(make(y)).backward()
            assert_near(x.grad, y.grad, "gradient of the input")


def test_boundaries() -> None:
    """Inputs and results, by position and by keyword, as parts and as DTensors."""
    class Pair(nn.Module):
        """Two tensors and a number in, two tensors out."""

        seen: tuple = ()

        def forward(self, x: Any, y: Any, scale: float, extra: Any = None) -> tuple[Any, Any]:
            self.seen = (x, y, extra)
            return x * scale, y if extra is None else y + extra

    mesh = make_mesh()
    inputs = {"input_layouts": (Replicate(), None, None),
              "desired_input_layouts": (Shard(0), None, None),
              "input_kwarg_layouts": {"extra": Replicate()},
              "desired_input_kwarg_layouts": {"extra": Shard(1)}}
    outputs = {"output_layouts": (Shard(0), None), "desired_output_layouts": (Replicate(), None)}
    x, y = random(4, 2), random(4, 2, seed=2)
    plans = [PrepareModuleInputOutput(**inputs, **outputs),
             (PrepareModuleInput(**inputs), PrepareModuleOutput(**outputs))]
    for plan in plans:
        model = parallelize_module(Pair(), mesh, {"": plan})
        first, second = model(x, y, 2.0, extra=y)
        assert model.seen[0].placements == (Shard(0),) and model.seen[1] is y
        assert model.seen[2].placements == (Shard(1),)
        assert type(first) is torch.Tensor and torch.equal(first, x * 2)
        assert second.placements == (Shard(1),)
        assert torch.equal(model(x, y, 2.0)[0], x * 2) and model.seen[2] is None
        with pytest.raises(ValueError, match="has input_layouts for 3 tensors, but there are 1"):
            model(x, y=y, scale=1.0)
    local = parallelize_module(Pair(), mesh, PrepareModuleInput(**inputs, use_local_output=True))
    assert torch.equal(local(x, y, 1.0)[0], x.chunk(2)[mesh.get_local_rank()])
    with pytest.raises(TypeError, match="has a layout for a float; a layout is for a tensor"):
        local(1.0, y, 1.0)


def test_sequence_parallel_of_any_norm() -> None:
    """LayerNorm, RMSNorm, dropout without an effect; parts in, parts out; plain where asked."""
    mesh = make_mesh()
    rank = mesh.get_local_rank()
    for make in (lambda: nn.LayerNorm(4), lambda: RMSNorm(4), lambda: nn.Dropout(0.0)):
        for dim, local in ((1, False), (0, True)):
            style = SequenceParallel(sequence_dim=dim, use_local_output=local)
            model, dense = parallel_twins(make, style, mesh)
            whole = random(2, 6, 4).requires_grad_()
            part = whole.detach().chunk(2, dim)[rank].clone().requires_grad_()
            output, expected = model(part), dense(whole)
            assert type(output) is (torch.Tensor if local else DTensor)
            assert_near(output if local else output.full_tensor(),
                        expected.chunk(2, dim)[rank] if local else expected, "output")
            (output.square().sum() if local else (output * output).sum()).backward()
            expected.square().sum().backward()
            assert_near(part.grad, whole.grad.chunk(2, dim)[rank], "gradient of the part")
            assert_alike(model, dense, "norm")


def test_undone() -> None:
    """What was trained in parallel goes on in one piece; a part of the model may be undone."""
    dense = seeded(Decoder)
    model = parallelize_module(copy.deepcopy(dense), make_mesh(), tutorial_plan(HERE, False))
    for twin in (model, dense):
        loss_of(twin).backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        twin.zero_grad()
    spread = copy.deepcopy(model)
    assert unparallelize_module(model) is model
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert all(type(one) is type(other) for one, other in zip(model.modules(), dense.modules()))
    assert not describe(model).changes
    loss_of(model).backward()
    loss_of(dense).backward()
    assert_alike(model, dense, "undone")
    with pytest.raises(RuntimeError, match="nothing in this module was parallelized"):
        unparallelize_module(model)
    parallelize_module(model, make_mesh(), tutorial_plan(HERE, True))
    assert_near(loss_of(model), loss_of(dense), "loss when parallel again")
    again = pickle.loads(pickle.dumps(spread))
    unparallelize_module(again.layers[0].feed_forward)
    assert type(again.layers[0].feed_forward.w1.weight) is nn.Parameter
    assert isinstance(again.layers[1].feed_forward.w1.weight, DTensor)


def test_described() -> None:
    """Which style did what to which parameter, and how much memory is won."""
    model = parallelize_module(seeded(Decoder), make_mesh(), tutorial_plan(HERE, False))
    report = describe(model)
    by_name = {(change.module, change.parameter): change for change in report.changes}
    change = by_name["layers.1.attention.wo", "weight"]
    assert change.style == "RowwiseParallel(output_layouts=Shard(dim=1))"
    assert change.after.placements == (Shard(1),) and change.shape == (8, 8)
    assert (change.bytes_before, change.bytes_after) == (8 * 64, 8 * 32)
    norm = by_name["norm", "weight"]
    assert norm.after.placements == (Replicate(),) and norm.bytes_before == norm.bytes_after
    assert by_name["layers.0.attention", ""].bytes_before == 0
    split = [p for p in model.parameters() if any(one.is_shard() for one in p.placements)]
    assert report.bytes_saved == sum(parameter.nbytes // 2 for parameter in split)
    assert "layers.1.attention.wo" in str(report)
    assert f"saved on this rank: {report.bytes_saved} bytes" in str(report)
    assert len(describe(model.layers[0]).changes) == 11


def test_distributed_module() -> None:
    """A function of the user spreads what it wants, the rest is replicated."""
    class Net(nn.Module):
        """A layer, a norm and a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
            self.norm.register_buffer("offset", torch.arange(6.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x) + self.norm.offset)

    def split(path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if path == "layer":
            for name, value in list(module.named_parameters()):
                module.register_parameter(name, nn.Parameter(distribute_tensor(
                    value, mesh, [Shard(0)] * mesh.ndim)))

    def split_and_fail(path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        split(path, module, mesh)
        if path == "norm":
            raise KeyError(path)

    meshes: list[DeviceMesh] = [make_mesh(), init_device_mesh((1, 2), ("dp", "tp"))]
    for mesh in meshes:
        dense = seeded(Net)
        model = distribute_module(
            copy.deepcopy(dense), mesh, split,
            lambda _, args, mesh: (DTensor.from_local(args[0], mesh),),
            lambda _, output, mesh: output.full_tensor())
        assert model.norm.offset.placements == (Replicate(),) * mesh.ndim
        assert model.layer.weight.placements[-1] == Shard(0)
        pass_alike(model, dense, [random(5, 4)], "distributed")
        with pytest.raises(RuntimeError, match="distributed already"):
            distribute_module(model, mesh)
        assert len(describe(model).changes) == 5
        unparallelize_module(model)
        dense.zero_grad()
        pass_alike(model, dense, [random(5, 4)], "undone")
        failed = seeded(Net)
        before = dict(failed.named_parameters())
        with pytest.raises(KeyError, match="norm"):
            distribute_module(failed, mesh, split_and_fail)
        assert all(before[name] is value for name, value in failed.named_parameters())
        assert type(failed.norm.offset) is torch.Tensor
    whole = distribute_module(seeded(Net), meshes[0])
    assert {value.placements for value in whole.state_dict().values()} == {(Replicate(),)}


def refused(error: type[Exception], message: str, make: Callable[[], nn.Module], plan: Any) -> None:
    """The plan is refused on every rank, and the module is as it was."""
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(error, match=message):
        parallelize_module(model, make_mesh(), plan)
    assert all(before[name] is value for name, value in model.named_parameters())
    assert all(type(one) is type(other) for one, other in zip(model.modules(), make().modules()))
    assert not describe(model).changes


def test_heads_that_do_not_divide() -> None:
    """Three heads on two ranks, however the model counts them."""
    class Three(nn.Module):
        """Three heads of four."""

        def __init__(self, **known: int) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 10)
            self.q = nn.Linear(12, 12)
            vars(self).update(known)

    for known in ({"n_heads": 3}, {"num_heads": 3, "head_dim": 4}, {"attention_head_size": 4}):
        refused(ValueError, "'q' has 3 heads of 4 features, which 2 ranks do not divide",
                lambda known=known: Three(**known),
                {"fc": ColwiseParallel(), "q": ColwiseParallel()})
        parallelize_module(Three(**known), make_mesh(),
                           {"q": ColwiseParallel(output_layouts=Replicate())})
    parallelize_module(Three(), make_mesh(), {"q": ColwiseParallel()})
    parallelize_module(Three(n_heads=6), make_mesh(), {"q": ColwiseParallel()})


def test_styles_that_do_not_go_together() -> None:
    """Two that spread one layer, and tied weights in two styles."""
    refused(ValueError, "'w1' has two styles that spread its parameters", FeedForward,
            {"w1": [ColwiseParallel(), SequenceParallel()]})

    def tied() -> nn.Module:
        model = Decoder()
        model.output.weight = model.tok_embeddings.weight
        return model

    refused(ValueError, "'tok_embeddings.weight' and 'output.weight' are one shared parameter",
            tied, {"layers.0.attention.wq": ColwiseParallel(),
                   "tok_embeddings": ColwiseParallel(), "output": ColwiseParallel()})
    assert parallelize_module(FeedForward(), make_mesh(), {"w1": None}).w1.weight.shape == (16, 8)
    with pytest.raises(KeyError, match="cp"):
        parallelize_module(FeedForward(), make_mesh()["cp"], {"w1": ColwiseParallel()})

"""Replicated modules beside PyTorch's DistributedDataParallel, on two ranks."""
import copy
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel, CommDebugMode, DeviceMesh, DTensor, Partial, RowwiseParallel, Shard,
    get_platform, init_device_mesh, parallelize_module, replicate, unparallelize_module,
    unreplicate)
from tests.torch.tensor_parallel.training import assert_near, random, seeded

NPROC = 2
TINY = 1e-4  # megabytes: a bucket for about every parameter


def make_mesh() -> DeviceMesh:
    """Both ranks."""
    return init_device_mesh((2,), ("dp",))


class Net(nn.Module):
    """Some layers, a weight that is used twice, one that only some inputs use, one that none does.

    In single precision, so that a gradient that is added up in another order shows.
    """

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(5)
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.reentrant = reentrant

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """What a checkpoint may run again."""
        return self.second(torch.tanh(self.first(x)) + self.tied(x))

    def forward(self, x: torch.Tensor, extra: bool = False) -> dict[str, torch.Tensor]:
        x = self.norm(x) * self.frozen
        for _ in range(2):
            x = x + (self.body(x) if self.reentrant is None else
                     checkpoint(self.body, x, use_reentrant=self.reentrant))
        return {"out": self.sometimes(x) if extra else x}


def make_net(reentrant: bool | None = None, seed: int = 0) -> Net:
    """A model that depends on the seed alone."""
    return seeded(lambda: Net(reentrant), seed).float()


def rows(seed: int = 1, count: int = 6) -> torch.Tensor:
    """This rank's rows."""
    return random(2 * count, 5, seed=seed).float().chunk(2)[dist.get_rank()].clone()


def loss_of(model: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """A mean over the rows."""
    return model(x, **options)["out"].square().mean()


def assert_equal(model: nn.Module, other: nn.Module, what: str) -> None:
    """Parameters, buffers and gradients are equal to the bit."""
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), f"{name} {what}"
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), f"gradient of {name} {what}"
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), f"grad of {name} {what}"


def twins(reentrant: bool | None = None, size: float = TINY, **options: Any
          ) -> tuple[nn.Module, DistributedDataParallel]:
    """Ours and theirs; on the second rank both begin with other values."""
    model = make_net(reentrant, seed=dist.get_rank())
    theirs = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=size, **options)
    return replicate(model, make_mesh(), bucket_cap_mb=size), theirs


def test_as_distributed_data_parallel() -> None:
    """To the bit: other values at first, unused and shared parameters, buffers, three steps."""
    for size in (TINY, 25):
        model, theirs = twins(size=size, find_unused_parameters=True)
        assert_equal(model, theirs.module, "at first")
        steppers = [torch.optim.AdamW(twin.parameters(), lr=0.1) for twin in (model, theirs)]
        for step in range(3):
            for twin in (model, theirs):
                loss_of(twin, rows(step), extra=step == 1 and dist.get_rank() == 1).backward()
            assert_equal(model, theirs.module, f"in step {step}")
            assert model.never.weight.grad is None
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad(set_to_none=step != 1)
        assert_equal(model, theirs.module, "at last")


def test_accumulation() -> None:
    """Inside no_sync nothing is sent; the pass behind it reduces what has come together."""
    model, theirs = twins(find_unused_parameters=True)
    for round_ in range(2):
        for twin in (model, theirs):
            with CommDebugMode() as mode, twin.no_sync():
                for step in range(2):
                    loss_of(twin, rows(step), extra=dist.get_rank() == 0).backward()
            assert mode.get_total_counts() == 0
            assert twin is theirs or not same_on_both(model.second.weight.grad)
            loss_of(twin, rows(7)).backward()
        # To the bit at first; a second round adds to what is reduced already.
        assert round_ or torch.equal(model.first.weight.grad, theirs.module.first.weight.grad)
    assert same_on_both(model.second.weight.grad)
    assert_near_all(model, theirs.module)
    with pytest.raises(ZeroDivisionError), model.no_sync():
        loss_of(model, rows()).backward()
        _ = 1 / 0
    model.zero_grad()
    loss_of(model, rows()).backward()
    assert same_on_both(model.second.weight.grad)


def assert_near_all(model: nn.Module, other: nn.Module) -> None:
    """All gradients agree but for rounding."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def same_on_both(value: torch.Tensor) -> bool:
    """Whether the ranks hold the same."""
    both = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(both, value.contiguous())
    return torch.equal(*both)


def test_checkpoints_and_several_passes() -> None:
    """Both kinds of checkpoint; two forwards before one backward; a graph that is used twice."""
    model, theirs = twins(find_unused_parameters=True)
    loss_of(theirs, rows()).backward()
    for reentrant in (False, True):
        other = replicate(make_net(reentrant), make_mesh(), bucket_cap_mb=TINY)
        loss_of(other, rows().requires_grad_()).backward()
        assert_near_all(other, theirs.module)
        assert all(parameter.grad is None or same_on_both(parameter.grad)
                   for parameter in other.parameters())
    whole = make_net()
    whole.norm.eval()
    model.norm.eval()
    both = sum(loss_of(model, rows(seed)) for seed in (1, 2))
    both.backward()
    sum(loss_of(whole, random(12, 5, seed=seed).float()) for seed in (1, 2)).backward()
    assert_near_all(model, whole)
    model.zero_grad()
    loss = loss_of(model, rows())
    for _ in range(2):
        loss.backward(retain_graph=True)
    twice = copy.deepcopy(whole)
    twice.zero_grad()
    (2 * loss_of(twice, random(12, 5).float())).backward()
    assert_near_all(model, twice)


def test_gradients_that_come_late() -> None:
    """Reentrant checkpoints of one layer: its gradient grows after its bucket was sent."""
    class Twice(nn.Module):
        """A layer that is run, and differentiated, twice."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    dense = seeded(Twice)
    model = replicate(copy.deepcopy(dense), make_mesh(), bucket_cap_mb=TINY)
    whole = random(6, 4).requires_grad_()
    model(whole.detach().chunk(2)[dist.get_rank()].clone().requires_grad_()).square().mean() \
        .backward()
    dense(whole).square().mean().backward()
    for mine, theirs in zip(model.parameters(), dense.parameters()):
        assert_near(mine.grad, theirs.grad, "gradient that came late")


def test_reduced_while_the_backward_runs() -> None:
    """A bucket is sent before the gradients of the layers in front of it are there."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4))))
    replicate(model, make_mesh(), bucket_cap_mb=2 * 40 * 40 * 8 / 2 ** 20)
    order: list[str] = []
    for number, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: order.append(f"gradient {number}"))
    cls = type(get_platform())
    original = cls.__dict__["all_reduce_async"]

    def noted(*args: Any) -> Any:
        order.append("sent")
        return original.__func__(*args)

    cls.all_reduce_async = staticmethod(noted)
    try:
        model(random(3, 40)).sum().backward()
    finally:
        cls.all_reduce_async = original
    assert order.index("sent") < order.index("gradient 1") and order.count("sent") == 2


def test_counted() -> None:
    """One all-reduce a bucket: the gradients and one number for each parameter."""
    model = replicate(seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))),
                      make_mesh(), bucket_cap_mb=16 * 9 * 8 / 2 ** 20)
    with CommDebugMode(module=model) as mode:
        model(random(3, 8)).sum().backward()
    assert mode.get_comm_counts() == {"all_reduce_async": 2}
    table = mode.generate_comm_debug_tracing_table(noise_level=2)
    for numbers in (4 + 64 + 16 + 3, 128 + 1):
        assert f"input_shape=({numbers},)" in table, table


@contextmanager
def failing_at(tensor: torch.Tensor) -> Iterator[None]:
    """The backward pass raises where it reaches a tensor."""
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("no gradient here")

    handle = tensor.register_hook(fail)
    try:
        with pytest.raises(ArithmeticError, match="no gradient here"):
            yield
    finally:
        handle.remove()


def test_a_backward_that_fails() -> None:
    """The next pass is whole, with a forward between and without one; nothing hangs."""
    model, theirs = twins(find_unused_parameters=True)
    loss_of(theirs, rows()).backward()
    for again in (False, True):
        loss = loss_of(model, rows())
        with failing_at(model.first.weight):
            loss.backward(retain_graph=True)
        model.zero_grad()
        (loss if again else loss_of(model, rows())).backward()
        assert_near_all(model, theirs.module)
        model.zero_grad()
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 4))
    loss_of(model, rows()).backward()
    assert_near_all(model, theirs.module)


def test_batch_as_dtensor() -> None:
    """The whole batch in, global outputs out, and the gradients of the loss over all rows."""
    mesh = make_mesh()
    dense = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    model = replicate(copy.deepcopy(dense), mesh)

    def spread(value: torch.Tensor) -> DTensor:
        return DTensor.from_local(value.detach().clone(), mesh).redistribute(
            placements=[Shard(0)]).detach().requires_grad_(value.requires_grad)

    x, y = random(6, 4).requires_grad_(), random(6, 2, seed=2)
    batch = spread(x)
    output = model(batch)
    assert output.placements == (Shard(0),) and output.shape == (6, 2)
    for reduction in ("mean", "sum"):
        loss = nn.functional.mse_loss(model(batch), spread(y), reduction=reduction)
        expected = nn.functional.mse_loss(dense(x), y, reduction=reduction)
        assert_near(loss, expected, "loss")
        loss.backward()
        expected.backward()
        assert_near(batch.grad, x.grad, "gradient of the batch")
        for mine, other in zip(model.parameters(), dense.parameters()):
            assert_near(mine.grad, other.grad, "gradient")

    class WithLoss(nn.Module):
        """Gives the mean over its rows."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.body(x) - y).square().mean()

    dense = seeded(WithLoss)
    model = replicate(copy.deepcopy(dense), mesh)
    loss = model(spread(x), y=spread(y))
    assert loss.placements == (Partial("avg"),)
    assert_near(loss.full_tensor(), dense(x, y), "loss within")
    loss.backward()
    dense(x, y).backward()
    for mine, other in zip(model.parameters(), dense.parameters()):
        assert_near(mine.grad, other.grad, "gradient from the loss within")
    with pytest.raises(ValueError, match="batch of 5 rows does not divide by the 2 ranks of 'dp'"):
        model(spread(random(5, 4)), y=spread(random(5, 2)))
    with pytest.raises(ValueError, match=r"is Shard\(0\) or Replicate\(\) on 'dp', but a tensor of "
                                         r"shape \(4, 4\) is Shard\(dim=1\)"):
        model(distribute(random(4, 4), mesh), y=spread(random(4, 2)))


def distribute(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Split along the features."""
    return DTensor.from_local(value, mesh).redistribute(placements=[Shard(1)])


def test_copies_are_ordinary() -> None:
    """A copy sends nothing, and may be replicated itself."""
    model = replicate(make_net(), make_mesh())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with CommDebugMode() as mode:
            loss_of(other, rows()).backward()
            with other.no_sync():
                loss_of(other, rows()).backward()
        assert mode.get_total_counts() == 0
        other.zero_grad()
        loss_of(replicate(other, make_mesh()), rows()).backward()
        assert same_on_both(other.second.weight.grad)


def refused(error: type[Exception], message: str, make: Callable[[], Any]) -> None:
    """Raises on both ranks, soon."""
    began = time.monotonic()
    with pytest.raises(error, match=message):
        make()
    assert time.monotonic() - began < 20


def test_bad_input() -> None:
    """Nothing hangs, and the module is as it was."""
    mesh, model = make_mesh(), make_net()
    kind = type(model)
    refused(TypeError, "takes a module, but got a Tensor", lambda: replicate(torch.ones(1), mesh))
    refused(TypeError, "needs a DeviceMesh", lambda: replicate(model, "dp"))
    refused(ValueError, r"pass one, as in mesh\['dp'\]",
            lambda: replicate(model, init_device_mesh((2, 1), ("dp", "tp"))))
    refused(ValueError, "bucket_cap_mb is positive, but got 0",
            lambda: replicate(model, mesh, bucket_cap_mb=0))
    refused(ValueError, "the ranks of 'dp' hold different modules",
            lambda: replicate(nn.Linear(2, 3 + dist.get_rank()), mesh))
    assert type(model) is kind and not model.first.weight._post_accumulate_grad_hooks
    replicate(model, mesh)
    for plan in ({"first": ColwiseParallel()}, {"second": RowwiseParallel()}):
        refused(RuntimeError, "the parameters of '(first|second)' are replicated",
                lambda plan=plan: parallelize_module(model, mesh, plan))
    refused(RuntimeError, "the module '' is replicated already", lambda: replicate(model, mesh))
    refused(RuntimeError, "the module 'inner' is replicated already",
            lambda: replicate(nn.ModuleDict({"inner": model}), mesh))


def test_ended() -> None:
    """Nothing is sent any more; then the module may be split, replicated and made whole again."""
    mesh = init_device_mesh((2, 1), ("dp", "tp"))
    model = replicate(make_net(), mesh["dp"])
    assert unreplicate(model) is model and not hasattr(model, "no_sync")
    with CommDebugMode() as mode:
        loss_of(model, rows()).backward()
    assert mode.get_total_counts() == 0
    refused(RuntimeError, "is not replicated itself", lambda: unreplicate(model))
    replicate(parallelize_module(model, mesh["tp"], {"second": RowwiseParallel()}), mesh["dp"])
    refused(RuntimeError, "the parameters of 'second' are replicated",
            lambda: unparallelize_module(model))
    model.zero_grad()
    loss_of(model, rows()).backward()
    assert same_on_both(model.second.weight.grad.to_local())
    unparallelize_module(unreplicate(model))
    assert type(model.second.weight) is nn.Parameter


def test_sparse_gradients() -> None:
    """They are averaged as whole ones."""
    model = replicate(nn.Embedding(5, 3, sparse=True), make_mesh())
    model(torch.tensor([dist.get_rank(), 4])).sum().backward()
    assert model.weight.grad.tolist() == [[one] * 3 for one in (0.5, 0.5, 0.0, 0.0, 1.0)]

"""What is called Replicate is compared between four ranks."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    ColwiseParallel, CommDebugMode, DeviceMesh, DTensor, Partial, Replicate, RowwiseParallel, Shard,
    check_replicas, distribute_tensor, init_device_mesh, parallelize_module)
from hyper_parallel.core.dtensor.debug import ReplicaMismatchError
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer

NPROC = 4
SOON = 2.0


def line() -> DeviceMesh:
    """Four ranks in a row."""
    return init_device_mesh((4,), ("tp",))


def plane() -> DeviceMesh:
    """Two rows of two."""
    return init_device_mesh((2, 2), ("dp", "tp"))


def on_rank(rank: int, value: torch.Tensor, other: float) -> torch.Tensor:
    """``value``, changed in its first element on one rank."""
    value = value.clone()
    if dist.get_rank() == rank:
        value.view(-1)[0] = other
    return value


def message_of(action: Callable[[], Any]) -> str:
    """What every rank is told, which is the same."""
    with pytest.raises(ReplicaMismatchError) as caught:
        action()
    messages = [""] * 4
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1, messages
    return messages[0]


def mlp() -> nn.Sequential:
    """Two split layers with a plain norm between them, the same values on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    return parallelize_module(model, plane()["tp"], {"0": ColwiseParallel(
        output_layouts=Replicate(), use_local_output=False), "2": RowwiseParallel(
            input_layouts=Replicate())})


def test_equal_values_pass_in_every_form_and_nothing_is_sent() -> None:
    value = torch.arange(12.0).view(3, 4)
    tensors = {
        "replicated": distribute_tensor(value, plane()),
        "half": distribute_tensor(value, plane(), [Replicate(), Shard(1)]),
        "uneven": distribute_tensor(value, line(), [Shard(0)]),
        "summand": DTensor.from_local(value * dist.get_rank(), line(), [Partial()]),
        "summand of rows": DTensor.from_local(value * plane().get_coordinate()[1], plane(),
                                              [Replicate(), Partial()]),
        "plain": value, "bool": value > 3, "half float": value.bfloat16(), "none": value[:0],
        "number": torch.tensor(3), "nan": torch.full((2,), torch.nan), "complex": value * 1j,
        "meta": torch.empty(2, device="meta"), "list": [value, (value, 3, None)], "words": "any",
    }
    model = mlp()
    with CommDebugMode(trace_native=True) as mode:
        check_replicas(tensors)
        check_replicas(model)
        check_replicas({"model": model.state_dict(), "layer": nn.BatchNorm1d(3)})
        for tensor in tensors.values():
            if isinstance(tensor, torch.Tensor):
                check_replicas(tensor)
    assert mode.get_total_counts() == 0
    check_replicas([], mesh=line())


def test_the_tensor_the_axis_and_the_ranks_are_named() -> None:
    value = torch.arange(12.0).view(3, 4)
    wrong = DTensor.from_local(on_rank(2, value, 9.0), plane(), [Replicate(), Replicate()])
    right = distribute_tensor(value, plane())
    text = message_of(lambda: check_replicas({"a": right, "layers": [right, {"w": wrong}]}))
    assert "layers.1.w (torch.float32 (3, 4), Layout(dp=Replicate(), tp=Replicate()))" in text
    assert "layers.0" not in text and "a (" not in text
    assert "along axis 'dp'" in text and "along axis 'tp'" in text
    assert "rank 0: norm=22.4944 bits=" in text and "rank 2: norm=24.2281 bits=" in text
    assert "rank 3: norm=22.4944 bits=" in text and "Give all ranks the same value" in text
    # Along the sharded axis the values differ rightly; along the other one only ranks 1 and 3.
    shards = DTensor.from_local(on_rank(3, value[:, :2] + plane().get_coordinate()[1], -1.0),
                                plane(), [Replicate(), Shard(1)])
    text = message_of(lambda: check_replicas(shards))
    assert "the tensor (torch.float32 (3, 4), Layout(dp=Replicate(), tp=Shard(dim=1)))" in text
    assert "along axis 'dp'" in text and "axis 'tp'" not in text
    assert "rank 1: " in text and "rank 3: " in text and "rank 0" not in text
    line_wrong = DTensor.from_local(on_rank(1, value, torch.nan), line())
    text = message_of(lambda: check_replicas(line_wrong))
    assert "ranks 0, 2, 3: norm=22.4944" in text and "rank 1: norm=nan" in text


def test_every_bit_counts() -> None:
    for value, other in ((torch.zeros(4), -0.0), (torch.zeros(4, dtype=torch.bool), True),
                         (torch.ones(5, dtype=torch.int64), 2 ** 40),
                         (torch.ones(3, dtype=torch.bfloat16), 1.0078125)):
        text = message_of(lambda v=value, o=other: check_replicas(
            DTensor.from_local(on_rank(3, v, o), line())))
        assert "ranks 0, 1, 2: " in text and "rank 3: " in text
    swapped = torch.tensor([1.0, 2.0, 3.0, 4.0])
    swapped = swapped.flip(0) if dist.get_rank() == 0 else swapped
    assert "rank 0: " in message_of(lambda: check_replicas(swapped))


def test_a_plain_tensor_beside_dtensors() -> None:
    plain = on_rank(2, torch.ones(4), 0.0)
    text = message_of(lambda: check_replicas(
        {"norm.weight": plain, "w": distribute_tensor(torch.ones(4), line(), [Shard(0)])}))
    assert "norm.weight (torch.float32 (4,), a plain tensor) along axis 'tp'" in text
    assert "rank 2" in text and "  w (" not in text
    assert "along axis 'rank'" in message_of(lambda: check_replicas([plain]))
    # On the mesh of two ranks each pair compares by itself.
    shard = distribute_tensor(torch.ones(4), plane()["tp"], [Shard(0)])
    if dist.get_rank() < 2:
        check_replicas({"p": plain, "w": shard})
    else:
        with pytest.raises(ReplicaMismatchError, match="p .* axis 'tp':\n    rank 2: .*\n.*rank 3"):
            check_replicas({"p": plain, "w": shard})
    model = mlp()
    with torch.no_grad():
        if dist.get_rank() == 1:
            model[1].weight[3] = 7.0
    text = message_of(lambda: check_replicas(model, mesh=plane()))
    assert "  1.weight (" in text and "axis 'dp'" in text and "axis 'tp'" in text


def test_ranks_that_check_other_things() -> None:
    rank = dist.get_rank()
    one = distribute_tensor(torch.ones(4), line())
    shard = distribute_tensor(torch.ones(4), line(), [Shard(0)])
    text = message_of(lambda: check_replicas({"a": one, **({"b": one} if rank else {})}))
    assert "do not check the same tensors" in text and "  b:" in text and "  a:" not in text
    assert "rank 0: has no such tensor" in text
    text = message_of(lambda: check_replicas({"a": shard if rank == 3 else one}))
    assert "rank 3: torch.float32 (4,), Layout(tp=Shard(dim=0))" in text
    text = message_of(lambda: check_replicas(torch.ones(4 + (rank == 1))))
    assert "rank 1: torch.float32 (5,)" in text
    check_replicas(one)  # and all is well afterwards


def test_a_rank_that_does_not_come() -> None:
    began = time.monotonic()
    if dist.get_rank() != 1:
        with pytest.raises(ReplicaMismatchError, match="rank 1: did not come within 2 s"):
            check_replicas(torch.ones(2), timeout=SOON)
    else:
        time.sleep(2 * SOON)
        with pytest.raises(ReplicaMismatchError, match="did not come"):
            check_replicas(torch.ones(2), timeout=SOON)
    assert time.monotonic() - began < 5 * SOON
    dist.barrier()
    check_replicas(torch.ones(2), timeout=10 * SOON)


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a tensor, a module, or a dict"):
        check_replicas("model")
    with pytest.raises(TypeError, match="timeout is a number"):
        check_replicas(torch.ones(1), timeout="soon")
    for timeout in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="above 0 and finite"):
            check_replicas(torch.ones(1), timeout=timeout)
    with pytest.raises(TypeError, match="mesh is a DeviceMesh"):
        check_replicas(torch.ones(1), mesh=(2, 2))
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=f"rank {rank} is not in"):
        check_replicas(torch.ones(1), mesh=DeviceMesh([(rank + 1) % 4, (rank + 2) % 4], ("x",)))
    with pytest.raises(ValueError, match="pass mesh="):
        check_replicas([distribute_tensor(torch.ones(4), plane()["dp"]),
                        distribute_tensor(torch.ones(4), plane()["tp"])])


def run(model: nn.Module, inputs: torch.Tensor, **options: Any) -> CommDebugMode:
    """A training step in a mode that checks."""
    with CommDebugMode(module=model, check_replicas=True, **options) as mode:
        loss = model(inputs).pow(2).sum()
        loss.backward()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    return mode


def test_a_step_that_is_right_passes_and_is_not_changed() -> None:
    checked, plain = mlp(), mlp()
    mode = run(checked, torch.ones(4, 6))
    with CommDebugMode(module=plain) as other:
        plain(torch.ones(4, 6)).pow(2).sum().backward()
        torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    assert mode.get_comm_counts() == other.get_comm_counts() != {}
    for one, two in zip(checked.parameters(), plain.parameters()):
        assert torch.equal(one.to_local(), two.to_local()) if isinstance(one, DTensor) else \
            torch.equal(one, two)
    with CommDebugMode(check_replicas=True):  # memory that nobody has written yet
        empty = DTensor.from_local(on_rank(1, torch.zeros(4), 5.0), line())
        torch.zeros_like(empty)
        empty.fill_(1.0)
        assert empty.sum().item() == 4.0


def test_the_operator_and_the_argument_are_named() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].bias.to_local().copy_(on_rank(1, model[2].bias.to_local(), 7.0))
    # The layer lies on a mesh of two ranks, so the other two have nothing to complain of.
    if dist.get_rank() < 2:
        with pytest.raises(ReplicaMismatchError) as caught:
            run(model, torch.ones(4, 6), verify_timeout=5.0)
        text = str(caught.value)
        assert "operator 'linear'" in text and "parameter '2.bias'" in text
        assert "along axis 'tp':\n    rank 0: " in text and "\n    rank 1: " in text
    else:
        run(model, torch.ones(4, 6))
    assert _debug_mode_observer.get() is None
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    run(mlp(), torch.ones(4, 6))


def test_a_plain_argument_and_a_list_are_named() -> None:
    x = distribute_tensor(torch.ones(4, 2), line(), [Shard(0)])

    def multiply() -> None:
        with CommDebugMode(check_replicas=True) as mode:
            try:
                torch.mul(x, on_rank(2, torch.ones(2), 3.0))
            finally:
                assert mode._tree.innermost is None

    text = message_of(multiply)
    assert "operator 'mul'" in text and "  argument 1 (torch.float32 (2,), a plain tensor)" in text

    def join() -> None:
        with CommDebugMode(check_replicas=True):
            torch.cat([x, on_rank(0, torch.ones(1, 2), 3.0)])

    assert "  argument 0[1] (" in message_of(join)


def test_a_rank_that_fails_on_its_own_holds_nobody_up() -> None:
    x = distribute_tensor(torch.ones(4), line())
    began = time.monotonic()
    with pytest.raises((ReplicaMismatchError, KeyError)) as caught:
        with CommDebugMode(check_replicas=True):
            torch.add(x, x)
            if dist.get_rank() == 3:
                raise KeyError("mine")
            torch.mul(x, x)
    assert time.monotonic() - began < 10.0
    if dist.get_rank() != 3:
        assert "rank 3: left the block with KeyError: 'mine'" in str(caught.value)
    dist.barrier()
    with CommDebugMode(check_replicas=True):
        assert (x + x).sum().item() == 8.0


def test_ranks_that_run_other_operators() -> None:
    x = distribute_tensor(torch.ones(4), line())

    def work() -> None:
        with CommDebugMode(check_replicas=True):
            (torch.exp if dist.get_rank() == 0 else torch.log)(x)

    text = message_of(work)
    assert "the ranks do not do the same" in text
    assert "ranks 1, 2, 3: operator 'log'" in text and "rank 0: operator 'exp'" in text

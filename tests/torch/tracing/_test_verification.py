"""``verify="online"``: the ranks agree before they send, three ranks."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor import tensor_redistribution
from hyper_parallel.core.dtensor.debug import CollectiveMismatchError
from hyper_parallel.core.dtensor.debug._collective_tracer import COLLECTIVE_METHODS, OTHER_METHODS
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer

NPROC = 3
TIMEOUT = 60
SOON = 2.0  # seconds that a rank waits for one that does not come

METHODS = (*COLLECTIVE_METHODS, *OTHER_METHODS)


def originals() -> dict[str, Any]:
    """The platform's methods as they lie in its class."""
    cls = type(get_platform())
    return {name: cls.__dict__[name] for name in METHODS}


BEFORE = originals()


def assert_restored() -> None:
    """Nothing of a mode is left."""
    assert all(originals()[name] is BEFORE[name] for name in METHODS)
    assert _debug_mode_observer.get() is None
    assert tensor_redistribution._redistribute_observer is None
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def in_step() -> None:
    """Every rank is here, which a store says and no collective."""
    store = dist.distributed_c10d._get_default_store()
    in_step.number = getattr(in_step, "number", 0) + 1
    store.set(f"step/{in_step.number}/{dist.get_rank()}", "")
    store.wait([f"step/{in_step.number}/{rank}" for rank in range(dist.get_world_size())])


def keys_left() -> int:
    """Number of keys in the store."""
    return dist.distributed_c10d._get_default_store().num_keys()


def mismatch(run: Callable[[], Any], timeout: float = 20.0, **options: Any) -> str:
    """The message of a block that must fail on this rank, and what became of it."""
    in_step()
    began = time.monotonic()
    with pytest.raises(CollectiveMismatchError) as caught:
        with CommDebugMode(verify="online", verify_timeout=timeout, **options):
            run()
    assert time.monotonic() - began < timeout + 5
    assert_restored()
    in_step()
    return str(caught.value)


def same_on_all(text: str) -> None:
    """All ranks were told the same."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert texts == [text] * len(texts)


def reduce(data: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
    """The platform's all-reduce over the given group, or over all ranks."""
    return get_platform().differentiable_all_reduce(data, op, group or dist.group.WORLD)


def test_agreement_changes_nothing() -> None:
    """Forward and backward, results bit-equal, board empty afterwards."""
    mesh = init_device_mesh((3,), ("tp",))

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = parallelize_module(nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5)), mesh,
                                   {"0": ColwiseParallel()})
        x = torch.randn(4, 6, requires_grad=True)
        output = model(x)
        output.square().sum().backward()
        return [output.detach(), x.grad, *(one.grad.to_local() for one in model.parameters())]

    plain = step()
    before = keys_left()
    for _ in range(3):
        with CommDebugMode(verify="online", trace_native=True) as mode:
            checked = step()
            for _ in range(20):
                dist.all_reduce(torch.ones(2))
        assert mode.incomplete is None and mode.get_total_counts() > 20
        assert all(torch.equal(one, other) for one, other in zip(plain, checked))
        in_step()
        # in_step leaves three keys; the last rank to leave the block has erased the block's.
        dist.barrier()
    assert keys_left() <= before + 3 * 3
    assert_restored()


def test_memory_is_bounded() -> None:
    """Inside the block no more than two calls are on the board."""
    with CommDebugMode(verify="online"):
        reduce(torch.ones(1))
        before = keys_left()
        for _ in range(50):
            reduce(torch.ones(1))
        assert keys_left() <= before + 8




def different_shapes() -> None:
    """A plain run would add what does not belong together."""
    reduce(torch.ones(2))
    reduce(torch.ones(2, 3) if dist.get_rank() == 1 else torch.ones(3, 2))


def test_shapes() -> None:
    """The message has the group, the call, each rank's part, and the program's line."""
    text = mismatch(different_shapes)
    same_on_all(text)
    lines = text.split("\n")
    assert lines[0] == "group (0, 1, 2), call 1: its ranks do not do the same"
    for rank, line in enumerate(lines[1:]):
        shape = "(2, 3)" if rank == 1 else "(3, 2)"
        assert line.startswith(f"  rank {rank}: differentiable_all_reduce sum of torch.float32 "
                               f"{shape}, forward of module None, operator None, at {__file__}:")
    assert len(lines) == 4


def test_kinds_dtypes_reductions_and_roots() -> None:
    """Whatever must be equal on all ranks."""
    odd = dist.get_rank() == 1
    platform, world = get_platform(), dist.group.WORLD

    def kind() -> None:
        if odd:
            platform.differentiable_all_gather_concat(torch.ones(3), world, 3, 0)
        else:
            reduce(torch.ones(3))

    text = mismatch(kind)
    same_on_all(text)
    assert "rank 1: differentiable_all_gather_concat of" in text
    assert "dtype" not in text and "torch.float64" in mismatch(
        lambda: reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32)))
    assert "all_reduce max of" in mismatch(lambda: reduce(torch.ones(3), "max" if odd else "sum"))
    assert "rooted at rank 1" in mismatch(
        lambda: platform.broadcast(torch.ones(3), int(odd), world))
    # Pieces of an uneven exchange may differ.
    sizes = [[0, 1, 2], [1, 0, 1], [2, 1, 0]]
    rank = dist.get_rank()
    with CommDebugMode(verify="online", verify_timeout=20):
        platform.differentiable_all_to_all_single(
            torch.ones(sum(sizes[rank])), sizes[rank], [row[rank] for row in sizes], world)
        output, work = platform.differentiable_all_to_all_single_async(
            torch.ones(sum(sizes[rank])), sizes[rank], [row[rank] for row in sizes], world)
        work.wait()
        assert output.sum() == sum(row[rank] for row in sizes)


def test_native_calls() -> None:
    """With ``trace_native`` those of torch.distributed are compared as well, and only then."""
    odd = dist.get_rank() == 1
    text = mismatch(lambda: dist.all_reduce(torch.ones(2 + odd)), trace_native=True)
    same_on_all(text)
    assert "rank 0: native.all_reduce sum of torch.float32 (2,)" in text
    text = mismatch(lambda: dist.barrier() if odd else dist.broadcast(torch.ones(1), 0),
                    trace_native=True)
    assert "rank 1: native.barrier of nothing None" in text
    assert "native.scatter" in mismatch(lambda: dist.scatter(
        torch.empty(1 + odd), [torch.ones(1)] * 3 if dist.get_rank() == 0 else None),
        trace_native=True)
    with CommDebugMode(verify="online", trace_native=True, verify_timeout=20):
        # Messages need two ranks only, in whatever order they begin.
        if dist.get_rank() < 2:
            work = [dist.isend(torch.ones(1), 1 - dist.get_rank()),
                    dist.irecv(torch.empty(1), 1 - dist.get_rank())]
            for one in work:
                one.wait()
        texts = [None] * 3
        dist.all_gather_object(texts, "x" * dist.get_rank())
        received = [None]
        dist.scatter_object_list(received, ["a", "bb", "ccc"] if dist.get_rank() == 0 else None)
        assert texts == ["", "x", "xx"] and received == [["a", "bb", "ccc"][dist.get_rank()]]


def test_a_rank_that_does_not_come() -> None:
    """It waits elsewhere for what the others do not come to: all raise, in bounded time."""
    rank = dist.get_rank()

    def skip() -> None:
        reduce(torch.ones(2))
        if rank == 1:
            in_time.wait(SOON * 3)
        reduce(torch.ones(4))

    in_time = threading.Event()
    began = time.monotonic()
    text = mismatch(skip, timeout=SOON)
    same_on_all(text)
    assert text.startswith("group (0, 1, 2), call 1: not all of its ranks come\n  rank 0: "
                           "differentiable_all_reduce sum of torch.float32 (4,), ")
    assert ("rank 1: did not come within 2 s; its last call here was differentiable_all_reduce sum "
            "of torch.float32 (2,), forward") in text
    assert time.monotonic() - began < SOON * 3 + 10


def test_a_rank_that_leaves() -> None:
    """With an error or without: those who wait are told at once."""
    rank = dist.get_rank()
    in_step()
    began = time.monotonic()
    expected: Any = ZeroDivisionError if rank == 2 else CollectiveMismatchError
    with pytest.raises(expected) as caught:
        with CommDebugMode(verify="online", verify_timeout=50):
            reduce(torch.ones(2))
            if rank == 2:
                raise ZeroDivisionError("of the program")
            reduce(torch.ones(2))
    assert time.monotonic() - began < 20
    if rank != 2:
        assert "  rank 2: left the block with ZeroDivisionError: of" in str(caught.value)
    assert_restored()
    in_step()
    with CommDebugMode(verify="online", verify_timeout=50):
        assert reduce(torch.ones(1)) == 3  # the next block begins anew


def test_groups_that_overlap() -> None:
    """Each group counts its own calls; two that are entered crosswise are found out."""
    rank = dist.get_rank()
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2), (0, 2))}
    mine = [ranks for ranks in pairs if rank in ranks]
    with CommDebugMode(verify="online", verify_timeout=20):
        for _ in range(3):
            for ranks in mine:
                assert reduce(torch.ones(1), group=pairs[ranks]) == 2
            assert reduce(torch.ones(1)) == 3
    order = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[rank]
    text = mismatch(lambda: [reduce(torch.ones(1), group=pairs[ranks]) for ranks in order],
                    timeout=SOON)
    first = order[0]
    assert text.startswith(f"group {first}, call 0: not all of its ranks come\n")
    assert any(where in text for where in (
        "waits in group (", "stopped waiting in group (", "left the block with Coll")), text


def test_rank_that_gave_up_elsewhere_and_stays() -> None:
    """Whoever waits for it reads where it stopped, though it has not left the block."""
    rank = dist.get_rank()
    first, second = (dist.new_group(list(ranks)) for ranks in ((0, 1), (0, 2)))
    in_step()
    with CommDebugMode(verify="online", verify_timeout=2 * SOON if rank == 2 else SOON):
        if rank == 2:
            with pytest.raises(CollectiveMismatchError) as caught:
                reduce(torch.ones(1), group=second)
            assert ("rank 0: stopped waiting in group (0, 1), call 0: differentiable_all_reduce sum"
                    " of torch.float32 (1,), ") in str(caught.value)
        elif rank == 0:
            with pytest.raises(CollectiveMismatchError):
                reduce(torch.ones(1), group=first)
        in_step()


def test_backward_and_operators() -> None:
    """A gradient's collective names the forward operator that needs it."""
    mesh = init_device_mesh((3,), ("tp",))
    wide = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])

    def run() -> None:
        x = torch.ones(2 + (dist.get_rank() == 1), 4, requires_grad=True)
        x = DTensor.from_local(x, mesh, [Replicate()])
        nn.functional.linear(x, wide).to_local().sum().backward()

    text = mismatch(run)
    same_on_all(text)
    assert "backward of module None, operator linear, at " in text, text

    def finish() -> None:
        op = "sum" if dist.get_rank() else "max"
        DTensor.from_local(torch.ones(2), mesh, [Partial(op)]).full_tensor()

    assert "all_reduce max" in mismatch(finish)


def test_interrupted_while_it_waits() -> None:
    """Nobody begins a call that a rank was torn out of."""
    rank = dist.get_rank()
    in_step()
    board = get_platform().board_of(None)
    kind = type(board)
    genuine = kind.read

    def interrupted(self: Any, keys: list[str]) -> Any:
        raise KeyboardInterrupt

    expected: Any = KeyboardInterrupt if rank == 0 else CollectiveMismatchError
    if rank == 0:
        kind.read = interrupted
    try:
        with pytest.raises(expected) as caught:
            with CommDebugMode(verify="online", verify_timeout=20):
                if rank != 0:
                    time.sleep(1)
                try:
                    reduce(torch.ones(1))
                finally:
                    kind.read = genuine
    finally:
        kind.read = genuine
    if rank != 0:
        assert str(caught.value) == ("group (0, 1, 2), call 0: rank 0 was stopped by "
                                     "KeyboardInterrupt")
    assert_restored()
    in_step()
    dist.barrier()


def test_rank_without_a_verifying_mode() -> None:
    """It is named, and the others do not wait for ever."""
    in_step()
    if dist.get_rank() == 1:
        time.sleep(SOON + 1)
    else:
        words = "rank 1: did not come within 2 s; nothing before in this group"
        with pytest.raises(CollectiveMismatchError, match=words):
            with CommDebugMode(verify="online", verify_timeout=SOON):
                reduce(torch.ones(1))
    in_step()
    # The numbers of the blocks must be the same again.
    if dist.get_rank() == 1:
        with CommDebugMode(verify="online"):
            pass
    with CommDebugMode(verify="online"):
        assert reduce(torch.ones(1)) == 3

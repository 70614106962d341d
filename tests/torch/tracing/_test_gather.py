"""``mode.gather()`` and what the library sends to spread tensors and to agree, three ranks."""
from __future__ import annotations

import contextlib
import io
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.debug._call_records import (
    CollectiveCall,
    OpCall,
    RedistributeCall,
    walk,
)
from hyper_parallel.debug import CommTrace, check_traces
from hyper_parallel.debug.__main__ import main

NPROC = 3
TIMEOUT = 60


def reduce(data: torch.Tensor) -> torch.Tensor:
    """The platform's sum over all ranks."""
    return get_platform().differentiable_all_reduce(data, "sum", dist.group.WORLD)


def collectives(mode: CommDebugMode) -> list[CollectiveCall]:
    """The collectives of a trace."""
    return [one for _, one in walk(mode.tree.roots) if isinstance(one, CollectiveCall)]


def test_gather() -> None:
    """Rank 0 gets everybody's trace, in order; nothing is recorded, inside or after the block."""
    rank = dist.get_rank()
    mesh = init_device_mesh((3,), ("tp",))
    layer = nn.Linear(2, 2)
    with CommDebugMode(module=layer, trace_native=True, verify="online") as mode:
        layer(torch.ones(1, 2))
        for _ in range(rank + 1):
            distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)], src_data_rank=None)
        x = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
        x.full_tensor()
        inside = mode.gather()
    after = mode.gather()
    assert mode.get_total_counts() == 2
    for traces in (inside, after):
        if rank != 0:
            assert traces is None
            continue
        assert [trace.rank for trace in traces] == [0, 1, 2]
        assert all(isinstance(trace, CommTrace) and trace.noise_level == 3 for trace in traces)
        assert all(trace.get_comm_counts() == mode.get_comm_counts() for trace in traces)
        assert traces[0].generate_tracing_table(3) == mode.generate_tracing_table(3)
        assert traces[2].get_parameter_info() == mode.get_parameter_info()
        assert check_traces(traces) is None


def test_gathered_traces_are_checked() -> None:
    """The function and the command find where the ranks part, on rank 0 alone."""
    rank = dist.get_rank()
    with CommDebugMode(trace_native=True) as mode:
        reduce(torch.ones(4))
        # As many bytes on every rank, so that it runs.
        dist.all_reduce(torch.ones(2, 3) if rank == 1 else torch.ones(3, 2))
        if rank < 2:  # a message is nothing that the others take part in
            for work in dist.batch_isend_irecv([
                    dist.P2POp(dist.isend, torch.ones(1), 1 - rank),
                    dist.P2POp(dist.irecv, torch.ones(1), 1 - rank)]):
                work.wait()
        dist.barrier()
    traces = mode.gather()
    if rank != 0:
        return
    fault = check_traces(traces).split("\n")
    assert fault[0] == "group (0, 1, 2), call 1: its ranks do not do the same"
    assert [line.split(",")[0] for line in fault[1:]] == [
        f"  rank {one}: native.all_reduce sum of torch.float32 {shape}"
        for one, shape in enumerate(("(3", "(2", "(3"))]
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder) / f"rank{trace.rank}.json") for trace in traces]
        for trace, name in zip(traces, names):
            trace.generate_json_dump(name)
            again = CommTrace.load(name)
            assert [(one.native, one.peer) for one in collectives(again)] == [
                (one.native, one.peer) for one in collectives(trace)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main(["check", *names]) == 1
            assert main(["check", names[0], names[2]]) == 0
        assert printed.getvalue().rstrip() == "\n".join(fault)


def test_a_rank_that_has_none() -> None:
    """Rank 0 names it, and so does the rank itself."""
    rank = dist.get_rank()
    mode = CommDebugMode()
    if rank != 2:
        with mode:
            reduce_alone = torch.ones(1) + 1
        assert reduce_alone == 2
    if rank == 1:
        assert mode.gather(timeout=30) is None
    else:
        words = ("nothing to gather from rank 2: the mode was never entered there" if rank == 0
                 else "rank 2 has nothing to gather: its mode was never entered")
        with pytest.raises(RuntimeError, match=words):
            mode.gather(timeout=30)
    dist.barrier()


def test_a_rank_that_does_not_come() -> None:
    """Bounded time on rank 0, and a word for who comes too late; the next one works."""
    rank = dist.get_rank()
    with CommDebugMode() as mode:
        reduce(torch.ones(1))
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 sent no trace within 1 s; every rank"):
            mode.gather(timeout=1)
        assert time.monotonic() - began < 10
    elif rank == 2:
        assert mode.gather() is None
    dist.barrier()
    if rank == 1:
        with pytest.raises(RuntimeError, match="rank 1 came to gather after rank 0 had given up"):
            mode.gather()
    assert (mode.gather() is not None) == (rank == 0)


def test_large_trace() -> None:
    """More than one note holds."""
    with CommDebugMode() as mode:
        for number in range(3000):
            mode.on_op_dispatch_enter(f"op{number * 7919}", None, (torch.ones(number),), {})
            mode.on_op_dispatch_exit(f"op{number * 7919}", None)
    traces = mode.gather()
    if dist.get_rank() == 0:
        assert [len(trace.tree.roots) for trace in traces] == [3000] * 3


def test_spreading_a_tensor_is_recorded() -> None:
    """Scatter and broadcast of ``distribute_tensor``: owner, axis, line, bytes, and counts."""
    rank = dist.get_rank()
    mesh = init_device_mesh((3,), ("tp",))
    with CommDebugMode() as mode:
        distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
        distribute_tensor(torch.ones(6, 2), mesh, [Replicate()], src_data_rank=1)
        distribute_tensor(torch.ones(6, 2), mesh, [Partial()])
        distribute_tensor(torch.ones(6, 2), mesh, [Replicate()], src_data_rank=None)
    assert mode.get_comm_counts() == {"scatter": 1, "broadcast": 2}
    moves = [one for one in mode.tree.roots if isinstance(one, RedistributeCall)]
    assert [(one.src_placements, one.dst_placements) for one in moves[:3]] == [
        ((Replicate(),), (Shard(0),)), ((Replicate(),), (Replicate(),)),
        ((Replicate(),), (Partial(),))]
    assert all(not one.implicit and one.call_site.startswith(__file__) for one in moves)
    scattered, sent, _ = collectives(mode)
    assert (scattered.axis, scattered.peer, scattered.ranks) == ("tp", 0, (0, 1, 2))
    assert (scattered.output_bytes, scattered.wire_bytes) == (16, 32 if rank == 0 else 0)
    assert (sent.axis, sent.peer, sent.input_bytes, sent.wire_bytes) == ("tp", 1, 48, 32)
    assert scattered.call_site == moves[0].call_site and not scattered.native
    # Nothing is shown of the move below the full level, and nothing is indented by it.
    assert mode.generate_tracing_table(1).split("\n")[2].startswith(
        "Collective           Collective(scatter) group_size=3 input_shape=(2, 2) ")


def test_agreeing_on_random_numbers_is_recorded() -> None:
    """The broadcast before the first draw hangs under the operator that draws."""
    mesh = init_device_mesh((3,), ("tp",))
    torch.manual_seed(dist.get_rank())
    x = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    with CommDebugMode() as mode:
        nn.functional.dropout(x, 0.5)
        nn.functional.dropout(x, 0.5)
    first, second = mode.tree.roots
    assert isinstance(first, OpCall) and isinstance(second, OpCall) and not second.children
    (record,) = first.children
    assert record.collective_type == "broadcast" and record.operator == "dropout"
    assert (record.dtype, record.axis, record.phase) == ("torch.uint8", "tp", "forward")
    assert mode.get_comm_counts() == {"broadcast": 1}


def test_overwriting_replicas_is_recorded() -> None:
    """``from_local(run_check=True)`` sends as well."""
    mesh = init_device_mesh((3,), ("tp",))
    with CommDebugMode() as mode:
        DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=True)
    (record,) = collectives(mode)
    assert (record.collective_type, record.axis) == ("broadcast", "tp")

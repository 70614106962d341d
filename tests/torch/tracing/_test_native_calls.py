"""What the program sends with torch.distributed itself, two ranks."""
from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
# The very function, whatever is put in its place later.
from torch.distributed import all_reduce as early_all_reduce

from hyper_parallel import CommDebugMode, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall, walk
from hyper_parallel.debug import assert_comms

NPROC = 2
TIMEOUT = 30


def other() -> int:
    """The other rank."""
    return 1 - dist.get_rank()


def at_root(value: Any) -> Any:
    """A value on rank 0, None elsewhere."""
    return value if dist.get_rank() == 0 else None


def pair() -> list[torch.Tensor]:
    """Room for what two ranks give."""
    return [torch.empty(4), torch.empty(4)]


def quietly(run: Callable[[], Any]) -> Any:
    """Run a function of which torch says that it has a newer name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return run()


def traced(run: Callable[[], Any]) -> list[CollectiveCall]:
    """What is recorded of a function."""
    with CommDebugMode(trace_native=True) as mode:
        quietly(run)
    assert mode.incomplete is None
    records = [one for _, one in walk(mode.tree.roots) if isinstance(one, CollectiveCall)]
    assert mode.get_total_counts() == len(records)
    for quantity in ("input_bytes", "output_bytes", "wire_bytes"):
        assert sum(sums[quantity] for sums in mode.get_comm_summary("type").values()) == sum(
            getattr(one, quantity) for one in records)
    assert all(one.native for one in records)
    return records


def kinds(run: Callable[[], Any]) -> list[str]:
    """The types that are recorded of a function, without their common beginning."""
    names = [one.collective_type for one in traced(run)]
    assert all(name.startswith("native.") for name in names)
    return [name.removeprefix("native.") for name in names]


def exchange() -> None:
    """A message in each direction."""
    calls = [dist.P2POp(dist.isend, torch.ones(3), other()),
             dist.P2POp(dist.irecv, torch.empty(3), other())]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def message() -> None:
    """A message from rank 0 to rank 1."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.empty(3), 0)


def asynchronous_message() -> None:
    """The same, each side with a handle."""
    work = dist.isend(torch.ones(3), 1) if dist.get_rank() == 0 else dist.irecv(torch.empty(3), 0)
    work.wait()


def object_message() -> None:
    """An object from rank 0 to rank 1."""
    if dist.get_rank() == 0:
        dist.send_object_list([{"a": 1}], 1)
    else:
        dist.recv_object_list([None], 0)


CALLS: list[tuple[str | None, Callable[[], Any]]] = [
    ("all_reduce", lambda: dist.all_reduce(torch.ones(4))),
    ("all_reduce", lambda: early_all_reduce(torch.ones(4))),
    ("all_reduce", lambda: dist.all_reduce(torch.ones(4), async_op=True).wait()),
    ("all_reduce", lambda: functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()),
    ("all_gather", lambda: dist.all_gather(pair(), torch.ones(4))),
    ("all_gather_into_tensor",
     lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))),
    ("all_gather_into_tensor",
     lambda: functional.all_gather_tensor(torch.ones(4), 0, dist.group.WORLD).sum()),
    ("reduce_scatter", lambda: dist.reduce_scatter(torch.empty(4), pair())),
    ("reduce_scatter_tensor",
     lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))),
    ("reduce_scatter_tensor", lambda: functional.reduce_scatter_tensor(
        torch.ones(8), "sum", 0, dist.group.WORLD).sum()),
    ("all_to_all_single", lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4))),
    ("all_to_all_single", lambda: functional.all_to_all_single(
        torch.ones(4), [2, 2], [2, 2], dist.group.WORLD).sum()),
    ("broadcast", lambda: dist.broadcast(torch.ones(4), 1)),
    ("scatter", lambda: dist.scatter(torch.empty(4), at_root(pair()))),
    ("gather", lambda: dist.gather(torch.ones(4), at_root(pair()))),
    ("reduce", lambda: dist.reduce(torch.ones(4), 0)),
    ("barrier", dist.barrier),
    ("monitored_barrier", dist.monitored_barrier),
    ("all_gather_object", lambda: dist.all_gather_object([None, None], {"a": 1})),
    ("gather_object", lambda: dist.gather_object({"a": 1}, at_root([None, None]))),
    ("broadcast_object_list", lambda: dist.broadcast_object_list([dist.get_rank()])),
    ("scatter_object_list", lambda: dist.scatter_object_list([None], at_root([1, "two"]))),
    ("send|recv", message),
    ("send|recv", asynchronous_message),
    ("send_object_list|recv_object_list", object_message),
]


def test_each_call_once() -> None:
    """Every function of torch.distributed, by its name, whoever imported it and when."""
    for expected, run in CALLS:
        name = expected.split("|")[dist.get_rank() if "|" in expected else 0]
        assert kinds(run) == [name], expected
        # A second time in a row, which parts of one call must not be taken for.
        assert kinds(lambda run=run: [run(), run(), run()]) == [name] * 3, expected
    assert kinds(exchange) == ["send", "recv"]


def test_backward_and_threads() -> None:
    """Gradients that communicate, on autograd's terms and on any thread."""
    x = torch.ones(4, requires_grad=True)
    records = traced(lambda: differentiable.all_reduce(x).sum().backward())
    assert [(one.collective_type, one.phase == "backward") for one in records] == [
        ("native.all_reduce", False), ("native.all_reduce", True)]
    assert [one.operator for one in records] == [None, "unknown"]
    records = traced(lambda: functional.all_gather_tensor_autograd(
        x, 0, dist.group.WORLD).sum().backward())
    assert [one.collective_type for one in records] == [
        "native.all_gather_into_tensor", "native.reduce_scatter_tensor"]

    def elsewhere() -> None:
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
        thread.start()
        thread.join()

    assert kinds(elsewhere) == ["all_reduce"]


def test_calls_from_within_torch() -> None:
    """DDP's reducer is C++ and calls no Python function."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    (record,) = traced(lambda: model(torch.ones(1, 3)).sum().backward())
    assert record.collective_type == "native.all_reduce" and record.input_bytes == 8 * 4


def test_what_is_recorded() -> None:
    """Group, bytes, reduction, peers, line and phase."""
    rank = dist.get_rank()
    (record,) = traced(lambda: dist.all_reduce(torch.ones(4, 2), dist.ReduceOp.MAX))
    assert (record.ranks, record.group_size, record.reduce_op) == ((0, 1), 2, "max")
    assert (record.input_shape, record.output_shape, record.dtype) == (
        (4, 2), (4, 2), "torch.float32")
    assert (record.input_bytes, record.output_bytes, record.wire_bytes) == (32, 32, 32)
    assert record.peer is None and record.phase == "forward"
    file, _, line = record.call_site.rpartition(":")
    assert file == __file__ and int(line) > 0

    (record,) = traced(lambda: dist.all_gather(pair(), torch.ones(4)))
    assert (record.input_bytes, record.output_bytes, record.wire_bytes) == (16, 32, 16)
    (record,) = traced(lambda: dist.broadcast(torch.ones(4), 1))
    assert (record.peer, record.wire_bytes) == (1, 8)
    (record,) = traced(lambda: dist.scatter(torch.empty(4), at_root(pair())))
    assert (record.peer, record.output_bytes, record.wire_bytes) == (0, 16, [16, 0][rank])
    (record,) = traced(lambda: dist.gather(torch.ones(4), at_root(pair())))
    assert (record.peer, record.input_bytes, record.wire_bytes) == (0, 16, [0, 16][rank])
    (record,) = traced(message)
    assert (record.peer, record.input_bytes, record.output_bytes, record.wire_bytes) == [
        (1, 12, 0, 12), (0, 0, 12, 0)][rank]
    assert record.dtype == "torch.float32"

    def uneven() -> None:
        sizes = [[3, 1], [1, 5]][rank]
        back = [[3, 1], [1, 5]][rank]
        dist.all_to_all_single(torch.empty(sum(back)), torch.ones(sum(sizes)), back, sizes)

    (record,) = traced(uneven)
    assert (record.input_bytes, record.wire_bytes) == [(16, 4), (24, 4)][rank]

    (record,) = traced(lambda: dist.all_gather_object([None, None], "x" * 1000))
    assert record.input_bytes > 1000 and record.output_bytes == 2 * record.input_bytes


def test_groups_and_axes() -> None:
    """The group of a mesh axis is called by it; a group of one does not communicate."""
    mesh = init_device_mesh((1, 2), ("dp", "tp"))
    (record,) = traced(lambda: dist.all_reduce(torch.ones(1), group=mesh.get_group("tp")))
    assert (record.axis, record.ranks) == ("tp", (0, 1))
    assert not traced(lambda: dist.all_reduce(torch.ones(1), group=mesh.get_group("dp")))


def test_the_librarys_own_are_not_told_twice() -> None:
    """Its collectives go through torch.distributed as well."""
    mesh = init_device_mesh((2,), ("tp",))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with CommDebugMode(trace_native=True) as mode:
        x.full_tensor()
        dist.all_reduce(x.to_local())
        distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    assert mode.get_comm_counts() == {
        "differentiable_all_gather_concat": 1, "native.all_reduce": 1, "scatter": 1}
    assert_comms(mode, all_gather=1, native_all_reduce=1, scatter=1)
    table = mode.generate_tracing_table(0)
    assert ("Collective           Collective(native.all_reduce) group_size=2 input_shape=(2, 4) "
            "output_shape=(2, 4)") in table
    with pytest.raises(AssertionError, match="expected 0 native_all_reduce, but found 1"):
        assert_comms(mode, all_gather=1, scatter=1)


def test_off_by_default() -> None:
    """Without being asked a mode neither records nor installs anything."""
    with CommDebugMode() as mode:
        assert not watched()
        dist.all_reduce(torch.ones(1))
    assert mode.get_total_counts() == 0


def watched() -> bool:
    """Whether a kernel of the tracer is in torch's dispatcher."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def test_only_the_innermost_mode_and_nothing_left() -> None:
    """Nested modes, any order of exit, errors in and around a call."""
    with CommDebugMode(trace_native=True) as outer:
        dist.all_reduce(torch.ones(1))
        with CommDebugMode() as silent:
            dist.all_reduce(torch.ones(1))
        with CommDebugMode(trace_native=True) as inner:
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))
        assert watched()
    assert [mode.get_total_counts() for mode in (outer, silent, inner)] == [1, 0, 2]
    assert not watched()

    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert watched()
    dist.all_reduce(torch.ones(1))
    inner.__exit__(None, None, None)
    assert not watched()
    assert [mode.get_total_counts() for mode in (outer, inner)] == [0, 1]

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            with CommDebugMode(trace_native=True):
                dist.all_reduce(torch.ones(1))
                raise error
        assert not watched()
    with pytest.raises((RuntimeError, ValueError), match="nvalid"):
        with CommDebugMode(trace_native=True) as mode:
            dist.all_gather(pair(), torch.ones(3))
    assert mode.get_total_counts() == 0 and not watched()


def test_results_are_equal_and_nothing_is_held() -> None:
    """Bit for bit, and no tensor outlives its last use."""
    def run() -> torch.Tensor:
        x = torch.arange(4.0) + dist.get_rank()
        dist.all_reduce(x)
        y = functional.all_gather_tensor(x, 0, dist.group.WORLD) * 1
        dist.broadcast(y, 1)
        return y

    plain = quietly(run)
    with CommDebugMode(trace_native=True) as mode:
        recorded = quietly(run)
        held = weakref.ref(recorded)
        assert torch.equal(plain, recorded)
        box = [{"big": torch.ones(1)}]
        dist.broadcast_object_list(box)
        seen = weakref.ref(box[0]["big"])
        del recorded, box
        gc.collect()
        assert held() is None and seen() is None
    assert mode.get_total_counts() == 4

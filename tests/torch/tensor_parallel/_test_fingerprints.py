"""Fingerprints of values: on four ranks nothing changes, and the first fault has a name."""
import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.debug import CommTrace
from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall, OpCall, walk
from hyper_parallel.debug import check_traces, diff_traces
from tests.torch.tensor_parallel.traced_model import MLP

NPROC = 4


def make_model() -> nn.Module:
    """The model over the inner axis of a 2 x 2 mesh."""
    torch.manual_seed(0)
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    return parallelize_module(MLP(), mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})


def step(model: nn.Module, **options: Any) -> tuple[CommDebugMode, list[torch.Tensor]]:
    """A traced step, and all of its results: loss and gradients of this rank."""
    x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_()
    model.zero_grad()
    with CommDebugMode(module=model, **options) as mode:
        loss = model(x).square().sum()
        loss.backward()
    locals_of = (getattr(one, "to_local", lambda one=one: one)() for one in (
        loss, x.grad, *(parameter.grad for parameter in model.parameters())))
    return mode, [one.detach().clone() for one in locals_of]


def all_ranks(mode: CommDebugMode) -> list[CommTrace]:
    """The traces of all ranks, through files."""
    texts: list[Any] = [None] * NPROC
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        mode.generate_json_dump(path, noise_level=3)
        dist.all_gather_object(texts, path.read_text())
        traces = []
        for text in texts:
            path.write_text(text)
            traces.append(CommTrace.load(path))
    return traces


def bits(tensor: torch.Tensor) -> int:
    """What the platform makes of a tensor."""
    return get_platform().fingerprint(tensor)[1]


def test_nothing_changes() -> None:
    """Bit-equal results and the same records; off, nothing is taken."""
    model = make_model()
    torch.manual_seed(3)
    (off, expected), state = step(model), torch.get_rng_state()
    on, results = step(model, fingerprints=True)
    assert all(torch.equal(one, other) for one, other in zip(expected, results, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert off.get_comm_summary() == on.get_comm_summary()
    for _, record in walk(off.tree.roots):
        assert record.fingerprints == ()
    kinds = {OpCall: 0, CollectiveCall: 0}
    for _, record in walk(on.tree.roots):
        if type(record) in kinds:
            kinds[type(record)] += 1
            assert len(record.fingerprints) == 1
            assert record.fingerprints[0] is not None
    assert kinds == {OpCall: 3, CollectiveCall: 2}


def test_they_are_those_of_the_values() -> None:
    """Of this rank's part; the ranks that hold the same one are known."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    row, column = mesh.get_coordinate()
    x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Replicate(), Shard(0)])
    with CommDebugMode(fingerprints=True) as mode:
        y = x + 1
        total = y.sum(0)
        whole = total.redistribute(placements=[Replicate(), Replicate()])
    added, summed = (record.fingerprints for _, record in walk(mode.tree.roots)
                     if isinstance(record, OpCall))
    assert added[0].bits == bits(y.to_local()) and added[0].ranks == (column, 2 + column)
    assert summed[0].bits == bits(total.to_local())
    (reduced,) = (record for _, record in walk(mode.tree.roots)
                  if isinstance(record, CollectiveCall))
    assert reduced.fingerprints[0].bits == bits(whole.to_local())
    assert reduced.fingerprints[0].ranks == (2 * row, 2 * row + 1)
    assert reduced.fingerprints[0].norm == whole.to_local().double().norm().item()


def test_file() -> None:
    """The file gives them back, nan included; level 3 prints them."""
    mesh = init_device_mesh((4,), ("tp",))
    x = DTensor.from_local(torch.tensor([float("nan"), 1.0]), mesh, [Shard(0)])
    with CommDebugMode(fingerprints=True) as mode:
        (x * 2).redistribute(placements=[Replicate()])
    trace = all_ranks(mode)[mesh.rank]
    for (_, one), (_, other) in zip(walk(mode.tree.roots), walk(trace.tree.roots), strict=True):
        assert one.fingerprints == other.fingerprints
        for a, b in zip(one.fingerprints, other.fingerprints):
            assert (str(a), a.number, a.ranks) == (str(b), b.number, b.ranks)
    for level in range(4):
        table = mode.generate_tracing_table(level)
        assert table == trace.generate_tracing_table(level)
        assert ("norm=nan bits=" in table) == (level == 3)
    assert diff_traces(mode, trace) == []


def test_diff_names_the_first_operator() -> None:
    """One row of a weight on rank 0: there its operator, elsewhere the sum that it goes into."""
    model = make_model()
    before, _ = step(model, fingerprints=True)
    again, _ = step(model, fingerprints=True)
    assert diff_traces(before, again) == []
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.b.weight.to_local()[0] += 2 ** -10
    after, _ = step(model, fingerprints=True)
    lines = diff_traces(before, after)
    if dist.get_rank() > 1:  # another row of the mesh
        assert lines == []
        return
    (line,) = lines
    what = ("output 0 of operator linear, module b," if dist.get_rank() == 0 else
            "output 0 of differentiable_all_reduce, forward of operator linear, module b,")
    assert line.startswith(f"! values part at {what} at {inspect.getsourcefile(MLP)}:"), line
    assert line.count("norm=") == 2
    assert diff_traces(step(model)[0], after) == []  # nothing to compare with


def test_check_names_the_first_rank() -> None:
    """A replicated tensor that is another one on rank 2."""
    model = make_model()
    good, _ = step(model, fingerprints=True)
    assert check_traces(all_ranks(good)) is None
    mesh = init_device_mesh((4,), ("tp",))
    value = torch.arange(4.0) + (dist.get_rank() == 2)
    x = DTensor.from_local(value, mesh, [Replicate()])
    with CommDebugMode(fingerprints=True) as mode:
        if dist.get_rank() == 1:
            x.abs()  # what only some ranks do is no fault
        y = x * 2
        y.sum()
    lines = check_traces(all_ranks(mode)).splitlines()
    assert lines[0].startswith("ranks (0, 1, 2, 3) must hold the same value, but rank 2 departs "
                               f"at output 0 of operator mul, module None, at {__file__}:")
    assert lines[1] == f"  rank 0: norm={(torch.arange(4.) * 2).double().norm().item():.6g} bits=" \
        f"{bits(torch.arange(4.) * 2):016x}"
    assert len(lines) == 5


def test_asynchronous() -> None:
    """Taken when the program waits, not before; never after the mode's end."""
    platform, rank = get_platform(), dist.get_rank()
    data = torch.arange(4.0).add(10 * rank).requires_grad_()
    expected = torch.tensor([10.0 * other + rank for other in range(NPROC)])
    with CommDebugMode(fingerprints=True) as mode:
        output, work = platform.differentiable_all_to_all_single_async(
            data, None, None, dist.group.WORLD)
        late, late_work = platform.differentiable_all_to_all_single_async(
            data, None, None, dist.group.WORLD)
        assert isinstance(work, dist.Work)
        first, second = mode.tree.roots
        assert first.fingerprints == ()
        work.wait()
        assert first.fingerprints[0].bits == bits(expected)
        assert work.is_completed() and second.fingerprints == ()
    late_work.wait()
    assert second.fingerprints == ()
    assert torch.equal(output, expected) and torch.equal(late, expected)
    output.sum().backward()
    assert data.grad.tolist() == [1.0] * 4


def test_failing_look_does_not_reach_the_program() -> None:
    """A tensor that cannot be looked at makes the trace incomplete, and nothing else."""
    mesh = init_device_mesh((4,), ("tp",))
    x = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    platform = type(get_platform())
    original = vars(platform)["fingerprint"]

    def broken(_: Any) -> None:
        raise RuntimeError("no look")

    platform.fingerprint = staticmethod(broken)
    try:
        with CommDebugMode(fingerprints=True) as mode:
            y = (x * 2).redistribute(placements=[Replicate()])
    finally:
        type.__setattr__(platform, "fingerprint", original)
    assert y.to_local().tolist() == [8.0, 8.0]
    assert mode.incomplete == "RuntimeError: no look" and mode.get_total_counts() == 1

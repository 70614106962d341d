"""How much is sent, along which axis, in which phase, for whom and why: four ranks."""
import inspect
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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
from hyper_parallel.core.dtensor import tensor_redistribution
from hyper_parallel.core.dtensor.debug import (
    CommTrace,
    ImplicitRedistributionError,
    ImplicitRedistributionWarning,
    forbid_implicit,
)
from hyper_parallel.core.dtensor.debug._call_records import (
    CollectiveCall,
    OpCall,
    RedistributeCall,
    walk,
)
from hyper_parallel.debug import check_traces
from tests.torch.tensor_parallel.traced_model import MLP

NPROC = 4
ALL_REDUCE = "differentiable_all_reduce"
ALL_GATHER = "differentiable_all_gather_concat"


class Checkpointed(MLP):
    """Repeats its forward in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The square needs the sum again; without it the repetition would stop before.
        return checkpoint(lambda y: MLP.forward(self, y).square(), x, use_reentrant=False)


def make_model(model: nn.Module | None = None) -> nn.Module:
    """The model over all four ranks."""
    torch.manual_seed(0)
    return parallelize_module(model or MLP(), init_device_mesh((4,), ("tp",)),
                              {"a": ColwiseParallel(), "b": RowwiseParallel()})


def make_input() -> torch.Tensor:
    """The same batch on each rank, 2 * 8 float32."""
    return torch.ones(2, 8, requires_grad=True)


def spread(shape: tuple[int, ...], *placements: Any, mesh: Any = None) -> DTensor:
    """Ones."""
    return distribute_tensor(torch.ones(shape), mesh or init_device_mesh((4,), ("tp",)),
                             placements)


def records(mode: Any, kind: type) -> list[Any]:
    """All records of a kind, in the order of the tree."""
    return [record for _, record in walk(mode._root_records) if isinstance(record, kind)]


def assert_all_sums_agree(mode: CommDebugMode) -> None:
    """The tree, the counts and every grouping add up to the same."""
    tree = records(mode, CollectiveCall)
    assert mode.incomplete is None and mode.get_total_counts() == len(tree)
    for by in ("type", "axis", "module", "op", "phase", "dtype", ("phase", "module", "op")):
        sums = mode.get_comm_summary(by).values()
        assert sum(one["count"] for one in sums) == len(tree)
        for name in ("input_bytes", "output_bytes", "wire_bytes"):
            assert sum(one[name] for one in sums) == sum(getattr(one, name) for one in tree)
    assert sum(mode.get_comm_bytes().values()) == sum(one.wire_bytes for one in tree)
    assert sorted(one.sequence for one in tree) == list(range(len(tree)))


def test_bytes_group_and_axis() -> None:
    """C12: 32 bytes in, 128 out, 96 received; a group of two axes is called by both."""
    x = spread((8, 4), Shard(0))
    with CommDebugMode() as mode:
        x.redistribute(placements=[Replicate()])
    (one,) = records(mode, CollectiveCall)
    assert (one.collective_type, one.ranks, one.group_size, one.axis) == (
        ALL_GATHER, (0, 1, 2, 3), 4, "tp")
    assert (one.input_bytes, one.output_bytes, one.wire_bytes) == (32, 128, 96)
    assert (one.dtype, one.reduce_op) == ("torch.float32", None)
    assert 0 < one.duration < 60 and one.timestamp > 1.7e9
    assert mode.get_comm_summary("axis") == {
        "tp": {"count": 1, "input_bytes": 32, "output_bytes": 128, "wire_bytes": 96}}

    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    y = DTensor.from_local(torch.ones(4), mesh, [Partial(), Partial()])
    z = DTensor.from_local(torch.ones(4, dtype=torch.float64), mesh["dp", "tp"].flatten("all"),
                           [Partial("max")])
    w = DTensor.from_local(torch.ones(4), mesh, [Replicate(), Partial()])
    with CommDebugMode() as mode:
        for tensor in (y, z, w):
            tensor.full_tensor()
    both, flat, inner = records(mode, CollectiveCall)
    assert (both.axis, flat.axis, inner.axis) == ("dp+tp", "dp+tp", "tp")
    assert (both.reduce_op, flat.reduce_op, flat.dtype) == ("sum", "max", "torch.float64")
    assert (both.wire_bytes, flat.wire_bytes, inner.wire_bytes) == (24, 48, 16)
    first = get_platform().get_rank() // 2 * 2
    assert inner.ranks == (first, first + 1)
    assert_all_sums_agree(mode)


def test_bytes_of_every_kind() -> None:
    """The formulas of the documentation, worked out by hand for 256 bytes on four ranks."""
    moves = [(spread((8, 8), Shard(0)), Shard(1)), (spread((8, 8), Partial()), Shard(0)),
             (spread((8, 8), Partial()), Replicate()), (spread((8, 6), Shard(0)), Shard(1))]
    with CommDebugMode() as mode:
        for tensor, target in moves:
            tensor.redistribute(placements=[target])
    found = [(one.collective_type[15:], one.input_bytes, one.output_bytes, one.wire_bytes)
             for one in records(mode, CollectiveCall)]
    # Six columns over four ranks are 2, 2, 2 and 0 of them; of its 2 * 6 floats each rank keeps
    # 2 * 2, which do not go into the collective, and receives those of the others.
    rank = get_platform().get_rank()
    uneven = ("all_to_all_single", *((32, 48, 32) if rank < 3 else (48, 0, 48)))
    assert found == [("all_to_all", 64, 64, 48), ("reduce_scatter", 256, 64, 192),
                     ("all_reduce", 256, 256, 384), uneven]


def test_phases_and_owners() -> None:
    """Forward, backward and a forward repeated by checkpoint, each with its module and operator."""
    model = make_model(Checkpointed())
    with CommDebugMode(module=model) as mode:
        model(make_input()).sum().backward()
    assert {key: one["count"] for key, one in
            mode.get_comm_summary(("phase", "module", "op")).items()} == {
        ("forward", "b", "linear"): 1, ("recompute", "b", "linear"): 1,
        ("backward", "a", "linear"): 1}
    (back,) = [one for one in records(mode, CollectiveCall) if one.phase == "backward"]
    assert (back.argument, back.axis, back.wire_bytes) == ("0", "tp", 96)
    assert_all_sums_agree(mode)


def test_backward_of_a_forward_that_was_not_traced() -> None:
    """C6: one collective, phase backward; its owner is known all the same: a's linear."""
    for run in (lambda work: work(), _on_thread):
        model = make_model()
        loss = model(make_input()).sum()
        with CommDebugMode(module=model) as mode:
            run(loss.backward)
        (one,) = records(mode, CollectiveCall)
        assert (one.phase, one.operator, one.argument, one.module) == (
            "backward", "linear", "0", "a")
        assert_all_sums_agree(mode)
    loss = model(make_input()).sum()
    with CommDebugMode() as nameless:
        loss.backward()
    (one,) = records(nameless, CollectiveCall)
    assert (one.phase, one.operator, one.module) == ("backward", "linear", "unknown")
    with CommDebugMode(module=model):
        loss = model(make_input()).sum()
    with CommDebugMode() as later:
        loss.backward()
    (one,) = records(later, CollectiveCall)
    assert (one.phase, one.module, one.operator, one.argument) == ("backward", "a", "linear", "0")
    with CommDebugMode() as explicit:
        pass
    x = spread((8, 4), Shard(0)).requires_grad_()
    loss = x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(1)]).sum()
    with explicit:
        loss.backward()
    assert {key for key, one in explicit.get_comm_summary(("phase", "module", "op")).items()} == {
        ("backward", "unknown", "unknown")}


def test_gradients_that_depend_on_the_values() -> None:
    """Those of a product and an extremum communicate too, and belong where the sum was finished."""
    mesh = init_device_mesh((4,), ("tp",))
    for op in ("product", "max", "min"):
        x = DTensor.from_local(torch.arange(3.0) + mesh.rank, mesh, [Partial(op)]).requires_grad_()
        with CommDebugMode() as mode:
            y = (x * 1.0).redistribute(placements=[Replicate()]) if op == "product" else \
                x.redistribute(placements=[Replicate()])
            line = inspect.currentframe().f_lineno
            y.sum().backward()
        _, gradient = records(mode, CollectiveCall)
        assert (gradient.phase, gradient.module, gradient.axis) == ("backward", None, "tp")
        assert line - 2 <= int(gradient.call_site.rpartition(":")[2]) < line
        assert_all_sums_agree(mode)
    x = spread((8, 3), Shard(0)).requires_grad_()
    with CommDebugMode() as mode:
        total = x.prod(0).sum()
        total.full_tensor()
    _on_thread(total.backward)
    with CommDebugMode() as mode:
        total = x.prod(0).sum()
        _on_thread(total.backward)
    for gradient in records(mode, CollectiveCall):
        assert gradient.operator == "prod", gradient
    assert {record.phase for record in records(mode, CollectiveCall)} == {"forward", "backward"}
    assert_all_sums_agree(mode)


def _on_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_optimizer_and_outside() -> None:
    """What an optimizer's step sends, and what nothing of the training step asks for."""
    class Gathering(torch.optim.SGD):
        """Looks at the whole parameter before it steps."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.full_tensor()
            return super().step(closure)

    weight = nn.Parameter(spread((8, 4), Shard(0)))
    weight.sum().backward()
    with CommDebugMode() as mode:
        Gathering([weight], lr=0.1).step()
        with torch.no_grad():
            weight.full_tensor()
        weight.full_tensor()
    assert {key: one["count"] for key, one in mode.get_comm_summary("phase").items()} == {
        "optimizer": 1, "outside": 1, "forward": 1}
    assert_all_sums_agree(mode)


def test_implicit_and_explicit() -> None:
    """C13: implicit names argument 1, both layouts and the line; the program's call is explicit."""
    x, w = spread((64, 8), Shard(0)), spread((8, 4), Shard(0))
    with CommDebugMode() as mode:
        line = inspect.currentframe().f_lineno + 1
        torch.matmul(x, w)
        x.redistribute(placements=[Replicate()])
    implicit, explicit = records(mode, RedistributeCall)
    assert (implicit.implicit, implicit.needed_by, implicit.argument) == (True, "matmul", "1")
    assert (implicit.src_placements, implicit.dst_placements) == ((Shard(0),), (Replicate(),))
    assert implicit.mesh_axes == ("tp",) and implicit.call_site == f"{__file__}:{line}"
    assert (explicit.implicit, explicit.needed_by, explicit.argument) == (False, None, None)
    assert explicit.call_site == f"{__file__}:{line + 1}"
    text = mode.generate_tracing_table(3)
    assert f"implicit for argument 1 of matmul at {__file__}:{line}" in text
    assert f"explicit at {__file__}:{line + 1}" in text
    assert " at " not in mode.generate_tracing_table(2)
    (first, _) = records(mode, CollectiveCall)
    assert (first.operator, first.argument, first.call_site) == (
        "matmul", "1", f"{__file__}:{line}")


def test_forbidden_moves() -> None:
    """An operator that must move an operand raises before it sends; explicit moves pass."""
    x, w = spread((64, 8), Shard(0)), spread((8, 4), Shard(0))
    summed = spread((8, 8), Shard(1)) @ w
    with CommDebugMode() as mode, forbid_implicit():
        try:
            torch.matmul(x, w)
            raise AssertionError("the move was allowed")
        except ImplicitRedistributionError as error:
            assert ("'matmul' needs its argument 1 in another layout: Shard(dim=0) -> "
                    f"Replicate() (at {__file__}:") in str(error)
        assert mode.get_total_counts() == 0
        whole = w.redistribute(placements=[Replicate()])
        assert (x @ whole).placements == (Shard(0),)
        F.relu(summed)
        with forbid_implicit(strict=True):
            try:
                F.relu(summed)
                raise AssertionError("the sum was finished")
            except ImplicitRedistributionError as error:
                assert "Partial(sum) -> " in str(error)
    with warnings.catch_warnings(record=True) as caught, forbid_implicit("warn"):
        warnings.simplefilter("always")
        torch.matmul(x, w)
    assert [warning.category for warning in caught] == [ImplicitRedistributionWarning]
    assert tensor_redistribution._redistribute_observer is None
    torch.matmul(x, w)


def test_fallback_is_marked() -> None:
    """An operator without a rule says so at the level that shows all, and can be forbidden."""
    x = spread((8, 8), Shard(0))
    with CommDebugMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cov(x)
        torch.add(x, x)
    assert [op.fallback for op in records(mode, OpCall)][-2:] == [True, False]
    assert " fallback" in mode.generate_tracing_table(3)
    assert " fallback" not in mode.generate_tracing_table(2)
    with forbid_implicit():
        try:
            torch.cov(x)
            raise AssertionError("the fallback was allowed")
        except ImplicitRedistributionError as error:
            assert "has no rule for its operands" in str(error)


def test_file_gives_the_same_trace() -> None:
    """C18: counts, bytes, every summary and every table come back from the file."""
    model = make_model()
    with CommDebugMode(module=model) as mode:
        for _ in range(2):
            model(make_input()).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        mode.generate_json_dump(path, noise_level=3)
        trace = CommTrace.load(path)
        trace.generate_json_dump(Path(folder) / "again.json", noise_level=3)
        assert path.read_text() == (Path(folder) / "again.json").read_text()
    assert trace.rank == get_platform().get_rank()
    assert trace.get_comm_counts() == mode.get_comm_counts() == {ALL_REDUCE: 4}
    assert trace.get_parameter_info() == mode.get_parameter_info()
    assert trace.get_sharding_info() == mode.get_sharding_info()
    for by in ("type", ("axis", "phase"), ("module", "op", "dtype")):
        assert trace.get_comm_summary(by) == mode.get_comm_summary(by)
        assert trace.generate_comm_summary_table(by) == mode.generate_comm_summary_table(by)
    for level in range(4):
        assert trace.generate_tracing_table(level) == mode.generate_tracing_table(level)


def test_bound() -> None:
    """With a bound the tree stays small and every sum exact."""
    model = make_model()
    full, bounded = CommDebugMode(module=model), CommDebugMode(module=model, max_records=9)
    for mode in (full, bounded):
        with mode:
            for _ in range(5):
                model(make_input()).sum().backward()
    everything = sum(1 for _ in walk(full._root_records))
    assert full.dropped_records == 0
    assert sum(1 for _ in walk(bounded._root_records)) == 9
    assert bounded.dropped_records == everything - 9
    assert bounded.get_comm_counts() == full.get_comm_counts() == {ALL_REDUCE: 10}
    by = ("type", "axis", "module", "op", "phase", "dtype")
    assert bounded.get_comm_summary(by) == full.get_comm_summary(by)
    assert bounded.generate_tracing_table(0).endswith(
        f"\n({everything - 9} records dropped: max_records was reached)")


def test_ranks_agree() -> None:
    """The traces of all four ranks of a step pass the check; one that lacks a call does not."""
    model = make_model()
    with CommDebugMode(module=model) as mode:
        model(make_input()).sum().backward()
        spread((8, 6), Shard(0)).redistribute(placements=[Shard(1)])
    with tempfile.TemporaryDirectory() as folder:
        mode.generate_json_dump(Path(folder) / "trace.json", noise_level=3)
        texts: list[Any] = [None] * NPROC
        dist.all_gather_object(texts, (Path(folder) / "trace.json").read_text())
        traces = []
        for text in texts:
            (Path(folder) / "trace.json").write_text(text)
            traces.append(CommTrace.load(Path(folder) / "trace.json"))
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    assert check_traces(traces) is None
    with CommDebugMode(module=model) as shorter:
        model(make_input())
    lines = check_traces([shorter, *(trace for trace in traces
                                     if trace.rank != shorter.rank)]).split("\n")
    assert lines[0] == "group (0, 1, 2, 3), call 1: its ranks do not do the same"
    assert sum(line.endswith("nothing, its trace ends before") for line in lines[1:]) == 1
    assert sum("backward of module a, operator linear" in line for line in lines[1:]) == 3

"""The TP-MLP on four ranks: column-wise ``a``, relu, row-wise ``b``, no bias."""
import gc
import json
import tempfile
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DeviceMesh,
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
from hyper_parallel.core.dtensor.debug._call_records import (
    AnnotateCall,
    CollectiveCall,
    DebugCall,
    OpCall,
    RedistributeCall,
    walk,
)
from hyper_parallel.core.dtensor.debug._collective_tracer import COLLECTIVE_METHODS
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer
from tests.torch.tensor_parallel.traced_model import MLP

NPROC = 4
ALL_REDUCE = "differentiable_all_reduce"
ALL_GATHER = "differentiable_all_gather_concat"


def make_mesh() -> DeviceMesh:
    """All four ranks in one row."""
    return init_device_mesh((4,), ("tp",))


def make_model(model: nn.Module | None = None) -> nn.Module:
    """The model spread over the ranks, with equal weights wherever it is made."""
    torch.manual_seed(0)
    return parallelize_module(model or MLP(), make_mesh(),
                              {"a": ColwiseParallel(), "b": RowwiseParallel()})


def make_input() -> torch.Tensor:
    """The same batch on each rank."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_()


def collectives(records: list[DebugCall]) -> list[CollectiveCall]:
    """All collectives of a tree."""
    return [record for _, record in walk(records) if isinstance(record, CollectiveCall)]


def owners(mode: CommDebugMode) -> list[tuple[str, str, str]]:
    """Phase, module and operator of each collective, in the order of the tree."""
    found = []

    def visit(records: list[DebugCall], module: str, op: str) -> None:
        for record in records:
            if isinstance(record, CollectiveCall):
                found.append((record.phase, module, op))
            inside = (record.module_fqn if isinstance(record, AnnotateCall) else module,
                      record.op_name if isinstance(record, OpCall) else op)
            visit(record.children, *inside)

    visit(mode._root_records, "", "")
    return found


def hook_tables(model: nn.Module) -> list[Any]:
    """All that registering a hook may change."""
    return [(name, {key: list(value.items()) for key, value in vars(module).items()
                    if "hook" in key and isinstance(value, dict)})
            for name, module in model.named_modules()]


def assert_sums_agree(mode: CommDebugMode) -> None:
    """The tree holds just the collectives that were counted."""
    in_tree = Counter(record.collective_type for record in collectives(mode._root_records))
    assert dict(in_tree) == mode.get_comm_counts()
    assert sum(in_tree.values()) == mode.get_total_counts()
    assert mode.incomplete is None


def count_in_json(records: list[dict]) -> int:
    """Number of collectives in the records of a JSON dump."""
    return sum((record["type"] == "collective") + count_in_json(record["children"])
               for record in records)


def test_forward_and_backward_belong_to_their_operators() -> None:
    """C1: two all-reduces, the forward one under b's linear, the backward one under a's."""
    model, x = make_model(), make_input()
    with CommDebugMode(module=model) as mode:
        model(x).sum().backward()
    assert mode.get_comm_counts() == {ALL_REDUCE: 2}
    assert owners(mode) == [("backward", "a", "linear"), ("forward", "b", "linear")]
    assert [one.group_size for one in collectives(mode._root_records)] == [4, 4]
    assert_sums_agree(mode)
    lines = mode.generate_tracing_table(1).split("\n")
    assert lines[3] == ("  Collective         Collective(differentiable_all_reduce) group_size=4 "
                        "input_shape=(2, 8) output_shape=(2, 8) phase=backward")
    moves = [record for _, record in walk(mode._root_records)
             if isinstance(record, RedistributeCall)]
    assert [(move.phase, move.src_placements, move.dst_placements) for move in moves] == [
        ("backward", (Partial(),), (Replicate(),)), ("forward", (Partial(),), (Replicate(),))]


def test_backward_on_another_thread_finds_its_operator() -> None:
    """C1 with the backward pass on a thread that has no mode."""
    model, x = make_model(), make_input()
    with CommDebugMode(module=model) as mode:
        loss = model(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert owners(mode) == [("backward", "a", "linear"), ("forward", "b", "linear")]
    assert_sums_agree(mode)


def test_backward_outside_is_not_counted() -> None:
    """C6, second half: only what happens inside the mode counts."""
    model, x = make_model(), make_input()
    with CommDebugMode(module=model) as mode:
        loss = model(x).sum()
    loss.backward()
    assert x.grad is not None
    assert owners(mode) == [("forward", "b", "linear")] and mode.get_total_counts() == 1
    with CommDebugMode() as later:
        loss = model(x).sum()
        with CommDebugMode() as inner:
            loss.backward()
    assert owners(later) == [("forward", "", "linear")]
    assert owners(inner) == [("backward", "", "")] and inner.get_total_counts() == 1
    assert inner.get_comm_summary(("phase", "op")).keys() == {("backward", "linear")}


def test_layer_called_twice() -> None:
    """C2: the same Linear called twice shows two calls and leaves its hooks as they were."""
    class Twice(MLP):
        """Calls its second layer twice."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.relu(self.a(x))
            return self.b(hidden) + self.b(hidden)

    model = make_model(Twice())
    before = hook_tables(model)
    with CommDebugMode(module=model) as mode:
        model(make_input())
    assert owners(mode) == [("forward", "b", "linear")] * 2
    assert [record.module_fqn for _, record in walk(mode._root_records)
            if isinstance(record, AnnotateCall)] == ["(root)", "a", "b", "b"]
    assert hook_tables(model) == before
    assert_sums_agree(mode)


def test_child_that_raises() -> None:
    """C4: a failed child, caught or not, takes nothing of its sibling and leaves nothing behind."""
    class Failing(nn.Module):
        """Raises after an operator."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Never returns."""
            F.relu(x)
            raise ValueError("of the child")

    class Patient(MLP):
        """Tries the failing child first."""

        def __init__(self, catch: bool) -> None:
            super().__init__()
            self.bad, self.catch = Failing(), catch

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.relu(self.a(x))
            try:
                self.bad(hidden)
            except ValueError:
                if not self.catch:
                    raise
            return self.b(hidden)

    for catch in (True, False):
        model = make_model(Patient(catch))
        before = hook_tables(model)
        mode = CommDebugMode(module=model)
        try:
            with mode:
                model(make_input())
            assert catch
        except ValueError:
            assert not catch
        (root,) = mode._root_records
        calls = [(child.module_fqn, [type(one).__name__ for one in child.children])
                 for child in root.children if isinstance(child, AnnotateCall)]
        assert calls == [("a", ["OpCall"]), ("bad", ["OpCall"])] + [("b", ["OpCall"])] * catch
        assert owners(mode) == [("forward", "b", "linear")] * catch
        assert hook_tables(model) == before
        assert _debug_mode_observer.get() is None
        assert tensor_redistribution._redistribute_observer is None


def test_nested_modes() -> None:
    """C9: outer { op; inner { op }; op } counts two and one, and any order of exit restores."""
    cls = type(get_platform())
    originals = {name: cls.__dict__[name] for name in COLLECTIVE_METHODS}
    model, hidden = make_model(), distribute_tensor(torch.ones(2, 16), make_mesh(), [Shard(1)])
    with CommDebugMode() as outer:
        model.b(hidden)
        with CommDebugMode() as inner:
            model.b(hidden)
        model.b(hidden)
    for mode, count in ((outer, 2), (inner, 1)):
        assert [record.op_name for record in mode._root_records] == ["linear"] * count
        assert mode.get_comm_counts() == {ALL_REDUCE: count}
        assert_sums_agree(mode)

    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    model.b(hidden)
    inner.__exit__(None, None, None)
    assert (outer.get_total_counts(), inner.get_total_counts()) == (0, 1)
    assert _debug_mode_observer.get() is None
    assert all(cls.__dict__[name] is original for name, original in originals.items())


def test_json_and_levels() -> None:
    """C18: the JSON has the same counts; a module run twice sums right; levels are nested."""
    model = make_model()
    with CommDebugMode(module=model) as mode:
        for _ in range(2):
            model(make_input()).sum().backward()
    assert mode.get_comm_counts() == {ALL_REDUCE: 4}
    assert_sums_agree(mode)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for level in (None, 0, 1, 2, 3):
            mode.generate_json_dump(path, noise_level=level)
            data = json.loads(path.read_text())
            assert data["comm_counts"] == mode.get_comm_counts() and data["total_counts"] == 4
            assert count_in_json(data["records"]) == 4
    tables = [[" ".join(line.split()) for line in mode.generate_tracing_table(level).split("\n")]
              for level in range(4)]
    for lower, higher in zip(tables, tables[1:]):
        # Level 3 says more of each call than the lower ones.
        assert all(lower.count(line) <= sum(other.startswith(line) for other in higher)
                   for line in lower)
        assert len(lower) < len(higher)


def test_on_changes_nothing_and_off_leaves_nothing() -> None:
    """C20: results bit-equal, no collective added, no wrapper left."""
    cls = type(get_platform())
    originals = {name: cls.__dict__[name] for name in COLLECTIVE_METHODS}
    issued = []
    native = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        issued.append(args[0].shape)
        return native(*args, **kwargs)

    def step() -> list[torch.Tensor]:
        model, x = make_model(), make_input()
        output = model(x)
        output.square().sum().backward()
        return [output, x.grad, model.a.weight.grad.to_local(), model.b.weight.grad.to_local()]

    dist.all_reduce = counted
    try:
        off = step()
        without = list(issued)
        with CommDebugMode() as mode:
            on = step()
    finally:
        dist.all_reduce = native
    assert all(torch.equal(one, other) for one, other in zip(off, on))
    assert len(without) == 2 and issued == without * 2
    # The weights are spread inside of the mode, too.
    assert mode.get_comm_counts() == {ALL_REDUCE: 2, "scatter": 2}
    assert all(cls.__dict__[name] is original for name, original in originals.items())


def test_reduction_belongs_to_the_maker_of_the_partial() -> None:
    """Also when it is asked for later, through operators that pass the Partial on."""
    mesh = make_mesh()
    x, w = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (1, 0))
    with CommDebugMode() as mode:
        summed = x @ w
        scaled = summed * 2
        other = x + x
        whole = scaled.full_tensor()
    assert torch.equal(whole, torch.full((4, 4), 8.0))
    assert other.placements == (Shard(1),)
    assert [record.op_name for record in mode._root_records][1:] == ["mul", "add"]
    assert len(collectives([mode._root_records[0]])) == 1 == mode.get_total_counts()
    with CommDebugMode() as late:
        scaled.redistribute(placements=[Shard(0)])
    assert [type(record).__name__ for record in late._root_records] == ["RedistributeCall"]
    assert late.get_comm_counts() == {"differentiable_reduce_scatter": 1}


def test_implicit_move_is_inside_the_operator() -> None:
    """An operand that must move is gathered between the operator's beginning and its end."""
    mesh = make_mesh()
    x, w = (distribute_tensor(torch.ones(rows, columns), mesh, [Shard(0)])
            for rows, columns in ((64, 8), (8, 4)))
    with CommDebugMode() as mode:
        result = x @ w
    assert torch.equal(result.full_tensor(), torch.full((64, 4), 8.0))
    assert [record.op_name for record in mode._root_records] == ["matmul"]
    (gathered,) = collectives(mode._root_records)
    assert (gathered.collective_type, gathered.input_shape, gathered.output_shape) == (
        ALL_GATHER, (2, 4), (8, 4))


def test_explicit_move_has_no_operator() -> None:
    """A redistribution that the user asks for stands alone, shown from level 3."""
    x = distribute_tensor(torch.arange(32.0).reshape(8, 4), make_mesh(), [Shard(0)])
    with CommDebugMode() as mode:
        x.full_tensor()
    (move,) = mode._root_records
    assert (move.src_placements, move.dst_placements, move.tensor_shape) == (
        (Shard(0),), (Replicate(),), (8, 4))
    assert mode.generate_tracing_table(1).split("\n")[2:] == [
        "Collective           Collective(differentiable_all_gather_concat) group_size=4 "
        "input_shape=(2, 4) output_shape=(8, 4)"]
    assert mode.generate_tracing_table(3).split("\n")[2].startswith(
        "Redistribute         Redistribute(Shard(dim=0) -> Replicate()) tensor_shape=(8, 4) "
        "explicit at ")


def test_nothing_is_kept_alive() -> None:
    """C17, first half: after the exit the mode holds no parameter and no activation."""
    model, x = make_model(), make_input()
    with CommDebugMode(module=model) as mode:
        output = model(x)
        summed = DTensor.from_local(x.detach(), make_mesh(), [Partial()]) * 2
        output.sum().backward()
    assert weakref.getweakrefcount(summed) == 0
    held = [weakref.ref(one) for one in (model, x, output, summed, *model.parameters())]
    del model, x, output, summed
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)
    assert mode.get_total_counts() == 2

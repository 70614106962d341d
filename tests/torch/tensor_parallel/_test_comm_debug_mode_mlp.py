"""What two ranks see of the specification's MLP: fc1 column-wise, gelu, fc2 row-wise."""
import json
import tempfile
from pathlib import Path

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    RowwiseParallel,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.debug._collective_tracer import COLLECTIVE_METHODS
from hyper_parallel.demo import TwoLayerMLP

NPROC = 2
ALL_REDUCE = "differentiable_all_reduce"
HIDDEN, INTERMEDIATE, BATCH = 16, 32, 4

TABLE_0 = """\
Type                 Detail
--------------------------------------------------------------------------------
  Collective         Collective(differentiable_all_reduce) group_size=2 input_shape=(4, 16) \
output_shape=(4, 16)"""

TABLE_1 = """\
Type                 Detail
--------------------------------------------------------------------------------
Op                   Op(linear) inputs=[DTensor[4, 16], DTensor[32, 16]] outputs=[DTensor[4, 32]]
Op                   Op(gelu) inputs=[DTensor[4, 32]] outputs=[DTensor[4, 32]]
Op                   Op(linear) inputs=[DTensor[4, 32], DTensor[16, 32]] outputs=[DTensor[4, 16]]
  Collective         Collective(differentiable_all_reduce) group_size=2 input_shape=(4, 16) \
output_shape=(4, 16)"""

TABLE_2 = """\
Type                 Detail
--------------------------------------------------------------------------------
Module               Module((root)) [enter]
  Module             Module(fc1) [enter]
    Op               Op(linear) inputs=[DTensor[4, 16], DTensor[32, 16]] outputs=[DTensor[4, 32]]
  Op                 Op(gelu) inputs=[DTensor[4, 32]] outputs=[DTensor[4, 32]]
  Module             Module(fc2) [enter]
    Op               Op(linear) inputs=[DTensor[4, 32], DTensor[16, 32]] outputs=[DTensor[4, 16]]
      Collective     Collective(differentiable_all_reduce) group_size=2 input_shape=(4, 16) \
output_shape=(4, 16)"""


def make_model() -> nn.Module:
    """The model on the two ranks, with equal weights wherever it is made."""
    torch.manual_seed(0)
    mesh = init_device_mesh((2,), ("tp",))
    return parallelize_module(TwoLayerMLP(HIDDEN, INTERMEDIATE), mesh,
                              {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})


def make_input() -> torch.Tensor:
    """The same batch on each rank."""
    return torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_comm_debug_mode_captures_collectives() -> None:
    """The forward pass has one all-reduce, and the mode changes no bit of the result."""
    model, x = make_model(), make_input()
    expected = model(x)
    with CommDebugMode() as mode:
        output = model(x)
    assert mode.get_total_counts() == 1
    assert mode.get_comm_counts() == {ALL_REDUCE: 1}
    assert mode.incomplete is None
    assert torch.equal(output, expected)


def test_comm_debug_mode_debug_string() -> None:
    """The tables are the specification's, to the character."""
    model = make_model()
    with CommDebugMode() as mode:
        assert mode.generate_comm_debug_tracing_table() == "(no operations recorded)"
        model(make_input())
    assert mode.generate_comm_debug_tracing_table() == TABLE_1
    assert mode.generate_comm_debug_tracing_table(noise_level=0) == TABLE_0


def test_comm_debug_mode_tracing_table() -> None:
    """What a level shows, the next one shows too."""
    model = make_model()
    with CommDebugMode(module=model) as mode:
        model(make_input())
    tables = [mode.generate_tracing_table(level).split("\n") for level in range(4)]
    assert [len(lines) for lines in tables] == [3, 6, 9, 10]
    for lower, higher in zip(tables, tables[1:]):
        shown = [line.strip().split(" ", 1)[1].strip() for line in higher[2:]]
        for line in lower[2:]:
            detail = line.strip().split(" ", 1)[1].strip()
            assert any(other.startswith(detail) for other in shown), detail


def test_comm_debug_mode_with_module_tracker() -> None:
    """One mode with a module gives all three tables; layouts and JSON are right."""
    model = make_model()
    with CommDebugMode(module=model) as mode:
        model(make_input())
    assert [mode.generate_tracing_table(level) for level in range(3)] == [TABLE_0, TABLE_1, TABLE_2]
    assert mode.get_sharding_info() == {"fc1.weight": "Shard(dim=0)", "fc2.weight": "Shard(dim=1)"}
    assert mode.get_parameter_info()["fc1.weight"]["shape"] == (INTERMEDIATE, HIDDEN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        mode.generate_json_dump(path, noise_level=1)
        data = json.loads(path.read_text())
    assert (data["comm_counts"], data["total_counts"]) == ({ALL_REDUCE: 1}, 1)
    assert data["sharding_info"] == mode.get_sharding_info()
    last = data["records"][-1]
    assert (last["type"], last["op_name"]) == ("op", "linear")
    assert last["inputs"] == [
        {"shape": [BATCH, INTERMEDIATE], "dtype": "torch.float32", "is_dtensor": True,
         "placements": ["Shard(dim=1)"]},
        {"shape": [HIDDEN, INTERMEDIATE], "dtype": "torch.float32", "is_dtensor": True,
         "placements": ["Shard(dim=1)"]}]
    assert last["outputs"][0]["placements"] == ["Partial(sum)"]
    assert [child["type"] for child in last["children"]] == ["collective"]


def test_comm_debug_mode_restores_platform() -> None:
    """Each of the platform's methods is the original object again."""
    cls = type(get_platform())
    before = {name: cls.__dict__[name] for name in COLLECTIVE_METHODS}
    model = make_model()
    with CommDebugMode(module=model):
        model(make_input())
        assert all(cls.__dict__[name] is not orig for name, orig in before.items())
    for name, orig in before.items():
        assert cls.__dict__[name] is orig


def test_comm_debug_mode_multiple_forwards() -> None:
    """Three forward passes count three times one."""
    model = make_model()
    with CommDebugMode() as once:
        model(make_input())
    with CommDebugMode() as mode:
        for _ in range(3):
            model(make_input())
    assert mode.get_total_counts() == 3 * once.get_total_counts() == 3
    assert mode.get_comm_counts() == {ALL_REDUCE: 3}

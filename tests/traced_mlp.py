"""What CommDebugMode shows of the specification's MLP on two ranks, on whichever framework."""
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel import CommDebugMode, get_platform
from hyper_parallel.core.dtensor.debug._collective_tracer import COLLECTIVE_METHODS

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


class TracedMLP(NamedTuple):
    """The six cases: fc1 column-wise, gelu, fc2 row-wise.

    Attributes:
        make_model: makes the model on the two ranks, with equal weights wherever it is made.
        make_input: makes the same batch on each rank.
        same: whether two results are equal to the bit.
        dtype: the framework's name of the element type.
        lacking: collectives that the platform does not have.
    """

    make_model: Callable[[], Any]
    make_input: Callable[[], Any]
    same: Callable[[Any, Any], bool]
    dtype: str
    lacking: frozenset[str] = frozenset()

    def captures_collectives(self) -> None:
        """The forward pass has one all-reduce, and the mode changes no bit of the result."""
        model, x = self.make_model(), self.make_input()
        expected = model(x)
        with CommDebugMode() as mode:
            output = model(x)
        assert mode.get_total_counts() == 1
        assert mode.get_comm_counts() == {ALL_REDUCE: 1}
        assert mode.incomplete is None
        assert self.same(output, expected)

    def debug_string(self) -> None:
        """The tables are the specification's, to the character."""
        model = self.make_model()
        with CommDebugMode() as mode:
            assert mode.generate_comm_debug_tracing_table() == "(no operations recorded)"
            model(self.make_input())
        assert mode.generate_comm_debug_tracing_table() == TABLE_1
        assert mode.generate_comm_debug_tracing_table(noise_level=0) == TABLE_0

    def tracing_table(self) -> None:
        """What a level shows, the next one shows too."""
        model = self.make_model()
        with CommDebugMode(module=model) as mode:
            model(self.make_input())
        tables = [mode.generate_tracing_table(level).split("\n") for level in range(4)]
        assert [len(lines) for lines in tables] == [3, 6, 9, 10]
        for lower, higher in zip(tables, tables[1:]):
            shown = [line.strip().split(" ", 1)[1].strip() for line in higher[2:]]
            for line in lower[2:]:
                detail = line.strip().split(" ", 1)[1].strip()
                assert any(other.startswith(detail) for other in shown), detail

    def with_module_tracker(self) -> None:
        """One mode with a module gives all three tables; layouts and JSON are right."""
        model = self.make_model()
        with CommDebugMode(module=model) as mode:
            model(self.make_input())
        assert [mode.generate_tracing_table(level) for level in range(3)] == [
            TABLE_0, TABLE_1, TABLE_2]
        assert mode.get_sharding_info() == {
            "fc1.weight": "Shard(dim=0)", "fc2.weight": "Shard(dim=1)"}
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
            {"shape": [rows, INTERMEDIATE], "dtype": self.dtype, "is_dtensor": True,
             "placements": ["Shard(dim=1)"]} for rows in (BATCH, HIDDEN)]
        assert last["outputs"][0]["placements"] == ["Partial(sum)"]
        assert [child["type"] for child in last["children"]] == ["collective"]

    def restores_platform(self) -> None:
        """Each of the platform's methods is the original object again."""
        cls = type(get_platform())
        before = {name: cls.__dict__[name] for name in COLLECTIVE_METHODS if name in cls.__dict__}
        assert set(COLLECTIVE_METHODS) - before.keys() == self.lacking
        model = self.make_model()
        with CommDebugMode(module=model):
            model(self.make_input())
            assert all(cls.__dict__[name] is not orig for name, orig in before.items())
        for name, orig in before.items():
            assert cls.__dict__[name] is orig

    def multiple_forwards(self) -> None:
        """Three forward passes count three times one."""
        model = self.make_model()
        with CommDebugMode() as once:
            model(self.make_input())
        with CommDebugMode() as mode:
            for _ in range(3):
                model(self.make_input())
        assert mode.get_total_counts() == 3 * once.get_total_counts() == 3
        assert mode.get_comm_counts() == {ALL_REDUCE: 3}

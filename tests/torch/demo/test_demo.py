"""The demo prints the tables of the specification and writes a trace that says the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch.launcher import ROOT, Case, run_case, worker_cases

REDUCE = ("Collective(differentiable_all_reduce) group_size=2 input_shape=(4, 16) "
          "output_shape=(4, 16)")
FIRST = "Op(linear) inputs=[DTensor[4, 16], DTensor[32, 16]] outputs=[DTensor[4, 32]]"
GELU = "Op(gelu) inputs=[DTensor[4, 32]] outputs=[DTensor[4, 32]]"
SECOND = "Op(linear) inputs=[DTensor[4, 32], DTensor[16, 32]] outputs=[DTensor[4, 16]]"
# What the levels from 3 on add to a collective.
TRAFFIC = ("axis=tp ranks=(0, 1) dtype=torch.float32 reduce_op=sum "
           "input_bytes=256 output_bytes=256 wire_bytes=256")
SUM = "Redistribute(Partial(sum) -> Replicate()) tensor_shape=(4, 16)"

PRINTED = f"""\
Mesh: DeviceMesh((tp=2), rank_list=(0, 1))

Forward pass, noise_level=0:

Type                 Detail
--------------------------------------------------------------------------------
  Collective         {REDUCE}

Forward pass, noise_level=1:

Type                 Detail
--------------------------------------------------------------------------------
Op                   {FIRST}
Op                   {GELU}
Op                   {SECOND}
  Collective         {REDUCE}

Forward pass, noise_level=2:

Type                 Detail
--------------------------------------------------------------------------------
Module               Module((root)) [enter]
  Module             Module(fc1) [enter]
    Op               {FIRST}
  Op                 {GELU}
  Module             Module(fc2) [enter]
    Op               {SECOND}
      Collective     {REDUCE}

Forward and backward pass, noise_level=3:

Type                 Detail
--------------------------------------------------------------------------------
Module               Module((root)) [enter]
  Module             Module(fc1) [enter]
    Op               {FIRST}
      Redistribute   {SUM} phase=backward implicit for argument 0 of linear
        Collective   {REDUCE} phase=backward {TRAFFIC}
  Op                 {GELU}
  Module             Module(fc2) [enter]
    Op               {SECOND}
      Redistribute   {SUM} explicit
        Collective   {REDUCE} {TRAFFIC}

Counts: {{'differentiable_all_reduce': 2}}, in total 2

Sharding:
  fc1.weight: Shard(dim=0)
  fc2.weight: Shard(dim=1)

The whole trace as JSON: """


def run_demo(*arguments: str) -> subprocess.CompletedProcess:
    """Runs the demo as a user does."""
    return subprocess.run([sys.executable, "-m", "hyper_parallel.demo", *arguments], cwd=ROOT,
                          text=True, capture_output=True, timeout=180, check=False)


def test_two_ranks_print_the_tables_of_the_specification(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = run_demo("--json", str(trace))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{PRINTED}{trace}\n"
    data = json.loads(trace.read_text("utf-8"))
    assert data["comm_counts"] == {"differentiable_all_reduce": 2}
    assert data["sharding_info"] == {"fc1.weight": "Shard(dim=0)", "fc2.weight": "Shard(dim=1)"}


def test_a_path_that_cannot_be_written_is_known_before_ranks_start(tmp_path: Path) -> None:
    done = run_demo("--json", str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert f"the trace cannot be written to '{tmp_path}': Is a directory" in done.stderr


def test_a_number_of_ranks_without_a_mesh_is_refused() -> None:
    done = run_demo("--nproc", "3")
    assert done.returncode == 2 and "invalid choice: 3" in done.stderr


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_demo.py"))
def test_four_ranks(case: Case) -> None:
    run_case(case)

"""DTensors in torch.distributed.checkpoint, on four ranks and between worlds of two sizes."""
from pathlib import Path

import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_checkpoint.py"))
def test_checkpoint(case: Case) -> None:
    run_case(case)


@pytest.mark.parametrize("before, after", [((2, 2), (2,)), ((2,), (4,))], ids=str)
def test_another_number_of_ranks(before: tuple, after: tuple, tmp_path: Path) -> None:
    for name, shape in (("write", before), ("go_on", after)):
        file = tmp_path / f"_test_{name}.py"
        file.write_text(f"from tests.torch.dtensor.checkpoint_worlds import {name}\n\n\n"
                        f"def test_{name}() -> None:\n"
                        f"    {name}({str(tmp_path / 'saved')!r}, {shape!r})\n")
        nproc = 1
        for size in shape:
            nproc *= size
        run_case(Case(file, f"test_{name}", nproc, timeout=60))

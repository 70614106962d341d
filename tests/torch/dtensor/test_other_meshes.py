"""Moves between meshes of one root, on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_other_meshes.py"))
def test_other_meshes(case: Case) -> None:
    run_case(case)

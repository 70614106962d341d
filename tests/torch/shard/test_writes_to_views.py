"""Writes to views of DTensors, on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_writes_to_views.py"))
def test_writes_to_views(case: Case) -> None:
    run_case(case)

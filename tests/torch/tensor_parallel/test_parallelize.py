"""Parallel modules on four ranks against the same modules in one process."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_parallelize.py"))
def test_parallelize(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

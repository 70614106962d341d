"""What errors say, on two ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_errors.py"))
def test_errors(case: Case) -> None:
    run_case(case)

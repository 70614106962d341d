"""Random operators on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_random.py"))
def test_random(case: Case) -> None:
    run_case(case)

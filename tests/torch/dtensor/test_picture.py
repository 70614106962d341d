"""Pictures of shardings on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_picture.py"))
def test_picture(case: Case) -> None:
    run_case(case)

"""Rules for a user's own operators, on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_extension.py"))
def test_extension(case: Case) -> None:
    run_case(case)

"""A rank that never comes on MindSpore, two ranks."""
import pytest

from tests.mindspore.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_missing.py"))
def test_missing(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

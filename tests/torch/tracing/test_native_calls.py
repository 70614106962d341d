"""Calls of torch.distributed that the program makes itself, two ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_native_calls.py"))
def test_native_calls(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

"""Traces brought together, and what the library sends beside its moves, three ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_gather.py"))
def test_gather(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

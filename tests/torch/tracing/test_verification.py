"""Collectives that the ranks agree on before they send, three ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_verification.py"))
def test_verification(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

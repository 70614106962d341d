"""CommDebugMode(fingerprints=True), four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_fingerprints.py"))
def test_fingerprints(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

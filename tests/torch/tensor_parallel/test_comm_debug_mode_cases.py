"""CommDebugMode where other tools went wrong, four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_comm_debug_mode_cases.py"))
def test_comm_debug_mode_cases(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

"""CommDebugMode's bytes, axes, phases, owners and reasons, four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_comm_debug_mode_traffic.py"))
def test_comm_debug_mode_traffic(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

"""What operators send, on two ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_traffic.py"))
def test_traffic(case: Case) -> None:
    run_case(case)

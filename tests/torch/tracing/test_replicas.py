"""check_replicas, on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_replicas.py"))
def test_replicas(case: Case) -> None:
    run_case(case)

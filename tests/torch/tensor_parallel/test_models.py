"""Models from elsewhere, parallelized by the plan that auto_plan proposes."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_models.py"))
def test_models(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

"""What else may happen to a parallel module: it is saved, loaded, copied, cast, frozen, hooked."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_parallel_module.py"))
def test_parallel_module(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

"""Data parallelism, beside PyTorch's."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_replicate.py"))
def test_replicate(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

"""Conversion from and to PyTorch's own DTensor, on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_translation.py"))
def test_translation(case: Case) -> None:
    run_case(case)

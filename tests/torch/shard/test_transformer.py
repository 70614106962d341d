"""A transformer on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_transformer.py"))
def test_transformer(case: Case) -> None:
    run_case(case)

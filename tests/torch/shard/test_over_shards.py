"""Reductions and losses over a sharded dim on four ranks."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_over_shards.py"))
def test_over_shards(case: Case) -> None:
    run_case(case)

"""Random graphs of operators, on four ranks; ``GRAPHS=1000 GRAPHS_SEED=3`` for a longer search."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_graphs.py"))
def test_graphs(case: Case) -> None:
    run_case(case)

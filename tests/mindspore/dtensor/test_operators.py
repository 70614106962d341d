"""Operators, and graph mode, which has none, on MindSpore, two ranks."""
import pytest

from tests.mindspore.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(
    __file__, "_test_operators.py", "_test_graph_mode.py"))
def test_operators(case: Case) -> None:
    """Each case of the worker files."""
    run_case(case)

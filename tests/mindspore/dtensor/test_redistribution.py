"""Meshes, groups, redistribution and styles on MindSpore, four ranks."""
import pytest

from tests.mindspore.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(
    __file__, "_test_redistribution.py", "../tensor_parallel/_test_styles.py"))
def test_redistribution(case: Case) -> None:
    """Each case of the worker files."""
    run_case(case)

"""Meshes, groups and redistribution on MindSpore, four ranks."""
import pytest

from tests.mindspore.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_redistribution.py"))
def test_redistribution(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)

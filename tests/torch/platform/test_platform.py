"""The torch adapter on four real ranks with gloo."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_collectives.py"))
def test_collectives(case: Case) -> None:
    """Values against the dense result."""
    run_case(case)


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_gradients.py"))
def test_gradients(case: Case) -> None:
    """First and second derivatives against the dense ones."""
    run_case(case)


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_groups.py"))
def test_groups(case: Case) -> None:
    """Made by their members alone, in any order."""
    run_case(case)


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_missing_member.py"))
def test_missing_member(case: Case) -> None:
    """An error instead of a hang."""
    run_case(case)

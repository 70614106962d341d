"""DeviceMesh on four real ranks with gloo."""
import pytest

from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_device_mesh.py"))
def test_device_mesh(case: Case) -> None:
    """Groups, order, lives."""
    run_case(case)

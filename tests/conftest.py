"""What every test of the project shares."""

from tests.torch import launcher


def pytest_sessionfinish() -> None:
    """Ends the ranks that the session started."""
    launcher.close_all()

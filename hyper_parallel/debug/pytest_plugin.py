"""A pytest fixture for budgets of communication.

Switch it on in a ``conftest.py``::

    pytest_plugins = ["hyper_parallel.debug.pytest_plugin"]
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from hyper_parallel.core.dtensor.debug import CommDebugMode
from hyper_parallel.debug._budget import assert_comms


@contextmanager
def _budget(module: Any = None, **budget: Any) -> Iterator[CommDebugMode]:
    with CommDebugMode(module=module) as mode:
        yield mode
    assert_comms(mode, **budget)


@pytest.fixture
def comm_budget() -> Callable[..., AbstractContextManager[CommDebugMode]]:
    """A context that traces what runs inside and fails unless it keeps to its budget.

    ::

        def test_step(comm_budget):
            with comm_budget(module=model, all_reduce=2, bytes_at_most=4096):
                model(x).sum().backward()

    It takes ``module`` and what ``assert_comms`` takes, and gives the mode. An exception inside
    passes as it is.
    """
    return _budget

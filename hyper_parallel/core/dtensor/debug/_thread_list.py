"""A list of which each thread has its own."""
from __future__ import annotations

import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ThreadList(threading.local, Generic[Item]):
    """Empty at first on every thread.

    Attributes:
        items: the current thread's list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] = []

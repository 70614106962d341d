"""Notes in the store of a process group."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from torch import distributed as dist

from hyper_parallel.platform.torch.groups import store_of


_NO_NOTE = "-"


class StoreBoard:
    """The notes of one group's members; see ``Board``.

    Only operations of the store that return at once are used: one that waits would hold the
    store's connection, which all threads and groups of the process share.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def write(self, key: str, text: str) -> None:
        """Leave a note."""
        self._store.set(key, text)

    def read(self, keys: Sequence[str]) -> Optional[list[str]]:
        """The notes under all of the keys, or None."""
        wanted = list(keys)
        if not self._store.check(wanted):
            return None
        return [note.decode() for note in self._store.multi_get(wanted)]

    def peek(self, key: str) -> Optional[str]:
        """The note under a key, or None."""
        # The one operation that gives a value and never waits for it to come: it replaces a note
        # that says "-" by itself, and gives "-" where there is none.
        note = self._store.compare_set(key, _NO_NOTE, _NO_NOTE).decode()
        return None if note == _NO_NOTE else note

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys have notes."""
        return self._store.check(list(keys))

    def settle(self, key: str, text: str) -> str:
        """Leave the first note."""
        return self._store.compare_set(key, "", text).decode()

    def erase(self, keys: Sequence[str]) -> None:
        """Remove notes."""
        for key in keys:
            self._store.delete_key(key)


def board_of(group: Any) -> Optional[StoreBoard]:
    """The board of ``group``; see ``Platform.board_of``."""
    store = store_of(group)
    return None if store is None else StoreBoard(dist.PrefixStore("hyper_parallel_board", store))

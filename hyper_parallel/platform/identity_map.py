"""Values for objects that are known by identity and held weakly."""
from __future__ import annotations

import weakref
from typing import Any, Generic, Optional, TypeVar

Value = TypeVar("Value")


class IdentityMap(Generic[Value]):
    """What is known of some objects, for as long as these live.

    Nothing is set on an object, so that it can be pickled, and ``==`` is not asked, which
    compares tensors by their elements.
    """

    __slots__ = ("_of_id",)

    def __init__(self) -> None:
        self._of_id: dict[int, tuple[weakref.ref, Value]] = {}

    def __bool__(self) -> bool:
        return bool(self._of_id)

    def get(self, key: Any) -> Optional[Value]:
        """The value of an object, or None."""
        entry = self._of_id.get(id(key))
        return None if entry is None or entry[0]() is not key else entry[1]

    def set(self, key: Any, value: Value) -> None:
        """Give an object a value, in place of the one it had."""
        of_id, number = self._of_id, id(key)

        def forget(reference: weakref.ref) -> None:
            # The id may belong to a newer object by now.
            if of_id.get(number, (None,))[0] is reference:
                del of_id[number]

        of_id[number] = (weakref.ref(key, forget), value)

    def discard(self, key: Any) -> None:
        """Forget an object, if it is known."""
        if self.get(key) is not None:
            del self._of_id[id(key)]

    def clear(self) -> None:
        """Let go of every object."""
        self._of_id.clear()

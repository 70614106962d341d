"""Notes on memory; see ``history_adapter.py``.

MindSpore gives each tensor a storage object of its own, so the note is kept on those tensors that
share the memory when it is made.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence

from mindspore import Tensor

_NOTE = "_hyper_parallel_copy"


def note_copy(memory: Tensor, parts: Sequence[Tensor], note: Any) -> None:
    """Set the note on the parts that are views."""
    place = _address(memory)
    for part in parts:
        if _address(part) == place:
            setattr(part, _NOTE, note)


def noted_copy(tensor: Tensor) -> Optional[tuple[Any, None]]:
    """The note; the tensor cannot be made again of a view of it."""
    note = getattr(tensor, _NOTE, None)
    return None if note is None else (note, None)


def shares_too_much(result: Tensor, func: Callable, args: Sequence[Any],
                    kwargs: Mapping[str, Any]) -> bool:
    """Not known: there are no tensors without data to try it with."""
    del result, func, args, kwargs
    return False


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

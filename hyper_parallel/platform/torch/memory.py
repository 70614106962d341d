"""Notes on memory; see ``history_adapter.py``.

A storage keeps its Python object, attributes included, for as long as any tensor uses it: views,
``detach()`` and ``.data`` lead to the same one.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from hyper_parallel.platform.torch.dtensor_base import undressed

_NOTE = "_hyper_parallel_copy"


def note_copy(memory: Tensor, parts: Sequence[Tensor], note: Any) -> None:
    """Set the note on the storage, with all that the tensor can be made of again."""
    with undressed():
        storage = _storage(memory)
        if storage is not None and any(_storage(part) is storage for part in parts):
            setattr(storage, _NOTE, (note, memory.dtype, memory.storage_offset(), memory.shape,
                                     memory.stride()))


def noted_copy(tensor: Tensor) -> Optional[tuple[Any, Tensor]]:
    """The note, and the tensor again."""
    with undressed():
        storage = _storage(tensor)
        found = getattr(storage, _NOTE, None)
        if found is None:
            return None
        note, dtype, *place = found
        return note, torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, *place)


def shares_too_much(result: Tensor, func: Callable, args: Sequence[Any],
                    kwargs: Mapping[str, Any]) -> bool:
    """Whether the parts share memory and the whole tensors, tried without data, do not."""
    tensor = args[0] if args else next(iter(kwargs.values()))
    with undressed():
        if _storage(result) is not _storage(tensor):
            return False
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    with torch.no_grad():
        viewed = func(whole, *args[1:]) if args else func(**{**kwargs, next(iter(kwargs)): whole})
    return _storage(viewed) is not _storage(whole)


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None

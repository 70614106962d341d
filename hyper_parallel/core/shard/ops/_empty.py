"""Zeros for a rank whose part is empty, where the kernel takes none or forgets an operand."""
from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

from hyper_parallel.platform import get_platform

_Tensor = get_platform().Tensor


def linked_zeros(shape: Sequence[int], dtype: Any = None) -> Callable:
    """A function of an operator's arguments that gives zeros of ``shape``.

    The zeros depend on every operand, so that this rank takes part in the collectives of all
    their gradients.
    """
    def zeros(*args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors_in((*args, *kwargs.values())))
        result = tensors[0].new_zeros(shape, dtype=dtype or tensors[0].dtype)
        if result.is_floating_point() or result.is_complex():
            for tensor in tensors:
                if tensor.requires_grad:
                    result = result + tensor.sum() * 0
        return result

    return zeros


def _tensors_in(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)

"""Zeros for a rank whose part is empty, where the kernel takes none or forgets an operand."""
from __future__ import annotations

from typing import Any, Callable, Iterator, Optional, Sequence

from hyper_parallel.platform import get_platform

_Tensor = get_platform().Tensor


def linked_zeros(shape: Sequence[int], dtype: Any = None,
                 sample: Optional[Callable[[Any], Any]] = None) -> Callable:
    """A function of an operator's arguments that gives zeros of ``shape``.

    The zeros depend on every operand, so that this rank takes part in the collectives of all
    their gradients.

    Args:
        shape: the local shape.
        dtype: dtype of the zeros, by default that of the first operand.
        sample: makes of a matrix like the first operand what the operator would, so that this
            rank gets the dtype that the others get under autocast.
    """
    def zeros(*args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors_in((*args, *kwargs.values())))
        like = tensors[0] if sample is None else sample(tensors[0].detach().new_zeros((1, 1)))
        result = tensors[0].new_zeros(shape, dtype=dtype or like.dtype)
        if result.is_floating_point() or result.is_complex():
            for tensor in tensors:
                if tensor.requires_grad:
                    result = result + (tensor.sum() * 0).to(result.dtype)
        return result

    return zeros


def product_of(matrix: Any) -> Any:
    """For operators that are products of matrices, whatever else they are."""
    return matrix @ matrix


def _tensors_in(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)

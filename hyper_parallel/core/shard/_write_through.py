"""Writing to tensors that had to be copied: what they were copied from is written as well.

A view of a tensor shares its memory. Where a DTensor had to be moved first, as for ``x[1]`` of a
tensor that is split along dim 0, the result is a view of the moved copy. The memory of the copy is
noted as one, so that a write to any view of it goes on to the tensor itself.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.tensor_redistribution import redistribute
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.platform import get_platform

platform = get_platform()
_Tensor = platform.Tensor


class CopiedFrom(NamedTuple):
    """Noted of the memory of a copy.

    Attributes:
        tensor: what was copied.
        restore: gives the local tensor of ``tensor`` that says what the copy says now.
    """

    tensor: DTensor
    restore: Callable[[Any], Any]


class Write(NamedTuple):
    """A write that has to go on: into what, and how the copy that was written lies."""

    source: CopiedFrom
    copy: Any


def note_moved(tensor: DTensor, copy: Any, layout: Layout, result: Any) -> None:
    """Note that ``copy``, of which ``result`` may be views, is ``tensor`` in another layout."""
    shape, back = tensor._spec.shape, tensor._spec.layout

    def restore(written: Any) -> Any:
        return redistribute(written, TensorSpec(layout, shape), back)

    parts = result if isinstance(result, (tuple, list)) else (result,)
    platform.note_copy(copy, [part for part in parts if isinstance(part, _Tensor)],
                       CopiedFrom(tensor, restore))


def writes_to_copies(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Write]:
    """The copies that an operator which writes to its first argument is about to write to.

    Raises:
        RuntimeError: the write cannot go on to what was copied, since gradients are recorded.
    """
    target = args[0] if args else next(iter(kwargs.values()), None)
    writes: list[Write] = []
    for one in target if isinstance(target, (tuple, list)) else (target,):
        found = platform.noted_copy(one) if isinstance(one, _Tensor) else None
        if found is not None:
            source, copy = found
            if copy is None or any(map(_needs_gradient, (source.tensor, *args, *kwargs.values()))):
                raise RuntimeError(_refusal(name, source.tensor))
            writes.append(Write(source, copy))
    return writes


def write_through(writes: Sequence[Write]) -> None:
    """Let writes to copies go on to what was copied, and further where that is a copy as well."""
    for source, copy in writes:
        target = source.tensor
        further = platform.noted_copy(target)
        overwrite(target, source.restore(copy))
        if further is not None:
            write_through([Write(*further)])


def write_back(target: DTensor, whole: Any, layout: Layout) -> None:
    """Copy this rank's part of ``whole``, which lies replicated as ``layout``, into ``target``."""
    spec = target._spec
    overwrite(target, redistribute(whole, TensorSpec(layout, spec.shape), spec.layout))


def overwrite(target: Any, part: Any) -> None:
    """Copy ``part`` into this rank's part of ``target``."""
    platform.run_undressed(_copy, (target, part), {})


def _copy(target: Any, part: Any) -> None:
    target.copy_(part)


def _needs_gradient(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_needs_gradient, value))
    return isinstance(value, _Tensor) and bool(
        platform.run_undressed(platform.needs_gradient, (value,), {}))


def _refusal(name: str, tensor: DTensor) -> str:
    return (f"{name!r} writes to a view of a tensor of shape {tuple(tensor.shape)} with "
            f"{tensor.layout!r}, which had to be moved to be viewed like this; the view is a copy, "
            "so the tensor would not change, nor its gradient. Assign by index (x[1] = value), "
            "redistribute the tensor first, write under no_grad, or write to a clone of the view.")

"""Reads what a trace remembers out of the arguments and results of a call."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import TensorInfo
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform import get_platform

platform = get_platform()

_TENSOR_TYPES = (DTensor, platform.Tensor)
_dtype_names: dict[Any, str] = {}

# Where the group stands in the signatures of the platform's collectives.
_GROUP_POSITION = {
    "differentiable_all_gather_concat": 1,
    "differentiable_all_to_all": 2,
    "differentiable_all_reduce": 2,
    "differentiable_reduce_scatter": 4,
    "differentiable_all_to_all_single": 3,
    "differentiable_all_to_all_single_async": 3,
}


def tensors_in(*values: Any) -> Iterator[Any]:
    """The tensors among values, in order, through tuples, lists and the values of dicts."""
    for value in values:
        if isinstance(value, _TENSOR_TYPES):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def tensor_info(tensor: Any) -> TensorInfo:
    """What is remembered of one tensor. Reads metadata only, so nothing is communicated."""
    dtype = tensor.dtype
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype)
    if isinstance(tensor, DTensor):
        return TensorInfo(tuple(tensor.shape), name, True, tensor.placements,
                          tuple(tensor.device_mesh.mesh_shape))
    return TensorInfo(tuple(tensor.shape), name)


def first_tensor_info(*values: Any) -> TensorInfo | None:
    """What is remembered of the first tensor among values; None without one."""
    for tensor in tensors_in(*values):
        return tensor_info(tensor)
    return None


def collective_group_size(method_name: str, args: tuple, kwargs: dict) -> int | None:
    """Number of ranks in the group of a collective, or None where no argument is a group.

    The group is looked for under its name, then where the signature has it, then among all other
    arguments: it is whatever is no tensor and has a ``size()``. None in the group's place is the
    default group.
    """
    position = _GROUP_POSITION.get(method_name, len(args))
    expected = [kwargs["group"]] if "group" in kwargs else list(args[position:position + 1])
    for candidate in (*expected, *args, *kwargs.values()):
        size = _size_of(candidate)
        if size is not None:
            return size
    return platform.get_world_size() if expected == [None] else None


def _size_of(candidate: Any) -> int | None:
    if isinstance(candidate, _TENSOR_TYPES):
        return None
    size = getattr(candidate, "size", None)
    size = size() if callable(size) else None
    return size if isinstance(size, int) else None

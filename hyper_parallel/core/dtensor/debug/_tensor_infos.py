"""Reads what a trace remembers out of the arguments and results of a call."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import TensorInfo
from hyper_parallel.core.dtensor.debug._traffic import SIGNATURES
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.platform import get_platform

platform = get_platform()

_TENSOR_TYPES = (DTensor, platform.Tensor)
# What most other arguments are: one look tells them from tensors.
_NO_TENSORS = frozenset({type(None), bool, int, float, str})


def look(*values: Any) -> tuple[list[Any], list[TensorInfo]]:
    """The tensors in values, and what is remembered of each.

    They are found in order, through tuples, lists and the values of dicts. Only metadata is read,
    so nothing is communicated.
    """
    tensors: list[Any] = []
    infos: list[TensorInfo] = []
    # Read from the local tensor, the dtype is the same and much cheaper to come by.
    platform.run_undressed(_look, (values, tensors, infos), {})
    return tensors, infos


def _look(values: Iterable[Any], tensors: list[Any], infos: list[TensorInfo]) -> None:
    for value in values:
        kind = type(value)
        if kind is DTensor:
            tensors.append(value)
            infos.append(_dtensor_info(value._spec, value.dtype))
        elif kind in _NO_TENSORS:
            continue
        elif isinstance(value, _TENSOR_TYPES):
            tensors.append(value)
            infos.append(_dtensor_info(value._spec, value.dtype) if isinstance(value, DTensor)
                         else _plain_info(value.shape, value.dtype))
        elif isinstance(value, (tuple, list)):
            _look(value, tensors, infos)
        elif isinstance(value, dict):
            _look(value.values(), tensors, infos)


def tensor_info(tensor: Any) -> TensorInfo:
    """What is remembered of one tensor."""
    return look(tensor)[1][0]


def local_info(*values: Any) -> tuple[TensorInfo, int] | None:
    """What this rank holds of the first tensor among values, and its bytes; None without one."""
    tensor = values[0] if values and type(values[0]) is platform.Tensor else None
    if tensor is None:
        tensor = next(iter(look(*values)[0]), None)
    return None if tensor is None else platform.run_undressed(_local_info, (tensor,), {})


def _local_info(tensor: Any) -> tuple[TensorInfo, int]:
    return _plain_info(tensor.shape, tensor.dtype), tensor.nbytes


# Tensors that look alike share their info: a trace has few kinds of them.
@lru_cache(maxsize=1024)
def _dtensor_info(spec: TensorSpec, dtype: Any) -> TensorInfo:
    return TensorInfo(tuple(spec.shape), str(dtype), True, spec.layout.placements,
                      tuple(spec.layout.device_mesh.mesh_shape))


@lru_cache(maxsize=1024)
def _plain_info(shape: Sequence[int], dtype: Any) -> TensorInfo:
    return TensorInfo(tuple(shape), str(dtype))


def collective_group(method_name: str, args: tuple, kwargs: dict) -> tuple[Any, int | None]:
    """The group of a collective and its number of ranks; (None, None) where no argument is one.

    The group is looked for under its name, then where the signature has it, then among all other
    arguments: it is whatever is no tensor and has a ``size()``. None in the group's place is the
    default group.
    """
    signature = SIGNATURES.get(method_name)
    position = len(args) if signature is None else signature.group
    expected = [kwargs["group"]] if "group" in kwargs else list(args[position:position + 1])
    for candidate in (*expected, *args, *kwargs.values()):
        size = _size_of(candidate)
        if size is not None:
            return candidate, size
    return None, platform.get_world_size() if expected == [None] else None


def group_ranks(group: Any, size: int | None) -> tuple[int, ...]:
    """Global ranks of a group in its order; empty where the platform does not know the group."""
    if size is None or (group is None and not platform.is_initialized()):
        return ()
    try:
        return tuple(platform.get_group_ranks(group))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return ()


def _size_of(candidate: Any) -> int | None:
    if isinstance(candidate, _TENSOR_TYPES):
        return None
    size = getattr(candidate, "size", None)
    size = size() if callable(size) else None
    return size if isinstance(size, int) else None

"""Reads what a trace remembers out of the arguments and results of a call."""
from __future__ import annotations

from collections.abc import Sequence
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


def tensors_in(values: Any) -> list[Any]:
    """The tensors in a value, in order, through tuples, lists and the values of dicts."""
    if type(values) is DTensor:
        return [values]
    found: list[Any] = []
    _collect((values,) if isinstance(values, _TENSOR_TYPES) else values, found)
    return found


def _collect(values: Any, found: list[Any]) -> None:
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return
    for value in values:
        kind = type(value)
        if kind is DTensor:
            found.append(value)
        elif kind not in _NO_TENSORS:
            if isinstance(value, _TENSOR_TYPES):
                found.append(value)
            else:
                _collect(value, found)


def tensor_info(tensor: Any) -> TensorInfo:
    """What is remembered of one tensor."""
    return tensor_infos((tensor,))[0]


def tensor_infos(tensors: Sequence[Any]) -> list[TensorInfo]:
    """What is remembered of tensors. Reads metadata only, so nothing is communicated."""
    # Read from the local tensor, the dtype is the same and much cheaper to come by.
    return platform.run_undressed(_infos, (tensors,), {}) if tensors else []


def local_info(*values: Any) -> tuple[TensorInfo, int] | None:
    """What this rank holds of the first tensor among values, and its bytes; None without one."""
    for tensor in tensors_in(values):
        return platform.run_undressed(_local_info, (tensor,), {})
    return None


def _local_info(tensor: Any) -> tuple[TensorInfo, int]:
    return _plain_info(tensor.shape, tensor.dtype), tensor.nbytes


def _infos(tensors: Sequence[Any]) -> list[TensorInfo]:
    return [_dtensor_info(tensor._spec, tensor.dtype) if isinstance(tensor, DTensor)
            else _plain_info(tensor.shape, tensor.dtype) for tensor in tensors]


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

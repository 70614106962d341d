"""A collective as it is issued, before it runs: its record, without what only the end tells."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import NATIVE, CollectiveCall
from hyper_parallel.core.dtensor.debug._tensor_infos import (
    group_ranks,
    local_info,
)
from hyper_parallel.core.dtensor.debug._traffic import (
    own_share,
    reduce_op,
    root_of,
    wire_bytes,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.traffic_adapter import NativeCall

platform = get_platform()


def issued(method_name: str, args: tuple, kwargs: dict, group: Any, size: int | None
           ) -> CollectiveCall:
    """The record of a collective of the platform.

    Args:
        method_name: the platform's method.
        args, kwargs: its arguments.
        group, size: what ``collective_group`` says of them.
    """
    sent, input_bytes = local_info(*args, kwargs) or (None, 0)
    record = CollectiveCall(
        method_name,
        group_size=size or 0,
        input_shape=sent and sent.shape,
        input_dtype=sent.dtype if sent else "",
        input_bytes=input_bytes,
        ranks=group_ranks(group, size),
        reduce_op=reduce_op(method_name, args, kwargs),
    )
    root = root_of(method_name, args, kwargs)
    if record.ranks and root is not None:
        record.peer = record.ranks[root]
    return record


def completed(record: CollectiveCall, args: tuple, kwargs: dict, group: Any, result: Any) -> None:
    """Add the result of a collective of the platform to its record."""
    method_name = record.collective_type
    received, record.output_bytes = local_info(result) or (None, 0)
    record.output_shape = received and received.shape
    if record.ranks:
        record.wire_bytes = wire_bytes(
            method_name, record.group_size, record.input_bytes, record.output_bytes,
            own_share(method_name, args, kwargs, group),
            record.peer is not None and record.peer == platform.get_rank())


def finished(kinds: dict[tuple, tuple], method_name: str, args: tuple, kwargs: dict,
             sized_group: tuple[Any, int | None], result: Any) -> CollectiveCall:
    """The record of a collective of the platform that ended.

    Args:
        kinds: what was found out of earlier ones; a trace has few kinds, and many of each.
        method_name, args, kwargs, result: the call.
        sized_group: what ``collective_group`` says of the arguments.
    """
    key = _kind(method_name, args, kwargs, result)
    known = None if key is None else kinds.get(key)
    if known is not None:
        return CollectiveCall(method_name, *known)
    group, size = sized_group
    record = issued(method_name, args, kwargs, group, size)
    completed(record, args, kwargs, group, result)
    if key is not None:
        kinds[key] = (record.group_size, record.input_shape, record.output_shape,
                      record.input_dtype, record.phase, record.input_bytes, record.output_bytes,
                      record.wire_bytes, record.axis, record.ranks, record.reduce_op,
                      record.sequence, record.peer)
    return record


def _kind(method_name: str, args: tuple, kwargs: dict, result: Any) -> tuple | None:
    """What the record of a call depends on; None where that cannot be told in short."""
    if kwargs or type(result) is not platform.Tensor:
        return None
    parts = [method_name, result.shape, result.dtype]
    for value in args:
        kind = type(value)
        if kind is platform.Tensor:
            parts += (value.shape, value.dtype)
        elif kind is list:
            parts.append(tuple(value))
        elif isinstance(value, platform.Tensor):
            return None
        else:
            parts.append(value)
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def issued_natively(call: NativeCall) -> CollectiveCall:
    """The record of a call of the framework's own interface."""
    size = platform.get_group_size(call.group)
    input_bytes, output_bytes = _bytes(call.inputs), _bytes(call.outputs)
    first = (*call.inputs, *call.outputs)[:1]
    return CollectiveCall(
        NATIVE + call.kind,
        group_size=size,
        input_shape=_first_shape(call.inputs),
        output_shape=_first_shape(call.outputs),
        input_dtype=str(first[0].dtype) if first else "",
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        wire_bytes=wire_bytes(call.kind, size, input_bytes, output_bytes, call.kept,
                              call.peer == platform.get_rank()),
        ranks=group_ranks(call.group, size),
        reduce_op=call.reduce_op,
        peer=call.peer,
    )


def _bytes(tensors: Sequence[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _first_shape(tensors: Sequence[Any]) -> tuple[int, ...] | None:
    return tuple(tensors[0].shape) if tensors else None

"""What the members of a group must have in common where they issue a collective."""
from __future__ import annotations

from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall

# Ranks may send and receive pieces of different sizes there.
_UNEVEN = frozenset({
    "differentiable_all_to_all_single", "differentiable_all_to_all_single_async",
    "native.all_to_all", "native.all_to_all_single"})
# The root alone has something to give, as many pieces as there are ranks.
_FROM_ROOT = frozenset({"native.scatter", "native.scatter_object_list"})
_BETWEEN_TWO = frozenset({
    "native.send", "native.recv", "native.send_object_list", "native.recv_object_list"})


def between_two(record: CollectiveCall) -> bool:
    """Whether it is a message, in which the other members of the group take no part."""
    return record.collective_type in _BETWEEN_TWO


def signature(record: CollectiveCall) -> list:
    """What is equal on all ranks of the group, as plain data: kind, dtype, shape, reduction, root.

    Exchanges of uneven pieces may differ in shape.
    """
    shape = record.output_shape if record.collective_type in _FROM_ROOT else record.input_shape
    if record.collective_type in _UNEVEN or shape is None:
        return [record.collective_type, record.input_dtype, None, record.reduce_op, record.peer]
    return [record.collective_type, record.input_dtype, list(shape), record.reduce_op, record.peer]


def told(record: CollectiveCall) -> str:
    """A rank's part in words: what it does, for whom, and the program's line."""
    op = "" if record.reduce_op is None else f" {record.reduce_op}"
    root = "" if record.peer is None else f" rooted at rank {record.peer}"
    shape = record.output_shape if record.collective_type in _FROM_ROOT else record.input_shape
    return (f"{record.collective_type}{op}{root} of {record.input_dtype or 'nothing'} {shape}, "
            f"{record.phase} of module {record.module}, operator {record.operator}, "
            f"at {record.call_site}")


def disagreement(group: tuple[int, ...], number: int, parts: dict[int, str]) -> str:
    """A fault in words: where, and what each rank does there."""
    return "\n".join([f"group {group}, call {number}: its ranks do not do the same",
                      *(f"  rank {rank}: {part}" for rank, part in parts.items())])

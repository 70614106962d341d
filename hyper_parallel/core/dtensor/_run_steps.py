"""One function for each kind of step: from the step and a global shape to what a rank runs.

All that depends on the shape alone is worked out beforehand: what is sliced, padded or sent.
"""
from __future__ import annotations

import itertools
from math import prod
from typing import Any, Callable, Mapping, Optional, Sequence

from hyper_parallel.core.dtensor._redistribute_plan import (
    AllGather, AllReduce, AllToAll, KeepFirst, PlaceInZeros, ReduceScatter, Slice, Step)
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.platform import get_platform

platform = get_platform()

LocalFunction = Callable[[Any], Any]
Block = tuple[tuple[int, int], ...]
"""Start and length of a part in each dim of the global tensor."""


def compile_step(step: Step, shape: Sequence[int]) -> LocalFunction:
    """The function that takes this rank's part before ``step`` to its part after it.

    Args:
        step: the step.
        shape: global shape of the tensor.
    """
    return _COMPILE[type(step)](step, shape)


def _coordinates_of_group(step: Step) -> list[tuple[int, ...]]:
    """Mesh coordinates of the ranks that take part, in the order of the group."""
    mesh = step.source.device_mesh
    own = list(mesh.get_coordinate())
    ranges = (range(mesh.mesh_shape[axis]) for axis in step.axes)
    coordinates = []
    for position in itertools.product(*ranges):
        for axis, index in zip(step.axes, position):
            own[axis] = index
        coordinates.append(tuple(own))
    return coordinates


def _group(step: Step) -> Any:
    return step.source.device_mesh.get_group_over_axes(step.axes)


def _changed_dim(step: Step, layout: Layout) -> int:
    return layout.placements[step.axes[0]].dim


def _compile_all_reduce(step: Step, shape: Sequence[int]) -> LocalFunction:
    del shape
    op = step.source.placements[step.axes[0]].reduce_op
    return lambda local: platform.differentiable_all_reduce(local, op, _group(step))


def _piece_lengths(step: Step, layout: Layout, dim: int, shape: Sequence[int]) -> list[int]:
    return [layout.local_shape(shape, coordinate)[dim]
            for coordinate in _coordinates_of_group(step)]


def _compile_all_gather(step: Step, shape: Sequence[int]) -> LocalFunction:
    dim = _changed_dim(step, step.source)
    lengths = _piece_lengths(step, step.source, dim, shape)
    own = step.source.local_shape(shape)[dim]
    longest, count, total = max(lengths), len(lengths), sum(lengths)

    def run(local: Any) -> Any:
        if own < longest:
            local = platform.pad_end(local, dim, longest - own)
        whole = platform.differentiable_all_gather_concat(local, _group(step), count, dim)
        if total == longest * count:
            return whole
        pieces = [platform.narrow(whole, dim, index * longest, length)
                  for index, length in enumerate(lengths) if length]
        return platform.concat(pieces, dim) if pieces else platform.narrow(whole, dim, 0, 0)

    return run


def _compile_reduce_scatter(step: Step, shape: Sequence[int]) -> LocalFunction:
    dim = _changed_dim(step, step.target)
    op = step.source.placements[step.axes[0]].reduce_op
    lengths = _piece_lengths(step, step.target, dim, shape)
    own = step.target.local_shape(shape)[dim]
    longest, count = max(lengths), len(lengths)
    starts = list(itertools.accumulate([0, *lengths]))

    def run(local: Any) -> Any:
        if sum(lengths) < longest * count:
            pieces = [platform.pad_end(platform.narrow(local, dim, start, length), dim,
                                       longest - length)
                      for start, length in zip(starts, lengths)]
            local = platform.concat(pieces, dim)
        part = platform.differentiable_reduce_scatter(local, count, dim, op, _group(step))
        return part if own == longest else platform.narrow(part, dim, 0, own)

    return run


def _compile_slice(step: Step, shape: Sequence[int]) -> LocalFunction:
    dim = _changed_dim(step, step.target)
    old = step.source.local_bounds(shape)[dim]
    start, length = step.target.local_bounds(shape)[dim]

    def run(local: Any) -> Any:
        # A copy, so that writing to the part never changes the whole, nor keeps it in memory.
        return platform.copied(platform.narrow(local, dim, start - old[0], length))

    return run


def as_it_is(local: Any) -> Any:
    """The step of a rank whose part stays what it was."""
    return local


def _compile_keep_first(step: Step, shape: Sequence[int]) -> LocalFunction:
    del shape
    op = step.target.placements[step.axes[0]].reduce_op
    first = step.source.device_mesh.get_coordinate()[step.axes[0]] == 0
    if first or op in ("avg", "max", "min"):
        return as_it_is
    if op == "product":
        return lambda local: platform.zeros_like(local) + 1
    return platform.zeros_like


def _compile_place_in_zeros(step: Step, shape: Sequence[int]) -> LocalFunction:
    before = step.source.local_bounds(shape)
    after = step.target.local_bounds(shape)
    whole = tuple(length for _, length in after)
    place = tuple(slice(old[0] - new[0], old[0] - new[0] + old[1])
                  for old, new in zip(before, after))

    def run(local: Any) -> Any:
        result = local.new_zeros(whole)
        result[place] = local
        return result

    return run


def _compile_all_to_all(step: Step, shape: Sequence[int]) -> LocalFunction:
    coordinates = _coordinates_of_group(step)
    own = coordinates.index(tuple(step.source.device_mesh.get_coordinate()))
    held = [step.source.local_bounds(shape, each) for each in coordinates]
    wanted = [step.target.local_bounds(shape, each) for each in coordinates]
    holders: dict[Block, list[int]] = {}
    for index, block in enumerate(held):
        holders.setdefault(block, []).append(index)
    sent = [_part_to_send(own, other, held, wanted, holders) for other in range(len(held))]
    received = [_part_to_send(other, own, held, wanted, holders) for other in range(len(held))]
    even = _is_even(step, shape)
    if not even:
        # What stays on the rank does not go through the collective.
        sent[own] = received[own] = None
    return _exchange(step, (held[own], wanted[own]), sent, received, even)


def _is_even(step: Step, shape: Sequence[int]) -> bool:
    """Whether all pieces of an exchange have one size.

    All ranks of the group have to find the same: on one axis the blocks outside of it are the
    same for all of them.
    """
    layouts = (step.source, step.target)
    if len(step.axes) > 1 or any(type(layout.placements[step.axes[0]]) is not Shard
                                 for layout in layouts):
        return False
    old, new = (_changed_dim(step, layout) for layout in layouts)
    return old != new and step.target.local_bounds(shape)[old][1] % step.size == 0 \
        and step.source.local_bounds(shape)[new][1] % step.size == 0


def _exchange(step: Step, own: tuple[Block, Block], sent: Sequence[Optional[Block]],
              received: Sequence[Optional[Block]], even: bool) -> LocalFunction:
    """Send and receive the blocks of one rank, of which ``own`` are those before and after."""
    before, after = own
    kept = _overlap(before, after)
    sent_sizes, received_sizes = ([0 if block is None else _numel(block) for block in blocks]
                                  for blocks in (sent, received))
    result_shape = tuple(length for _, length in after)

    def run(local: Any) -> Any:
        flat = platform.concat([local.new_zeros((0,)), *(
            local[_slices(block, before)].reshape((-1,))
            for block, size in zip(sent, sent_sizes) if size)], 0)
        if even:
            flat = platform.differentiable_all_to_all(flat, tuple(flat.shape), _group(step))
        else:
            flat = exchange_unevenly(flat, sent_sizes, received_sizes, _group(step))
        result = local.new_zeros(result_shape)
        if not even and _numel(kept):
            result[_slices(kept, after)] = local[_slices(kept, before)]
        start = 0
        for block, size in zip(received, received_sizes):
            if size:
                piece = platform.narrow(flat, 0, start, size)
                result[_slices(block, after)] = piece.reshape(
                    tuple(length for _, length in block))
                start += size
        return result

    return run


def exchange_unevenly(flat: Any, sent: Sequence[int], received: Sequence[int], group: Any) -> Any:
    """An all-to-all of pieces of dim 0 that differ in length, on every platform."""
    if platform.HAS_ALL_TO_ALL_SINGLE:
        return platform.differentiable_all_to_all_single(flat, sent, received, group)
    result, work = platform.differentiable_all_to_all_single_async(flat, sent, received, group)
    work.wait()
    return result


def _part_to_send(sender: int, receiver: int, held: Sequence[Block], wanted: Sequence[Block],
                  holders: Mapping[Block, Sequence[int]]) -> Optional[Block]:
    """What one rank of a group gives another, maybe itself; None for nothing.

    Of the ranks that hold the same block one gives it, taking turns with the receivers; a rank
    that has it already takes its own.
    """
    same = holders[held[sender]]
    giver = receiver if receiver in same else same[receiver % len(same)]
    return _overlap(held[sender], wanted[receiver]) if giver == sender else None


def _overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]
             ) -> tuple[tuple[int, int], ...]:
    """The block that two blocks share, each given by (start, length) a dim."""
    shared = []
    for (start, length), (other_start, other_length) in zip(one, other):
        low = max(start, other_start)
        shared.append((low, max(0, min(start + length, other_start + other_length) - low)))
    return tuple(shared)


def _numel(block: Block) -> int:
    return prod(length for _, length in block)


def _slices(block: Sequence[tuple[int, int]], inside: Sequence[tuple[int, int]]
            ) -> tuple[slice, ...]:
    """Index of ``block`` within the local tensor that covers ``inside``."""
    return tuple(slice(start - origin, start - origin + length) if length else slice(0, 0)
                 for (start, length), (origin, _) in zip(block, inside))


_COMPILE: dict[type, Callable[[Step, Sequence[int]], LocalFunction]] = {
    AllReduce: _compile_all_reduce,
    AllGather: _compile_all_gather,
    ReduceScatter: _compile_reduce_scatter,
    AllToAll: _compile_all_to_all,
    Slice: _compile_slice,
    KeepFirst: _compile_keep_first,
    PlaceInZeros: _compile_place_in_zeros,
}

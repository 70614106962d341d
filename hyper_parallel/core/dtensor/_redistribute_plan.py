"""Plans: the shortest path from one layout of a tensor to another.

A plan is a tuple of steps, each of which changes the placement on one axis, or on several at
once over the group that spans them.  The path is shortest in bytes that a rank sends, then in
number of collectives.  Nothing here touches a tensor.

Words used below
    fraction        the part of the global tensor that a rank holds: 1 / product of the sizes of
                    the axes that shard it.
    wire            bytes that one rank sends, as a fraction of the global tensor, when the
                    collective runs as a ring: (n - 1) / n of the result of an all-gather and of
                    the input of a reduce-scatter, twice that for an all-reduce.
    innermost       only the innermost axis that splits a tensor dim can be gathered, since only
                    then do the pieces of its ranks lie side by side.
"""
from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Iterator, Mapping, Sequence

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard


# Above this the share of an all-to-all that a rank already holds is taken as 1 / ranks.
_MOST_RANKS_COUNTED = 1024


@dataclass(frozen=True)
class Step:
    """One move on ``axes``: ``source`` and ``target`` are the layouts before and after it."""

    source: Layout
    target: Layout
    axes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return prod(self.source.device_mesh.mesh_shape[axis] for axis in self.axes)

    @property
    def wire(self) -> float:
        """Bytes a rank sends, as a fraction of the bytes of the global tensor."""
        return 0.0

    @property
    def communicates(self) -> bool:
        """True when the step issues a collective."""
        return self.wire > 0

    def __str__(self) -> str:
        names = self.source.device_mesh.alias_name
        kind = "".join(f"-{c.lower()}" if c.isupper() else c for c in type(self).__name__)[1:]
        before = ", ".join(repr(self.source.placements[axis]) for axis in self.axes)
        after = ", ".join(repr(self.target.placements[axis]) for axis in self.axes)
        group = "+".join(names[axis] for axis in self.axes)
        return f"{kind} over {group}: {before} -> {after}"


class AllReduce(Step):
    """Partial -> Replicate."""

    @property
    def wire(self) -> float:
        return 2 * (self.size - 1) / self.size * fraction(self.source)


class ReduceScatter(Step):
    """Partial -> Shard."""

    @property
    def wire(self) -> float:
        return (self.size - 1) / self.size * fraction(self.source)


class AllGather(Step):
    """Shard -> Replicate; all axes split the same dim and are its innermost ones, in order."""

    @property
    def wire(self) -> float:
        return (self.size - 1) / self.size * fraction(self.target)


class AllToAll(Step):
    """Every rank sends each other rank what that one needs of its block.

    The axes are all ``Shard`` before and after, in any order and on any dims, so that blocks
    before and after are a partition: a rank receives just what it lacks.
    """

    @property
    def wire(self) -> float:
        return _lacking(self.source, self.target, self.axes) * fraction(self.source)


class Slice(Step):
    """Replicate -> Shard: every rank keeps its own part."""


class KeepFirst(Step):
    """Replicate -> Partial: the first rank keeps the value, the others hold the neutral one."""


class PlaceInZeros(Step):
    """Shard -> Partial(sum): every rank puts its part into zeros."""


def fraction(layout: Layout) -> float:
    """Part of the global tensor that a rank holds."""
    sizes = layout.device_mesh.mesh_shape
    return 1.0 / prod(sizes[axis] for axis, placement in enumerate(layout.placements)
                      if type(placement) is Shard)


def wire_bytes(plan: Sequence[Step], nbytes: int) -> int:
    """Bytes one rank sends when ``plan`` moves a tensor of ``nbytes`` bytes in all."""
    return round(sum(step.wire for step in plan) * nbytes)


def describe_plan(plan: Sequence[Step]) -> str:
    """The plan as one readable line."""
    return "; ".join(map(str, plan)) if plan else "nothing to do"


@lru_cache(maxsize=4096)
def plan_redistribution(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Steps that take a tensor from ``source`` to ``target``, the fewest bytes first.

    The path does not depend on the shape, so that tensors of many shapes share a plan.

    Args:
        source: layout before, its dims positive.
        target: layout after, on the same mesh, its dims positive.

    Raises:
        ValueError: the target is on another mesh.
    """
    mesh = source.device_mesh
    if target.device_mesh != mesh:
        raise ValueError(f"a tensor moves between layouts of one mesh, but the source is on "
                         f"{mesh!r} and the target on {target.device_mesh!r}; gather it with "
                         "full_tensor() and distribute it on the other mesh.")
    # Along an axis of one rank all placements are the same thing.
    trivial = {axis: Replicate() for axis, size in enumerate(mesh.mesh_shape) if size == 1}
    return _shortest_path(source.replaced(trivial), target.replaced(trivial))


def _shortest_path(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Dijkstra over the layouts reachable by steps; cost is (bytes, collectives, steps)."""
    dims = {p.dim for p in (*source.placements, *target.placements) if type(p) is Shard}
    axes = [axis for axis, size in enumerate(source.device_mesh.mesh_shape) if size > 1]
    tie = itertools.count()
    frontier: list[tuple] = [(0.0, 0, 0, next(tie), source, ())]
    done: set[Layout] = set()
    while frontier:
        wire, launches, length, _, layout, path = heapq.heappop(frontier)
        if layout is target:
            return path
        if layout in done:
            continue
        done.add(layout)
        for step in itertools.chain(
                _reductions(layout, axes, target, dims), _gathers(layout, axes),
                _local_steps(layout, axes, target, dims), _exchanges(layout, axes, target, dims)):
            if step.target not in done:
                # Rounding keeps equal sums of fractions equal, so that ties go to fewer launches.
                heapq.heappush(frontier, (
                    round(wire + step.wire, 12), launches + step.communicates, length + 1,
                    next(tie), step.target, (*path, step)))
    raise AssertionError(f"no path from {source!r} to {target!r}")


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _reductions(layout: Layout, axes: Sequence[int], target: Layout, dims: set[int]
                ) -> Iterator[Step]:
    partial = [axis for axis in axes if type(layout.placements[axis]) is Partial
               and layout.placements[axis] != target.placements[axis]]
    for group in _subsets(partial):
        if len({layout.placements[axis] for axis in group}) == 1:
            yield AllReduce(layout, _all(layout, group, Replicate()), group)
            for dim in dims:
                if layout.placements[group[0]].reduce_op in ("sum", "avg"):
                    yield ReduceScatter(layout, _all(layout, group, Shard(dim)), group)


def _gathers(layout: Layout, axes: Sequence[int]) -> Iterator[Step]:
    for dim in layout.sharded_dims:
        inner = [axis for axis in layout.axes_of(dim) if axis in axes]
        for start in range(len(inner)):
            group = tuple(inner[start:])
            yield AllGather(layout, _all(layout, group, Replicate()), group)


def _local_steps(layout: Layout, axes: Sequence[int], target: Layout, dims: set[int]
                 ) -> Iterator[Step]:
    for axis in axes:
        wanted = target.placements[axis]
        if type(layout.placements[axis]) is Replicate:
            if type(wanted) is Partial:
                yield KeepFirst(layout, layout.replaced({axis: wanted}), (axis,))
            for dim in dims:
                yield Slice(layout, layout.replaced({axis: Shard(dim)}), (axis,))
        elif type(layout.placements[axis]) is Shard and wanted == Partial():
            if layout.axes_of(layout.placements[axis].dim)[-1] == axis:
                yield PlaceInZeros(layout, layout.replaced({axis: wanted}), (axis,))


def _exchanges(layout: Layout, axes: Sequence[int], target: Layout, dims: set[int]
               ) -> Iterator[Step]:
    sharded = [axis for axis in axes if type(layout.placements[axis]) is Shard]
    for group in _subsets(sharded):
        for new in _exchange_targets(layout, group, target, dims):
            if new is not layout and _same_outside(layout, new, group):
                yield AllToAll(layout, new, group)


def _exchange_targets(layout: Layout, group: tuple[int, ...], target: Layout, dims: set[int]
                      ) -> Iterator[Layout]:
    """Layouts in which the axes of ``group`` are still shards: the target's, and moved dims."""
    if len(group) == 1:
        for dim in dims:
            yield layout.replaced({group[0]: Shard(dim)})
    if all(type(target.placements[axis]) is Shard for axis in group):
        changed = layout.replaced({axis: target.placements[axis] for axis in group})
        order = {dim: _order_like(changed.axes_of(dim), target.axes_of(dim))
                 for dim in changed.sharded_dims}
        yield Layout(layout.device_mesh, changed.placements, order)


def _order_like(axes: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """``axes`` put in the order of ``wanted`` where that names just the same ones."""
    return wanted if sorted(axes) == sorted(wanted) else axes


def _same_outside(before: Layout, after: Layout, group: tuple[int, ...]) -> bool:
    """True when the ranks of one group together hold the same part before and after.

    That is so when the axes outside the group split their dims in the same order and lie
    outside of those of the group: then every group has its own block, cut in two ways.
    """
    for layout in (before, after):
        for dim in layout.sharded_dims:
            members = [axis in group for axis in layout.axes_of(dim)]
            if members != sorted(members):
                return False
    outside = [axis for axis in range(len(before.placements)) if axis not in group]
    return all(
        tuple(a for a in before.axes_of(dim) if a in outside)
        == tuple(a for a in after.axes_of(dim) if a in outside)
        for dim in {*before.sharded_dims, *after.sharded_dims})


def _all(layout: Layout, axes: Sequence[int], placement: Placement) -> Layout:
    return layout.replaced({axis: placement for axis in axes})


def _lacking(source: Layout, target: Layout, axes: tuple[int, ...]) -> float:
    """Part of a rank's new block that it does not hold yet: the mean over a group, even sizes."""
    sizes = source.device_mesh.mesh_shape
    ranks = prod(sizes[axis] for axis in axes)
    if len(axes) == 1 or ranks > _MOST_RANKS_COUNTED:
        return (ranks - 1) / ranks
    kept = 0.0
    for position in itertools.product(*(range(sizes[axis]) for axis in axes)):
        coordinate = dict(zip(axes, position))
        overlap = float(ranks)
        for dim in {*source.sharded_dims, *target.sharded_dims}:
            old = _interval(source, dim, ranks, coordinate)
            new = _interval(target, dim, ranks, coordinate)
            overlap *= max(0, min(old[1], new[1]) - max(old[0], new[0])) / ranks
        kept += overlap
    return 1.0 - kept / ranks


def _interval(layout: Layout, dim: int, size: int, coordinate: Mapping[int, int]
              ) -> tuple[int, int]:
    """Start and stop of a rank's part of ``dim``, counting only the axes in ``coordinate``."""
    start, length = 0, size
    for axis in layout.axes_of(dim):
        if axis in coordinate:
            length //= layout.device_mesh.mesh_shape[axis]
            start += length * coordinate[axis]
    return start, start + length

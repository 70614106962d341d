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
from functools import cached_property, lru_cache
from math import inf, prod
from typing import Iterator, Mapping, Sequence

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard


# Fractions below this are rounding errors.
_NOTHING = 1e-12
# Above this a rank is taken to hold nothing of what it needs after an all-to-all.
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
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's group, in its order."""
        return self.source.device_mesh.get_ranks_over_axes(self.axes)

    @property
    def wire(self) -> float:
        """Bytes a rank sends, as a fraction of the bytes of the global tensor."""
        return 0.0

    @property
    def length(self) -> int:
        """How many steps this one counts for where plans send the same."""
        return 1

    @property
    def communicates(self) -> bool:
        """True when the step issues a collective."""
        return self.wire > _NOTHING

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
    """Every rank gets what it lacks of its new block from a rank that holds it.

    The axes are ``Shard`` or ``Replicate`` before and after, on any dims and in any order.  No
    plan can send less than that.
    """

    @cached_property
    def wire(self) -> float:
        return _lacking(self.source, self.target, self.axes)

    @property
    def length(self) -> int:
        return 2 * len(self.source.placements)


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


@dataclass(frozen=True)
class RedistributionPlan:
    """The steps of one tensor's way, as a user sees them.

    Attributes:
        steps: the steps in order; none where nothing has to be done.
        shape: global shape of the tensor.
        itemsize: bytes of an element.
    """

    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    itemsize: int

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return sum(step.communicates for step in self.steps)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends, by the ring formulas and for even parts."""
        return wire_bytes(self.steps, prod(self.shape) * self.itemsize)

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to do"
        whole = prod(self.shape) * self.itemsize
        lines = [f"{step}, group {tuple(step.ranks)}, {wire_bytes((step,), whole)} bytes"
                 if step.communicates else str(step) for step in self.steps]
        return "\n".join((*lines, f"total: {self.collectives} collectives, "
                                  f"{self.wire_bytes} bytes sent by a rank"))


def wire_bytes(plan: Sequence[Step], nbytes: int) -> int:
    """Bytes one rank sends when ``plan`` moves a tensor of ``nbytes`` bytes in all."""
    return round(sum(step.wire for step in plan) * nbytes)


def describe_plan(plan: Sequence[Step]) -> str:
    """The plan as one readable line."""
    return "; ".join(map(str, plan)) if plan else "nothing to do"


@lru_cache(maxsize=4096)
def plan_redistribution(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Steps that take a tensor from ``source`` to ``target``, the fewest bytes first.

    The path does not depend on the shape, so that tensors of many shapes share a plan. An axis
    that is Partial before and after is left alone, even where to finish its sum would save bytes.

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
    """Dijkstra over the layouts reachable by steps.

    The cost is (bytes, collectives, steps), where an exchange counts as many steps: at equal bytes
    an all-gather is the quicker one.
    """
    dims = {p.dim for p in (*source.placements, *target.placements) if type(p) is Shard}
    axes = [axis for axis, size in enumerate(source.device_mesh.mesh_shape) if size > 1]
    tie = itertools.count()
    most = _direct_wire(source, target, axes)
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
            # Rounding keeps equal sums of fractions equal, so that ties go to fewer launches.
            cost = round(wire + step.wire, 12)
            if cost <= most and step.target not in done:
                heapq.heappush(frontier, (
                    cost, launches + step.communicates, length + step.length, next(tie),
                    step.target, (*path, step)))
    raise AssertionError(f"no path from {source!r} to {target!r}")


def _direct_wire(source: Layout, target: Layout, axes: Sequence[int]) -> float:
    """Bytes of the one exchange that leads to the target, which bounds the search."""
    changed = tuple(axis for axis in axes if source.placements[axis] != target.placements[axis])
    for group in (changed, tuple(axes)):
        if _can_exchange(source, target, group):
            return round(AllToAll(source, target, group).wire, 12)
    return inf


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
    movable = [axis for axis in axes if type(layout.placements[axis]) is not Partial]
    for group in _subsets(movable):
        for new in _exchange_targets(layout, group, target, dims):
            if new is not layout and _can_exchange(layout, new, group):
                step = AllToAll(layout, new, group)
                if step.communicates:  # else slicing does it
                    yield step


def _exchange_targets(layout: Layout, group: tuple[int, ...], target: Layout, dims: set[int]
                      ) -> Iterator[Layout]:
    """Layouts in which the axes of ``group`` lie as in the target, if that is no summand there, and
    other dims for one axis."""
    if len(group) == 1 and type(layout.placements[group[0]]) is Shard:
        for dim in dims:
            yield layout.replaced({group[0]: Shard(dim)})
    changed = layout.replaced({axis: target.placements[axis] for axis in group
                               if type(target.placements[axis]) is not Partial})
    order = {dim: _order_like(changed.axes_of(dim), target.axes_of(dim))
             for dim in changed.sharded_dims}
    yield Layout(layout.device_mesh, changed.placements, order)


def _order_like(axes: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """``axes`` in the order of ``wanted``; those that have to go are the innermost ones."""
    return (*(axis for axis in wanted if axis in axes),
            *(axis for axis in axes if axis not in wanted))


def _can_exchange(before: Layout, after: Layout, group: tuple[int, ...]) -> bool:
    """True when the ranks of one group together hold the same part before and after.

    That is so when the axes outside the group split their dims in the same order and lie
    outside of those of the group: then every group has its own block, cut in two ways.
    """
    for layout in (before, after):
        if any(type(layout.placements[axis]) is Partial for axis in group):
            return False
        for dim in layout.sharded_dims:
            members = [axis in group for axis in layout.axes_of(dim)]
            if members != sorted(members):
                return False
    outside = [axis for axis in range(len(before.placements)) if axis not in group]
    return all(before.placements[axis] == after.placements[axis] for axis in outside) and all(
        tuple(a for a in before.axes_of(dim) if a in outside)
        == tuple(a for a in after.axes_of(dim) if a in outside)
        for dim in {*before.sharded_dims, *after.sharded_dims})


def _all(layout: Layout, axes: Sequence[int], placement: Placement) -> Layout:
    return layout.replaced({axis: placement for axis in axes})


def _lacking(source: Layout, target: Layout, axes: tuple[int, ...]) -> float:
    """What a rank does not hold yet of its new block, as a fraction of the global tensor.

    It is the mean over the ranks of a group, for even sizes.
    """
    sizes = source.device_mesh.mesh_shape
    ranks = prod(sizes[axis] for axis in axes)
    needed = fraction(target)
    if ranks > _MOST_RANKS_COUNTED:
        return needed
    kept = 0.0
    for position in itertools.product(*(range(sizes[axis]) for axis in axes)):
        coordinate = dict(zip(axes, position))
        overlap = 1.0
        for dim in {*source.sharded_dims, *target.sharded_dims}:
            old = _interval(source, dim, ranks, coordinate)
            new = _interval(target, dim, ranks, coordinate)
            overlap *= max(0, min(old[1], new[1]) - max(old[0], new[0])) / (new[1] - new[0])
        kept += overlap
    return needed * (1.0 - kept / ranks)


def _interval(layout: Layout, dim: int, size: int, coordinate: Mapping[int, int]
              ) -> tuple[int, int]:
    """Start and stop of a rank's part of ``dim``, counting only the axes in ``coordinate``."""
    start, length = 0, size
    for axis in layout.axes_of(dim):
        if axis in coordinate:
            length //= layout.device_mesh.mesh_shape[axis]
            start += length * coordinate[axis]
    return start, start + length

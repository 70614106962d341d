"""Equal parts of a split dim, each of them split in its turn.

A projection that computes query, key and value at once, or a gate beside what it lets through, is
cut into equal parts along its features.  Where these are split over an axis, a rank has features of
one part or two, but needs its share of each.  One all-to-all gives it that: a rank sends what
others need of it and nothing else, where gathering the dim would give everybody everything.
"""
from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from hyper_parallel.core.dtensor._run_steps import exchange_unevenly
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._write_through import CopiedFrom
from hyper_parallel.platform import get_platform

platform = get_platform()


def can_be_shared_out(spec: TensorSpec, dim: int, lengths: Sequence[int]) -> bool:
    """Whether parts of these lengths along ``dim`` can be split as ``dim`` is."""
    layout = spec.layout
    axes = layout.axes_of(dim)
    if len(axes) != 1 or len(lengths) < 2 or len(set(lengths)) > 1 or layout.shard_order:
        return False
    size = layout.device_mesh.mesh_shape[axes[0]]
    return size > 1 and lengths[0] > 0 and lengths[0] % size == 0


class _Dealing(NamedTuple):
    """An exchange of units, stacked along dim 0, between the ranks of a group.

    Attributes:
        order: in which the own units are sent.
        sent, received: how many units each rank gets from here, and gives.
    """

    group: Any
    order: Sequence[int]
    sent: Sequence[int]
    received: Sequence[int]

    def deal(self, units: Any) -> Any:
        """What this rank gets for its units."""
        return exchange_unevenly(units[self.order], self.sent, self.received, self.group)

    def give_back(self, units: Any) -> Any:
        """The own units, for those that this rank got."""
        back = exchange_unevenly(units, self.received, self.sent, self.group)
        return back[sorted(range(len(self.order)), key=self.order.__getitem__)]


def equal_parts(x: DTensor, dim: int, count: int) -> tuple[DTensor, ...]:
    """``count`` equal parts of ``x`` along ``dim``, each laid out as ``x`` is.

    The parts are cut into units, one for each rank.  Of all units in order, rank r holds a run of
    ``count`` and needs every one whose number is r modulo the number of ranks.
    """
    layout = x.layout
    axis, = layout.axes_of(dim)
    mesh = layout.device_mesh
    size, rank = mesh.mesh_shape[axis], mesh.get_coordinate()[axis]
    owners = [[number % size for number in range(source * count, (source + 1) * count)]
              for source in range(size)]
    dealing = _Dealing(
        mesh.get_group(axis), sorted(range(count), key=owners[rank].__getitem__),
        [owners[rank].count(owner) for owner in range(size)],
        [owned.count(rank) for owned in owners])
    before = tuple(x._spec.local_shape)
    cut = (*before[:dim], count, before[dim] // count, *before[dim + 1:])
    moved = dealing.deal(x.to_local().reshape(cut).movedim(dim, 0))
    parts = moved.unbind()
    platform.note_copy(moved, parts, CopiedFrom(
        x, lambda written: dealing.give_back(written).movedim(0, dim).reshape(before)))
    shape = (*x.shape[:dim], x.shape[dim] // count, *x.shape[dim + 1:])
    return tuple(DTensor.from_local(part, mesh, layout.placements, shape=shape)
                 for part in parts)

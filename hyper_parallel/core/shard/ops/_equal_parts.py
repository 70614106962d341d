"""Equal parts of a split dim, each of them split in its turn.

A projection that computes query, key and value at once, or a gate beside what it lets through, is
cut into equal parts along its features.  Where these are split over an axis, a rank has features of
one part or two, but needs its share of each.  One all-to-all gives it that: a rank sends what
others need of it and nothing else, where gathering the dim would give everybody everything.
"""
from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.dtensor._run_steps import exchange_unevenly
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import TensorSpec


def can_be_shared_out(spec: TensorSpec, dim: int, lengths: Sequence[int]) -> bool:
    """Whether parts of these lengths along ``dim`` can be split as ``dim`` is."""
    layout = spec.layout
    axes = layout.axes_of(dim)
    if len(axes) != 1 or len(lengths) < 2 or len(set(lengths)) > 1 or layout.shard_order:
        return False
    size = layout.device_mesh.mesh_shape[axes[0]]
    return size > 1 and lengths[0] > 0 and lengths[0] % size == 0


def equal_parts(x: DTensor, dim: int, count: int) -> tuple[DTensor, ...]:
    """``count`` equal parts of ``x`` along ``dim``, each laid out as ``x`` is.

    The parts are cut into units, one for each rank.  Of all units in order, rank r holds a run of
    ``count`` and needs every one whose number is r modulo the number of ranks.
    """
    layout = x.layout
    axis, = layout.axes_of(dim)
    mesh = layout.device_mesh
    size, rank = mesh.mesh_shape[axis], mesh.get_coordinate()[axis]
    unit = x.shape[dim] // count // size
    owners = [[number % size for number in range(source * count, (source + 1) * count)]
              for source in range(size)]
    order = sorted(range(count), key=owners[rank].__getitem__)
    local = x.to_local()
    units = local.reshape((*local.shape[:dim], count, unit, *local.shape[dim + 1:])).movedim(dim, 0)
    moved = exchange_unevenly(
        units[order], [owners[rank].count(owner) for owner in range(size)],
        [owned.count(rank) for owned in owners], mesh.get_group(axis))
    shape = (*x.shape[:dim], x.shape[dim] // count, *x.shape[dim + 1:])
    return tuple(DTensor.from_local(part, mesh, layout.placements, shape=shape)
                 for part in moved.unbind())

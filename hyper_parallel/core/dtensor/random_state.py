"""Random draws for DTensors: equal on ranks that hold the same piece, different elsewhere.

The draws come from the framework's default generator, so that a seed set by the user, saved
states and checkpoint's replay all work.  Ranks whose generators differ take over the state of
the mesh's first rank before their first draw, and again after a user seeded anew (on all ranks,
as in any program that runs the same code everywhere).  Afterwards every draw moves all
generators on by the same amount.
"""
from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Iterator, NamedTuple

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.platform import get_platform

platform = get_platform()

# Spreads neighbouring piece numbers over the range of seeds (an odd constant near 2**62 / phi).
_STRIDE = 2850293223519543809
_agreed: "weakref.WeakKeyDictionary[DeviceMesh, int]" = weakref.WeakKeyDictionary()


class Piece(NamedTuple):
    """Which of the distinct pieces of a tensor this rank holds, out of how many."""

    mesh: DeviceMesh
    index: int
    count: int


def piece_of(layout: Layout) -> Piece:
    """The piece that this rank holds under ``layout``; equal on ranks that hold the same one."""
    mesh = layout.device_mesh
    index, count = 0, 1
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            index = index * mesh.mesh_shape[axis] + mesh.get_coordinate()[axis]
            count *= mesh.mesh_shape[axis]
    return Piece(mesh, index, count)


@contextmanager
def same_draws(piece: Piece) -> Iterator[None]:
    """Run random operators for ``piece``.

    A tensor that every rank holds whole gets the numbers that a single process would draw.
    """
    _agree(piece.mesh)
    if piece.count == 1:
        yield
        return
    seed = (platform.draw_seed() + piece.index * _STRIDE) % 2 ** 62
    with platform.seeded(seed):
        yield


def _agree(mesh: DeviceMesh) -> None:
    if mesh.size() == 1 or _agreed.get(mesh) == platform.seed_marker():
        return
    platform.agree_on_random_state(mesh.get_group_over_axes(range(mesh.ndim)))
    _agreed[mesh] = platform.seed_marker()

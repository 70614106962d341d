"""Random draws for DTensors: equal on ranks that hold the same piece, different elsewhere.

The draws come from the default generator, or from that which an operator is given, so that a seed
set by the user, saved states and checkpoint's replay all work.  Ranks take over the state of the
mesh's first rank before their first draw, and again after a user seeded anew (on all ranks, as in
any program that runs the same code everywhere).  Afterwards every draw moves all generators on by
the same amount.

Whether to agree again must never be one rank's opinion, since agreeing communicates.  So the
agreed state carries a mark in place of its seed: a state with the mark came from an agreement
that all ranks took part in, any other state - of a new seed, or restored from before the
agreement - came about on all of them.
"""
from __future__ import annotations

import hashlib
import weakref
from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple, Optional

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Shard
from hyper_parallel.platform import get_platform

platform = get_platform()

# Spreads neighbouring piece numbers over the range of seeds (an odd constant near 2**62 / phi).
_STRIDE = 2850293223519543809
# The ranks that agreed under a mark, and the marks under which all ranks of a mesh agree.
_agreed: dict[int, frozenset[int]] = {}
_marks_of_mesh: "weakref.WeakKeyDictionary[DeviceMesh, set[int]]" = weakref.WeakKeyDictionary()


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
def same_draws(piece: Piece, generator: Optional[Any] = None) -> Iterator[None]:
    """Run random operators for ``piece``, which draw from the user's ``generator`` if one is given.

    A tensor that every rank holds whole gets the numbers that a single process would draw.
    """
    _agree(piece.mesh, generator)
    if piece.count == 1:
        yield
        return
    seed = (platform.draw_seed(generator) + piece.index * _STRIDE) % 2 ** 62
    with platform.seeded(seed, generator):
        yield


def _agree(mesh: DeviceMesh, generator: Optional[Any]) -> None:
    if mesh.size() == 1:
        return
    marks = _marks_of_mesh.setdefault(mesh, set())
    mark = platform.initial_seed(generator)
    if mark in marks:
        return
    group = mesh.get_group_over_axes(range(mesh.ndim))
    ranks = frozenset(platform.get_group_ranks(group))
    # A larger mesh may have agreed, of which this one is a part.
    if not ranks <= _agreed.get(mark, frozenset()):
        mark = _mark_for(ranks)
        platform.agree_on_random_state(group, mark, generator)
        _agreed[mark] = ranks
    marks.add(mark)


def _mark_for(ranks: frozenset[int]) -> int:
    """A seed that no user sets, the same on all ``ranks``."""
    text = repr((sorted(ranks), platform.generation()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2

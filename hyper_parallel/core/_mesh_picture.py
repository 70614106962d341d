"""The part of a device mesh that draws it."""
from typing import Optional

import numpy as np

from hyper_parallel.core._mesh_topology import MeshTopology
from hyper_parallel.core._picture import ELLIPSIS, Grid, Picture, elided

_MOST_ROWS, _MOST_COLUMNS, _MOST_PANES = 10, 10, 6


class PicturedMesh(MeshTopology):
    """A grid of ranks that can be looked at by one of them.

    Attributes:
        rank: global rank of this process.
    """

    rank: int

    def visualize(self) -> Picture:
        """A picture of which rank stands where, this process' own in brackets.

        The last axis runs to the right and the one before it down; there is a grid for each place
        along the others. Of a large mesh the first and the last ranks are drawn. Nothing is
        communicated.

        Returns:
            What prints as text, and has ``svg`` and ``save(path)``.
        """
        rank = self.rank
        own = self._locate(rank)
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.alias_name, self.mesh_shape))
        where = "is not in it" if own is None else f"is at {own}"
        panes = list(np.ndindex(*self.mesh_shape[:-2]))
        grids = [self._pane(panes[index], own) if index is not None
                 else Grid(f"{ELLIPSIS} {len(panes) - _MOST_PANES + 1:,} more")
                 for index in elided(len(panes), _MOST_PANES)]
        return Picture([f"DeviceMesh({axes}), {self._ranks.size:,} ranks; rank {rank} {where}"],
                       grids)

    def _pane(self, outer: tuple[int, ...], own: Optional[tuple[int, ...]]) -> Grid:
        """The grid of the last two axes at a place along the others."""
        names = self.alias_name
        # A mesh of one axis is a row without a heading.
        lines: list[tuple] = [()] if self.ndim == 1 else [
            (row,) for row in elided(self.mesh_shape[-2], _MOST_ROWS)]
        columns = elided(self.mesh_shape[-1], _MOST_COLUMNS)
        places = [[(*outer, *line, column) for column in columns] for line in lines]
        marked = [(i, line.index(own)) for i, line in enumerate(places) if own in line]
        return Grid(
            title=", ".join(map(_heading, names, outer)),
            rows=tuple(_heading(names[-2], *line) if line else "" for line in lines),
            columns=tuple(_heading(names[-1], column) for column in columns),
            cells=tuple(tuple(self._label(place, own) for place in line) for line in places),
            own=marked[0] if marked else None)

    def _label(self, place: tuple[Optional[int], ...], own: Optional[tuple[int, ...]]) -> str:
        if None in place:
            return ELLIPSIS
        return f"[{self._ranks[place]}]" if place == own else str(self._ranks[place])


def _heading(name: str, index: Optional[int]) -> str:
    return ELLIPSIS if index is None else f"{name} {index}"

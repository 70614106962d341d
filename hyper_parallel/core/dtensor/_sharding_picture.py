"""``visualize_sharding``: which rank holds which part of a DTensor."""
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from hyper_parallel.core._picture import ELLIPSIS, Grid, Picture, elided
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import Layout, chunk_bounds

_MOST_ROWS, _MOST_COLUMNS, _MOST_PANES, _MOST_RANKS = 10, 8, 6, 5

Bounds = tuple[int, int]


def visualize_sharding(tensor: DTensor) -> Picture:
    """A picture of which ranks hold which block of a tensor.

    A cell is a block and lists the ranks that hold it: ``0,2`` are replicas, ``0+2`` hold terms
    of a ``Partial``, ``0+1,2+3`` are two replicas of two terms. Headings give the elements of a
    dim as ``start:end``. Two dims are drawn, of those that are split the last two, with a grid
    for each block along the other split dims; the heading says which. Only the layout and the
    global shape are read: nothing is communicated, and every rank draws the same.

    Returns:
        What prints as text, and has ``svg`` and ``save(path)``.

    Raises:
        TypeError: ``tensor`` is not a DTensor.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError("visualize_sharding draws a DTensor, but got a "
                        f"{type(tensor).__name__}; make one with distribute_tensor.")
    layout, shape = tensor.layout, tuple(tensor.shape)
    pieces = _Pieces(layout, shape)
    heading = [f"{list(shape)}, {_axes_text(layout)}"]
    if not math.prod(shape):
        return Picture(heading, [], ["no rank holds an element"])
    drawn = _drawn_dims(len(shape), layout.sharded_dims)
    others = sorted(set(layout.sharded_dims) - set(drawn))
    if len(shape) > 1:
        whole = [str(dim) for dim in range(len(shape)) if dim not in (*drawn, *others)]
        note = f"; whole and not drawn: dim {', '.join(whole)}" if whole else ""
        heading.append(f"rows: dim {drawn[0]}, columns: dim {drawn[1]}{note}")
    panes = list(product(*(pieces.of(dim) for dim in others)))
    grids = [_pane(pieces, dict(zip(others, panes[index])), drawn) if index is not None
             else Grid(f"{ELLIPSIS} {len(panes) - _MOST_PANES + 1:,} more")
             for index in elided(len(panes), _MOST_PANES)]
    return Picture(heading, grids, _notes(layout, pieces), tinted=True)


class _Pieces:
    """The blocks that the axes cut a tensor into, and who holds each."""

    def __init__(self, layout: Layout, shape: tuple[int, ...]) -> None:
        mesh = layout.device_mesh
        self._shape = shape
        self._bounds = [_bounds_along(layout, dim, size) for dim, size in enumerate(shape)]
        partial = [axis for axis, placement in enumerate(layout.placements)
                   if placement.is_partial()]
        replicated = [axis for axis, placement in enumerate(layout.placements)
                      if placement.is_replicate()]
        split = [axis for dim in range(len(shape)) for axis in layout.axes_of(dim)]
        # One axis of the array for each dim, in the order of its pieces; then replicas and terms.
        self._ranks = np.array(mesh.rank_list).reshape(mesh.mesh_shape).transpose(
            [*split, *replicated, *partial]).reshape(
                [*map(len, self._bounds), -1, math.prod(mesh.mesh_shape[axis] for axis in partial)])

    def of(self, dim: int) -> list[Bounds]:
        """Start and end of the blocks along a dim that hold anything, in order."""
        return [(start, end) for start, end in self._bounds[dim] if start < end]

    def holders(self, block: dict[int, Bounds]) -> str:
        """The ranks that hold a block, which is given by its bounds along the split dims."""
        index = tuple(self._bounds[dim].index(block.get(dim, (0, size)))
                      for dim, size in enumerate(self._shape))
        replicas = self._ranks[index]
        if replicas.shape[1] == 1:
            return _ranks_text(replicas[:, 0].tolist(), ",")
        return _joined([_ranks_text(terms, "+") for terms in replicas.tolist()], ",")

    def without_any(self) -> list[int]:
        """The ranks whose block is empty."""
        empty = np.zeros(self._ranks.shape, dtype=bool)
        for dim, bounds in enumerate(self._bounds):
            nothing = [index for index, (start, end) in enumerate(bounds) if start >= end]
            np.moveaxis(empty, dim, 0)[nothing] = True
        return sorted(self._ranks[empty].tolist())


def _bounds_along(layout: Layout, dim: int, size: int) -> list[Bounds]:
    """Start and end of each piece along a dim, the axes that split it running as in an odometer."""
    sizes = [layout.device_mesh.mesh_shape[axis] for axis in layout.axes_of(dim)]
    bounds = []
    for place in np.ndindex(*sizes):
        start, length = 0, size
        for pieces, index in zip(sizes, place):
            offset, length = chunk_bounds(length, pieces, index)
            start += offset
        bounds.append((start, start + length))
    return bounds


def _drawn_dims(ndim: int, split: Sequence[int]) -> list[int]:
    """Rows and columns: the last two dims that are split, filled up with the last of the others."""
    chosen = sorted(split)[-2:]
    for dim in reversed(range(ndim)):
        if len(chosen) < 2 and dim not in chosen:
            chosen.append(dim)
    return sorted(chosen)


def _pane(pieces: _Pieces, outer: dict[int, Bounds], drawn: list[int]) -> Grid:
    """The grid of the drawn dims for one block along the others."""
    title = ", ".join(f"dim {dim} at {_range_text(bounds)}" for dim, bounds in outer.items())
    lines: list[dict[int, Bounds] | None] = [{}]
    if len(drawn) > 1:
        lines = _blocks(pieces, drawn[0], _MOST_ROWS)
    columns = _blocks(pieces, drawn[-1], _MOST_COLUMNS) if drawn else [{}]
    return Grid(
        title=title,
        rows=tuple(_block_text(line) for line in lines),
        columns=tuple(_block_text(column) for column in columns),
        cells=tuple(tuple(
            ELLIPSIS if line is None or column is None
            else pieces.holders({**outer, **line, **column}) for column in columns)
            for line in lines),
        heights=_sizes(lines) if len(drawn) > 1 else None,
        widths=_sizes(columns) if drawn else None)


def _blocks(pieces: _Pieces, dim: int, most: int) -> list[dict[int, Bounds] | None]:
    """The blocks along a dim that are drawn; None for those left out."""
    bounds = pieces.of(dim)
    return [None if index is None else {dim: bounds[index]}
            for index in elided(len(bounds), most)]


def _sizes(blocks: Sequence[dict[int, Bounds] | None]) -> tuple[int, ...]:
    """Elements along each block; what is left out is drawn as an empty one."""
    return tuple(sum(end - start for start, end in (block or {}).values()) for block in blocks)


def _block_text(block: dict[int, Bounds] | None) -> str:
    return ELLIPSIS if block is None else "".join(map(_range_text, block.values()))


def _range_text(bounds: Bounds) -> str:
    return f"{bounds[0]}:{bounds[1]}"


def _axes_text(layout: Layout) -> str:
    names = layout.device_mesh.alias_name
    axes = ", ".join(f"{name}={placement!r}" for name, placement in zip(names, layout.placements))
    orders = "".join(f", dim {dim} split by {' then '.join(names[axis] for axis in axes)}"
                     for dim, axes in layout.shard_order)
    return axes + orders


def _notes(layout: Layout, pieces: _Pieces) -> list[str]:
    notes = []
    empty = pieces.without_any()
    if empty:
        notes.append(f"holds nothing: {_ranks_text(empty, ',')}")
    operators = {placement.reduce_op for placement in layout.placements if placement.is_partial()}
    if operators:
        notes.append(f"a+b: each holds a term, to be reduced by {' and '.join(sorted(operators))}")
    return notes


def _ranks_text(ranks: Sequence[int], sign: str) -> str:
    """Ranks with a sign between; three and more in a row as ``0-3`` where they are replicas."""
    runs: list[list[int]] = []
    for rank in ranks:
        if sign == "," and runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return _joined(parts, sign)


def _joined(parts: Sequence[str], sign: str) -> str:
    """The parts with a sign between, the first and the last where there are many."""
    return sign.join(ELLIPSIS if index is None else parts[index]
                     for index in elided(len(parts), _MOST_RANKS))

"""A picture of grids, as text and as SVG: what meshes and layouts are drawn with."""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional
from xml.sax.saxutils import escape

ELLIPSIS = "\u2026"

# Of the SVG, in pixels.
_CHARACTER, _LINE, _MARGIN = 7.8, 20, 12
_LONGEST_SIDE, _SHORTEST_SIDE = 300, 34
_TINTS = ("#cfe0fb", "#fbe0c3", "#d3efd9", "#ecd6f4", "#fbd5d5", "#d2eff2", "#f6efc0", "#dfe3ea")
_PLAIN, _OWN = "#eef2f8", "#f9d65c"


@dataclass(frozen=True)
class Grid:
    """One pane of a picture.

    Attributes:
        title: a line above it; empty for none.
        rows: headings of the rows; empty ones take no room.
        columns: headings of the columns; none are shown if all are empty.
        cells: a label for each cell, row by row. No rows leave the title alone.
        heights: sizes of the rows, in any unit; None draws them alike.
        widths: sizes of the columns, in the same unit.
        own: row and column of the cell that the SVG marks.
    """

    title: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ()
    heights: Optional[tuple[int, ...]] = None
    widths: Optional[tuple[int, ...]] = None
    own: Optional[tuple[int, int]] = None


class Picture:
    """Text by ``str()`` and SVG by :attr:`svg`; notebooks show the SVG.

    Args:
        heading: the lines above the grids.
        grids: the panes, one below the other.
        notes: the lines below them.
        tinted: whether the SVG gives cells with different labels different colours.
    """

    def __init__(self, heading: Sequence[str], grids: Sequence[Grid], notes: Sequence[str] = (),
                 tinted: bool = False) -> None:
        self._heading, self._grids, self._notes = tuple(heading), tuple(grids), tuple(notes)
        self._tinted = tinted

    def __str__(self) -> str:
        lines = [line for grid in self._grids for line in _grid_text(grid)]
        return "\n".join([*self._heading, *lines, *self._notes])

    __repr__ = __str__

    @property
    def svg(self) -> str:
        """The picture as an SVG document."""
        labels = dict.fromkeys(label for grid in self._grids for row in grid.cells for label in row)
        tints = {label: _TINTS[index % len(_TINTS)] if self._tinted else _PLAIN
                 for index, label in enumerate(labels)}
        canvas = _Canvas()
        for line in self._heading:
            canvas.write_line(line)
        for grid in self._grids:
            _draw(canvas, grid, tints)
        for line in self._notes:
            canvas.write_line(line)
        return canvas.document()

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike) -> None:
        """Write the picture to a file, whose ending says in which form.

        Raises:
            OSError: the file cannot be written.
            ValueError: the ending is neither ``.svg`` nor ``.txt``.
        """
        ending = Path(path).suffix
        if ending not in (".svg", ".txt"):
            raise ValueError(f"a picture is saved as .svg or .txt, but got {os.fspath(path)!r}.")
        Path(path).write_text(self.svg if ending == ".svg" else f"{self}\n", encoding="utf-8")


def elided(count: int, most: int) -> list[Optional[int]]:
    """The positions that are drawn of ``count`` things where there is room for ``most``.

    None stands for those that are left out, before the last one.
    """
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]


def _grid_text(grid: Grid) -> list[str]:
    """The lines of a pane, its labels in the middle of their cells."""
    lines = [grid.title] if grid.title else []
    if not grid.cells:
        return lines
    widths = [max(map(len, column)) + 2 for column in zip(grid.columns, *grid.cells)]
    margin = max(len(row) + 1 if row else 0 for row in grid.rows)
    rules = [" " * margin + left + middle.join("─" * width for width in widths) + right
             for left, middle, right in ("┌┬┐", "├┼┤", "└┴┘")]
    if any(grid.columns):
        headings = " ".join(map(str.center, grid.columns, widths))
        lines.append(f"{' ' * margin} {headings}".rstrip())
    lines.append(rules[0])
    for index, (row, cells) in enumerate(zip(grid.rows, grid.cells)):
        if index:
            lines.append(rules[1])
        heading = f"{row} ".rjust(margin) if margin else ""
        lines.append(f"{heading}│{'│'.join(map(str.center, cells, widths))}│")
    return [*lines, rules[2]]


class _Canvas:
    """An SVG document that grows downwards."""

    def __init__(self) -> None:
        self.y = float(_MARGIN)
        self._width = 0.0
        self._elements: list[str] = []

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """A text whose middle line is at ``y``."""
        if text:
            self._width = max(self._width, x + (len(text) * _CHARACTER if anchor == "start" else 0))
            self._elements.append(
                f'<text x="{x:g}" y="{y + 4.5:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def write_line(self, text: str) -> None:
        """A line of text below all that is there."""
        self.text(_MARGIN, self.y + _LINE / 2, text)
        self.y += _LINE

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A cell."""
        self._width = max(self._width, x + width)
        self._elements.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
                              f'fill="{fill}" stroke="#5b6675"/>')

    def document(self) -> str:
        """The whole."""
        width, height = round(self._width + _MARGIN), round(self.y + _MARGIN)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" font-family="ui-monospace, Menlo, Consolas, '
                f'DejaVu Sans Mono, monospace" font-size="13" fill="#1b1f26">\n'
                f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
                + "\n".join(self._elements) + "\n</svg>\n")


def _draw(canvas: _Canvas, grid: Grid, tints: dict[str, str]) -> None:
    """A pane below all that is there."""
    if grid.title:
        canvas.write_line(grid.title)
    if not grid.cells:
        return
    left = _MARGIN + max(map(len, grid.rows)) * _CHARACTER + (8 if any(grid.rows) else 0)
    least = [max(map(len, column)) * _CHARACTER + 14 for column in zip(grid.columns, *grid.cells)]
    spans = []
    for width in _lengths(grid.widths, grid.heights, least):
        spans.append((left + sum(width for _, width in spans), width))
    if any(grid.columns):
        for (x, width), heading in zip(spans, grid.columns):
            canvas.text(x + width / 2, canvas.y + _LINE / 2, heading, "middle")
        canvas.y += _LINE
    heights = _lengths(grid.heights, grid.widths, [_SHORTEST_SIDE] * len(grid.rows))
    for index, height in enumerate(heights):
        canvas.text(left - 8, canvas.y + height / 2, grid.rows[index], "end")
        for column, (x, width) in enumerate(spans):
            label = grid.cells[index][column]
            fill = _OWN if grid.own == (index, column) else tints[label]
            canvas.rectangle(x, canvas.y, width, height, "none" if label == ELLIPSIS else fill)
            canvas.text(x + width / 2, canvas.y + height / 2, label, "middle")
        canvas.y += height
    canvas.y += _MARGIN


def _lengths(sizes: Optional[Sequence[int]], others: Optional[Sequence[int]],
             least: Sequence[float]) -> list[float]:
    """Pixels along one side, in proportion to the sizes where the labels leave room for that."""
    if sizes is None:
        return list(least)
    longest = max(sum(sizes), sum(others or (1,)), 1)
    return [max(shortest, round(size * _LONGEST_SIDE / longest))
            for size, shortest in zip(sizes, least)]

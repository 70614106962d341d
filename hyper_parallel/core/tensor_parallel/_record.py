"""What was done to a module's parts: written down where it was done, read by ``describe``."""
from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any, Iterator, NamedTuple, Optional

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.platform import get_platform

platform = get_platform()

# Where a module keeps the record of itself. It is an ordinary attribute, so copies have it, too.
_RECORD = "_hyper_parallel_record"


class Applied(NamedTuple):
    """One style that was applied to a module, and the parameters that it spread."""

    style: Any
    mesh: DeviceMesh
    parameters: tuple[str, ...]


class ParameterChange(NamedTuple):
    """What became of one parameter.

    Attributes:
        module: path of the module that holds it.
        style: the style, with the arguments that are not the default; several joined by ``+``.
        parameter: its name in the module; empty for a style that spreads no parameter.
        before: how it lay before.
        after: how it lies now, None without a parameter.
        shape: its global shape.
        bytes_before: bytes that each rank held of it before; 0 for one that is listed already.
        bytes_after: bytes that this rank holds of it now.
    """

    module: str
    style: str
    parameter: str
    before: str
    after: Optional[Layout]
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Description:
    """What ``parallelize_module`` did to a module; printing it gives a table.

    Attributes:
        changes: one entry for each parameter, and for each style without any.
    """

    changes: tuple[ParameterChange, ...]

    @property
    def bytes_saved(self) -> int:
        """Bytes of parameters that this rank no longer holds."""
        return sum(change.bytes_before - change.bytes_after for change in self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return "no module here is parallelized"
        rows = [("module", "style", "parameter", "before", "after", "bytes here")]
        for change in self.changes:
            after = "" if change.after is None else _brief_layout(change.after)
            sizes = f"{change.bytes_before} -> {change.bytes_after}" if change.bytes_before else (
                "shared, see above" if change.parameter else "")
            rows.append((change.module or "(root)", change.style, _with_shape(change),
                         change.before, after, sizes))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
                 for row in rows]
        return "\n".join([*lines, f"saved on this rank: {self.bytes_saved} bytes"])


def note(module: Any, applied: Applied) -> None:
    """Write down on ``module`` that a style was applied to it."""
    vars(module)[_RECORD] = (*applied_to(module), applied)


def applied_to(module: Any) -> tuple[Applied, ...]:
    """The styles that were applied to ``module`` itself, in order."""
    return vars(module).get(_RECORD, ())


def forget(module: Any) -> None:
    """Take the record of ``module`` away."""
    vars(module).pop(_RECORD, None)


def describe(module: Any) -> Description:
    """What ``parallelize_module`` did to ``module`` and its children.

    Returns:
        A description; ``print`` shows one row for each parameter: module, style, layout before
        and after, and the bytes that this rank holds.

    Raises:
        TypeError: ``module`` is no module.
    """
    if not isinstance(module, platform.Module):
        raise TypeError(f"describe takes a module, but got a {type(module).__name__}.")
    return Description(tuple(_changes(module)))


def _changes(root: Any) -> Iterator[ParameterChange]:
    modules: set[int] = set()
    parameters: set[int] = set()
    for path, module in platform.named_modules(root):
        record = applied_to(module)
        if not record or id(module) in modules:
            continue
        modules.add(id(module))
        style = " + ".join(brief_style(applied.style) for applied in record)
        own = platform.own_parameters(module)
        names = [name for applied in record for name in applied.parameters]
        for name in names:
            value = own[name]
            spread = isinstance(value, DTensor)
            counted = id(value) not in parameters
            parameters.add(id(value))
            yield ParameterChange(
                path, style, name, "whole", value.layout if spread else None, tuple(value.shape),
                counted * prod(value.shape) * value.itemsize,
                counted * _local_bytes(value))
        if not names:
            yield ParameterChange(path, style, "", "", None, (), 0, 0)


def _local_bytes(value: Any) -> int:
    shape = value.layout.local_shape(value.shape) if isinstance(value, DTensor) else value.shape
    return prod(shape) * value.itemsize


def brief_style(style: Any) -> str:
    """A style as it would be written: the arguments that are not the default."""
    if not is_dataclass(style):
        return getattr(style, "__name__", type(style).__name__)
    given = [f"{entry.name}={getattr(style, entry.name)!r}" for entry in fields(style)
             if entry.init and getattr(style, entry.name) != entry.default]
    return f"{type(style).__name__}({', '.join(given)})"


def _brief_layout(layout: Layout) -> str:
    return ", ".join(f"{axis}={placement}" for axis, placement in
                     zip(layout.device_mesh.alias_name, layout.placements))


def _with_shape(change: ParameterChange) -> str:
    return f"{change.parameter}{list(change.shape)}" if change.parameter else ""

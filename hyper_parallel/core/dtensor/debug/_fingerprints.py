"""Fingerprints of values: what two runs, or the ranks of one, can be compared by."""
from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.platform import get_platform

platform = get_platform()


@dataclass(slots=True, frozen=True)
class Fingerprint:
    """Stands for the values of one tensor on this rank. Equal where the bits are.

    Attributes:
        bits: 64 bits in which the order of the elements counts; see ``Platform.fingerprint``.
        norm: the Euclidean norm, to read; sums may differ in their last digits between machines,
            so it is not compared.
        number: how many were taken before in the trace.
        ranks: the global ranks that must hold the same value; empty where none must.
    """

    bits: int
    norm: float = field(compare=False)
    number: int = field(default=0, compare=False)
    ranks: tuple[int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"norm={self.norm:.6g} bits={self.bits:016x}"

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON, whose numbers have no nan and no 64 bits."""
        return {"bits": f"{self.bits:016x}", "norm": str(self.norm), "number": self.number,
                "ranks": list(self.ranks)}

    @classmethod
    def from_data(cls, data: dict[str, Any] | None) -> Fingerprint | None:
        """The fingerprint that ``as_data`` was taken of."""
        if data is None:
            return None
        return cls(int(data["bits"], 16), float(data["norm"]), data["number"],
                   tuple(data["ranks"]))


class FingerprintTaker:
    """Takes the fingerprints of one trace."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def of_outputs(self, tensors: Sequence[Any]) -> tuple[Fingerprint | None, ...]:
        """Those of an operator's results; None for a tensor without data."""
        return tuple(self._take(tensor, _replicas(tensor)) for tensor in tensors)

    def of_collective(self, ranks: tuple[int, ...], result: Any,
                      note: Callable[[Fingerprint | None], None]) -> Any:
        """That of a collective's result: at once, or when the program waits for it.

        Args:
            ranks: the ranks that must get the same value.
            result: the tensor, or the tensor and the handle to wait for.
            note: called with the fingerprint.

        Returns:
            What the program has to be given in place of ``result``; None where that stays.
        """
        if not isinstance(result, tuple):
            note(self._take(result, ranks))
            return None
        output, work = result
        reference = weakref.ref(output)

        def waited() -> None:
            tensor = reference()
            if tensor is not None:
                note(self._take(tensor, ranks))

        return output, platform.when_waited(work, waited)

    def _take(self, tensor: Any, ranks: tuple[int, ...]) -> Fingerprint | None:
        taken = platform.fingerprint(tensor)
        if taken is None:
            return None
        norm, bits = taken
        return Fingerprint(bits, norm, next(self._numbers), ranks)


def alike_on(method_name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks on which a collective gives the same value: all, or none of a group."""
    alike = "all_reduce", "all_gather", "broadcast"
    return ranks if any(name in method_name for name in alike) else ()


def _replicas(tensor: Any) -> tuple[int, ...]:
    """The ranks that hold the same part of a DTensor, this one among them; empty if it alone."""
    return replicas_under(tensor._spec.layout) if isinstance(tensor, DTensor) else ()


def replicas_under(layout: Layout) -> tuple[int, ...]:
    """The ranks that hold the same part under ``layout`` as this one, itself among them.

    Empty where it alone does, and outside of the mesh.
    """
    coordinate = layout.device_mesh.get_coordinate()
    return () if coordinate is None else _replicas_at(layout, tuple(coordinate))


@lru_cache(maxsize=1024)
def _replicas_at(layout: Layout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    mesh = layout.device_mesh
    grid = np.asarray(mesh.rank_list).reshape(mesh.mesh_shape)
    here = tuple(slice(None) if placement.is_replicate() else position
                 for placement, position in zip(layout.placements, coordinate))
    ranks = tuple(np.ravel(grid[here]).tolist())
    return ranks if len(ranks) > 1 else ()

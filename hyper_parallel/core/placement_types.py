"""How a tensor lies along one mesh axis: the three placements.

A placement is a frozen, hashable value.  The spelling and the ``repr`` are PyTorch's, so that
plans and logs read the same in both libraries.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """Base of the three placements; it has no state of its own."""

    __slots__ = ()

    def is_shard(self, dim: Optional[int] = None) -> bool:
        """True for ``Shard``, and for ``Shard(dim)`` alone when ``dim`` is given."""
        return isinstance(self, Shard) if dim is None else self == Shard(dim)

    def is_replicate(self) -> bool:
        """True for ``Replicate``."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: Optional[str] = None) -> bool:
        """True for ``Partial``, and for that reduce op alone when one is given."""
        return isinstance(self, Partial) if reduce_op is None else self == Partial(reduce_op)


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Tensor dim ``dim`` is split along the axis, in chunks as ``torch.chunk`` makes them.

    A negative ``dim`` counts from the end; it becomes positive as soon as the number of dims of
    the tensor is known.

    Raises:
        TypeError: ``dim`` is not an int.
    """

    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise TypeError(
                f"Shard takes the tensor dim as an int, but got {self.dim!r} "
                f"({type(self.dim).__name__}); write Shard(0), for example.")

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank along the axis holds the same values."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank along the axis holds a summand; the value is their reduction by ``reduce_op``.

    Args:
        reduce_op: one of ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"product"``.

    Raises:
        TypeError: ``reduce_op`` is not a str.
        ValueError: it is not one of the five.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.reduce_op, str):
            raise TypeError(
                f"Partial takes the name of a reduce op, but got {self.reduce_op!r} "
                f"({type(self.reduce_op).__name__}); write Partial(\"sum\"), for example.")
        if self.reduce_op not in REDUCE_OPS:
            raise ValueError(
                f"Partial knows the reduce ops {', '.join(REDUCE_OPS)}, "
                f"but got {self.reduce_op!r}.")

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

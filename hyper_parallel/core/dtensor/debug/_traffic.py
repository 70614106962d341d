"""What a collective sends, how much, and along which mesh axis."""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core import device_mesh
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform

platform = get_platform()


class Arguments(NamedTuple):
    """Where the arguments stand that matter here; None for those that a method does not have."""

    group: int
    reduce_op: int | None = None
    splits: int | None = None
    root: int | None = None


# The signatures of the platform's collectives.
SIGNATURES = {
    "differentiable_all_gather_concat": Arguments(group=1),
    "differentiable_all_to_all": Arguments(group=2),
    "differentiable_all_reduce": Arguments(group=2, reduce_op=1),
    "differentiable_reduce_scatter": Arguments(group=4, reduce_op=3),
    "differentiable_all_to_all_single": Arguments(group=3, splits=1),
    "differentiable_all_to_all_single_async": Arguments(group=3, splits=1),
    "all_reduce_async": Arguments(group=2, reduce_op=1),
    "broadcast": Arguments(group=2, root=1),
    "scatter": Arguments(group=3, root=2),
}


# Where only the root sends, or only the others do, as the sender of a message does.
_ONE_SIDED = ("scatter", "gather", "send")


def argument(args: tuple, kwargs: dict, position: int | None, name: str) -> Any:
    """An argument given by position or by name, or None."""
    if position is not None and position < len(args):
        return args[position]
    return kwargs.get(name)


def reduce_op(method_name: str, args: tuple, kwargs: dict) -> str | None:
    """How a collective reduces, such as ``"sum"``; None for one that does not."""
    position = SIGNATURES[method_name].reduce_op if method_name in SIGNATURES else None
    return None if position is None else argument(args, kwargs, position, "op")


def root_of(method_name: str, args: tuple, kwargs: dict) -> int | None:
    """Position in the group of the rank whose values are sent; None where all ranks' are."""
    position = SIGNATURES[method_name].root if method_name in SIGNATURES else None
    return None if position is None else argument(args, kwargs, position, "src_index")


def wire_bytes(method_name: str, size: int, input_bytes: int, output_bytes: int,
               kept: float | None = None, at_root: bool = False) -> int:
    """Bytes that one rank sends while a collective runs as a ring, n = ``size`` ranks.

    ============================  =======================================
    all-gather                    (n - 1) / n * output_bytes
    reduce-scatter                (n - 1) / n * input_bytes
    all-reduce                    2 * (n - 1) / n * input_bytes
    all-to-all                    input_bytes less the rank's own piece
    broadcast, reduce             (n - 1) / n * input_bytes
    scatter                       (n - 1) * output_bytes on the root, else 0
    gather                        input_bytes, but 0 on the root
    send                          input_bytes
    receive, barrier              0
    ============================  =======================================

    A rank receives as many, but for an all-to-all of uneven pieces and the rows below it. A
    broadcast or reduction to one rank is a chain of n ranks, of which all but the last one send:
    the number is the average. What a backend really sends depends on its algorithm; these are
    the numbers to compare one plan with another.

    Args:
        method_name: name of the platform's method or of the framework's function.
        size: number of ranks; none or one sends nothing.
        input_bytes: bytes of the tensor that goes in on this rank.
        output_bytes: bytes of the tensor that comes out on this rank.
        kept: part of the input that stays on the rank, by default ``1 / size``.
        at_root: whether this rank is the root of the call.
    """
    if size < 2 or "barrier" in method_name or "recv" in method_name:
        return 0
    if method_name.startswith(_ONE_SIDED):
        sides = output_bytes * (size - 1), 0  # of a scatter: on the root, elsewhere
        if not method_name.startswith("scatter"):
            sides = 0, input_bytes
        return sides[not at_root]
    if "all_to_all" in method_name:
        return round(input_bytes * (1 - (1 / size if kept is None else kept)))
    if "all_gather" in method_name:
        return output_bytes * (size - 1) // size
    rounds = 2 if "all_reduce" in method_name else 1
    return rounds * input_bytes * (size - 1) // size


def own_share(method_name: str, args: tuple, kwargs: dict, group: Any) -> float | None:
    """Part of an all-to-all's input that stays on this rank; None for equal pieces."""
    position = SIGNATURES[method_name].splits if method_name in SIGNATURES else None
    splits = None if position is None else argument(args, kwargs, position, "input_splits")
    if splits is None:
        return None
    return splits[platform.get_group_rank(group)] / (sum(splits) or 1)


@lru_cache(maxsize=1024)
def axis_of(mesh: DeviceMesh, ranks: Sequence[int]) -> str | None:
    """Name of the axis that a group of ranks runs along, ``"dp+tp"`` where it spans several.

    A flattened axis is called by the axes that it is made of. None where the ranks are not
    those along some axes of the mesh.
    """
    root = mesh.root_mesh
    grid = np.asarray(root.rank_list).reshape(root.mesh_shape)
    inside = np.isin(grid, ranks)
    if not ranks or inside.sum() != len(ranks):
        return None
    where = np.argwhere(inside)
    axes = [axis for axis in range(root.ndim) if len(set(where[:, axis])) > 1]
    spanned = np.prod([root.mesh_shape[axis] for axis in axes], dtype=int)
    return "+".join(root.alias_name[axis] for axis in axes) if spanned == len(ranks) else None


def axis_anywhere(ranks: Sequence[int]) -> str | None:
    """As ``axis_of``, by all meshes that there are; None where they call it by several names."""
    names = {axis_of(mesh, ranks) for mesh in tuple(device_mesh._DEVICE_MESH_MAP.values())}
    names.discard(None)
    return names.pop() if len(names) == 1 else None

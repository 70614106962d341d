"""Checks of what a user passes to a device mesh, and the words used to say what is wrong."""
import math
import operator
from typing import Any, Optional, Sequence

import numpy as np

INTERLEAVED = "interleaved_parallel"
UNSPLIT = "None"
"""The name by which layouts say that a tensor dim is not split; no axis may have it."""

_LARGEST_RANK = np.iinfo(np.int32).max


def check_names(alias_name: Any, ndim: int) -> None:
    """Raise unless ``alias_name`` names ``ndim`` axes.

    Raises:
        TypeError: not a tuple of strings.
        ValueError: not one name for each axis; a name that is empty, ``"None"`` or there twice;
            ``interleaved_parallel`` before the end.
    """
    if not isinstance(alias_name, tuple):
        raise TypeError(f"alias_name must be a tuple of axis names, got {alias_name!r} of type "
                        f"{type(alias_name).__name__}")
    for name in alias_name:
        check_name(name)
    if len(alias_name) != ndim:
        raise ValueError(f"alias_name must hold one name for each of the {ndim} axes, got "
                         f"{len(alias_name)}: {alias_name!r}")
    if len(set(alias_name)) != len(alias_name):
        raise ValueError(f"axis names must differ from each other, got {alias_name!r}")
    if INTERLEAVED in alias_name[:-1]:
        raise ValueError(f"{INTERLEAVED!r} must be the last axis, got {alias_name!r}")


def check_name(name: Any) -> None:
    """Raise unless ``name`` can be the name of an axis."""
    if not isinstance(name, str):
        raise TypeError(f"an axis name must be a string, got {name!r} of type "
                        f"{type(name).__name__}")
    if not name or name == UNSPLIT:
        raise ValueError(f"an axis name must not be empty and not {UNSPLIT!r}, got {name!r}")


def check_shape(mesh_shape: Any) -> tuple[int, ...]:
    """``mesh_shape`` as a tuple of ints.

    Raises:
        TypeError: not a tuple of whole numbers.
        ValueError: no axis, or an axis with less than one rank.
    """
    if not isinstance(mesh_shape, tuple):
        raise TypeError(f"mesh_shape must be a tuple of ints, got {mesh_shape!r} of type "
                        f"{type(mesh_shape).__name__}")
    shape = _ints(mesh_shape, "mesh_shape")
    if not shape or min(shape) < 1:
        raise ValueError(f"mesh_shape needs at least one axis, and at least one rank along each, "
                         f"got {mesh_shape!r}")
    return shape


def check_rank_list(rank_list: Optional[Sequence[int]], shape: tuple[int, ...]) -> np.ndarray:
    """The ranks of a mesh of ``shape``: ``rank_list``, or 0, 1, 2, ... for None.

    Raises:
        TypeError: not a sequence of whole numbers.
        ValueError: not as many ranks as ``shape`` has places, or see :func:`check_ranks`.
    """
    count = math.prod(shape)
    if rank_list is None:
        return np.arange(count, dtype=np.int32).reshape(shape)
    if not isinstance(rank_list, (list, tuple, range, np.ndarray)):
        raise TypeError(f"rank_list must be a list or tuple of ranks, got {rank_list!r} of type "
                        f"{type(rank_list).__name__}")
    if np.ndim(rank_list) != 1 or len(rank_list) != count:
        raise ValueError(f"rank_list must hold one rank for each of the {count} places of a mesh "
                         f"of shape {shape}, got {np.shape(rank_list)}")
    return check_ranks(np.asarray(rank_list).reshape(shape))


def as_array(mesh: Any) -> np.ndarray:
    """A numpy array or a (nested) list of ranks as an array.

    Raises:
        TypeError: something else.
        ValueError: lists of different lengths.
    """
    if isinstance(mesh, np.ndarray):
        return mesh
    if not isinstance(mesh, (list, tuple)):
        raise TypeError(f"a mesh is made from a tensor, a list or a numpy array of ranks, got "
                        f"{mesh!r} of type {type(mesh).__name__}")
    try:
        return np.array(mesh)
    except ValueError:
        raise ValueError(f"the lists of a mesh must have equal lengths along each axis, got "
                         f"{mesh!r}") from None


def check_ranks(array: np.ndarray) -> np.ndarray:
    """A read-only int32 copy of the ranks in ``array``.

    Raises:
        TypeError: not whole numbers.
        ValueError: no dims, no ranks, a rank below 0 or above int32, or a rank twice.
    """
    if array.ndim == 0:
        raise ValueError(f"a mesh needs at least one dim, got the single value {array!r}; "
                         f"put it into a list")
    if array.size == 0:
        raise ValueError(f"a mesh needs at least one rank along each axis, got the shape "
                         f"{array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"a mesh holds ranks, which are whole numbers, got the dtype "
                        f"{array.dtype}")
    if array.min() < 0 or array.max() > _LARGEST_RANK:
        raise ValueError(f"ranks must be between 0 and {_LARGEST_RANK}, got "
                         f"{array.min()} to {array.max()}")
    ranks = array.astype(np.int32)
    ranks.setflags(write=False)
    flat = np.sort(ranks, axis=None)
    repeated = flat[1:][flat[1:] == flat[:-1]]
    if repeated.size:
        raise ValueError(f"each rank has one place in a mesh, but {shown(np.unique(repeated))} "
                         f"stands there more than once")
    return ranks


def check_world(ranks: np.ndarray, world_size: Optional[int]) -> None:
    """Raise ValueError if the world is known (not None) and has not all these ranks."""
    if world_size is not None and ranks.max() >= world_size:
        raise ValueError(f"a mesh can only hold ranks of the world, 0 to {world_size - 1}, got "
                         f"the {ranks.size} ranks {shown(ranks)}; start more processes or make "
                         f"the mesh smaller")


def check_tensor_map(slice_shape: Any, tensor_map: Any, ndim: int) -> tuple[tuple[int, ...], ...]:
    """For each dim of a tensor the ids of the axes that split it, counted from the right.

    Raises:
        ValueError: not one entry for each dim, or an id that is not an axis.
    """
    if len(slice_shape) != len(tensor_map):
        raise ValueError(f"tensor_map must hold one entry for each of the {len(slice_shape)} "
                         f"dims of {tuple(slice_shape)}, got {tuple(tensor_map)}")
    entries = tuple(_ints(entry if isinstance(entry, (tuple, list)) else (entry,), "tensor_map")
                    for entry in tensor_map)
    for entry in entries:
        if not all(-1 <= axis < ndim for axis in entry):
            raise ValueError(f"tensor_map holds axis ids from 0 (the last axis) to {ndim - 1}, "
                             f"or -1 for a dim that is not split, got {tuple(tensor_map)}")
    return tuple(tuple(axis for axis in entry if axis >= 0) for entry in entries)


def is_consecutive(ranks: np.ndarray) -> bool:
    """Whether the ranks, read in order, count up by one."""
    flat = ranks.reshape(-1)
    return bool((np.diff(flat) == 1).all())


def shown(ranks: np.ndarray) -> str:
    """Ranks for people, in brackets, the middle left out where there are many."""
    flat = ranks.reshape(-1)
    if flat.size > 4 and is_consecutive(flat):
        return f"({flat[0]}, ..., {flat[-1]})"
    if flat.size > 16:
        return f"({', '.join(map(str, flat[:8]))}, ..., {flat[-1]})"
    return f"({', '.join(map(str, flat))}{',' if flat.size == 1 else ''})"


def _ints(values: Sequence[Any], what: str) -> tuple[int, ...]:
    try:
        if any(isinstance(value, bool) for value in values):
            raise TypeError
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{what} must hold whole numbers, got {tuple(values)!r}") from None

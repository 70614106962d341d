"""The part of a device mesh that is a description: ranks in a grid whose axes have names."""
import math
from typing import Optional, Sequence, Union

import numpy as np

from hyper_parallel.core import _mesh_input as checks


class MeshTopology:
    """A frozen, hashable grid of ranks; it knows nothing of this process or of any group.

    Args:
        ranks: int32 array, one dim for each axis, checked before and never written to.
        names: one name for each axis, checked before.
        generation: the life of the default process group that the grid belongs to.
    """

    def __init__(self, ranks: np.ndarray, names: tuple[str, ...], generation: int) -> None:
        self._ranks = ranks
        self._alias_name = names
        self._generation = generation
        self._dev_name_to_index = {name: index for index, name in enumerate(names)}
        self._global_shape_map: dict[tuple, tuple[int, ...]] = {}
        self._rank_list: Optional[tuple[int, ...]] = None
        self._hash: Optional[int] = None

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Number of ranks along each axis."""
        return self._ranks.shape

    @property
    def alias_name(self) -> tuple[str, ...]:
        """Names of the axes."""
        return self._alias_name

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The ranks, row by row."""
        if self._rank_list is None:
            self._rank_list = tuple(self._ranks.reshape(-1).tolist())
        return self._rank_list

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._ranks.ndim

    def axis_index(self, axis: str) -> int:
        """Position of the axis, counted from the left; ValueError if there is none."""
        if axis not in self._dev_name_to_index:
            raise ValueError(f"the mesh has no axis {axis!r}; its axes are {self._alias_name}")
        return self._dev_name_to_index[axis]

    def axis_id(self, axis: str) -> int:
        """Position of the axis counted from the right, as MindSpore does; ``"None"`` is -1."""
        return -1 if axis == checks.UNSPLIT else self.ndim - 1 - self.axis_index(axis)

    def get_global_shape(self, slice_shape: Sequence[int],
                         tensor_map: Sequence[Union[int, Sequence[int]]]) -> tuple[int, ...]:
        """Shape of a tensor from that of one of its equal pieces.

        Args:
            slice_shape: shape of a piece.
            tensor_map: for each dim the id of the axis that splits it, counted from the right
                (see :meth:`axis_id`), -1 for none, or a sequence of ids.

        Raises:
            TypeError: ids that are not whole numbers.
            ValueError: a wrong number of entries, or an id that is not an axis.
        """
        key = (tuple(slice_shape),
               tuple(tuple(entry) if isinstance(entry, list) else entry for entry in tensor_map))
        if key not in self._global_shape_map:
            entries = checks.check_tensor_map(*key, self.ndim)
            self._global_shape_map[key] = tuple(
                length * math.prod(self.mesh_shape[self.ndim - 1 - axis] for axis in entry)
                for length, entry in zip(slice_shape, entries))
        return self._global_shape_map[key]

    def to_hash(self) -> tuple:
        """A key that tells meshes apart by shape, names and ranks.

        Ranks that count up by one are given by the first and the last, others all.
        """
        flat = self._ranks.reshape(-1)
        ranks = (int(flat[0]), int(flat[-1])) if checks.is_consecutive(flat) else self.rank_list
        return self.mesh_shape, self._alias_name, ranks

    def __eq__(self, other: object) -> bool:
        """Same shape, names and ranks, made in the same life of the default process group."""
        if self is other:
            return True
        if not isinstance(other, MeshTopology):
            return NotImplemented
        return (self._alias_name == other._alias_name and self._generation == other._generation
                and np.array_equal(self._ranks, other._ranks))

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.to_hash(), self._generation))
        return self._hash

    def __copy__(self) -> "MeshTopology":
        return self

    def __deepcopy__(self, memo: dict) -> "MeshTopology":
        return self

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self._alias_name, self.mesh_shape))
        return f"DeviceMesh(({axes}), rank_list={checks.shown(self._ranks)})"

    def _locate(self, rank: int) -> Optional[tuple[int, ...]]:
        """Position of ``rank`` along each axis, None if it is not here."""
        found = np.flatnonzero(self._ranks.reshape(-1) == rank)
        if not found.size:
            return None
        return tuple(int(index) for index in np.unravel_index(found[0], self.mesh_shape))

    def _along(self, axes: Sequence[int], coordinate: tuple[int, ...]) -> np.ndarray:
        """The part of the grid that spans ``axes``, and is at ``coordinate`` on the others."""
        return self._ranks[tuple(slice(None) if axis in axes else index
                                 for axis, index in enumerate(coordinate))]

    def _first_rank(self) -> int:
        return int(self._ranks.flat[0])

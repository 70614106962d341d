"""Named device topology.

A mesh is an array of global ranks with a name for each of its axes. A process is one *rank*; an
*axis* is a dim of the mesh. Everything else follows from the array: the coordinate of a rank, the
ranks beside it along an axis, sub-meshes, flattened axes. It is kept in numpy; no tensor is
touched and no process group is made before one is asked for.

A *root* mesh is made by a user. A *sub-mesh* is cut out of it at the place of this process, which
keeps its coordinate on the axes that are left out. *Flattening* joins axes to one axis with a new
name, which the root then knows like its own axes. A sub-mesh remembers, for each of its axes, the
root axes that it is made of, so slices of slices and flattened names need no rules of their own.

The rank order of the array is the order of everything: of coordinates, of groups, and of the
pieces of collectives.
"""
import math
from typing import Any, Optional, Sequence, Union

import numpy as np

from hyper_parallel.core import _mesh_input as checks
from hyper_parallel.core._mesh_topology import MeshTopology
from hyper_parallel.core._mesh_translation import TranslatedMesh
from hyper_parallel.platform import get_platform

# What topology needs: get_rank, create_group and tensor_to_numpy. Tests put a mock here.
platform = get_platform()
# What a mock need not offer: lives of the default group, its size, tensors from arrays.
_runtime = get_platform()
Tensor = platform.Tensor

# Process groups by their ordered ranks, and the generation that each was made in.
_group_map: dict[tuple[int, ...], Any] = {}
_group_generation: dict[tuple[int, ...], int] = {}
# Root meshes by shape, names and ranks.
_DEVICE_MESH_MAP: dict[tuple, "DeviceMesh"] = {}

_Axes = tuple[tuple[int, ...], ...]


class DeviceMesh(TranslatedMesh):
    """Ranks in a grid with named axes.

    Args:
        mesh: global ranks as a tensor, a (nested) list or a numpy array, one dim for each axis.
        alias_name: the names of the axes.

    Raises:
        TypeError: ``mesh`` is of another type or does not hold whole numbers; ``alias_name`` is
            not a tuple of strings.
        ValueError: ``mesh`` has no dims, holds a rank twice or one outside the world;
            ``alias_name`` does not name the axes, or has an empty, repeated or reserved name.
    """

    def __init__(self, mesh: Union[Tensor, list, np.ndarray], alias_name: tuple[str, ...]) -> None:
        ranks = checks.check_ranks(platform.tensor_to_numpy(mesh) if isinstance(mesh, Tensor)
                                   else checks.as_array(mesh))
        checks.check_names(alias_name, ranks.ndim)
        _check_world(ranks)
        super().__init__(ranks, alias_name, _runtime.generation())
        self._set_up(None, None)

    def _set_up(self, root: Optional["DeviceMesh"], axes: Optional[_Axes]) -> None:
        self._root_mesh = root
        # Of a root mesh each axis is made of itself.
        self._axes = axes or tuple((axis,) for axis in range(self.ndim))
        self._flatten_mapping: dict[str, DeviceMesh] = {}
        # What depends on the rank of this process; see _rank_here.
        self._viewer: Optional[int] = None
        self._coordinate: Optional[tuple[int, ...]] = None
        self._sub_mesh_cache: dict[tuple[str, ...], DeviceMesh] = {}
        self._cache_rank_list_along_axis: dict[str, list[int]] = {}
        self._cache_ranks_over_axes: dict[tuple[int, ...], tuple[int, ...]] = {}

    @classmethod
    def _make(cls, ranks: np.ndarray, names: tuple[str, ...], root: Optional["DeviceMesh"],
              axes: Optional[_Axes]) -> "DeviceMesh":
        """A mesh from parts that are known to be right."""
        mesh = cls.__new__(cls)
        generation = _runtime.generation() if root is None else root._generation
        MeshTopology.__init__(mesh, ranks, names, generation)
        mesh._set_up(root, axes)
        return mesh

    @staticmethod
    def _of_ranks(ranks: np.ndarray, names: tuple[str, ...]) -> "DeviceMesh":
        return _create_device_mesh(ranks, names)

    # ---- what it is ----

    @property
    def mesh(self) -> Tensor:
        """The ranks as an int32 tensor on the CPU, of shape ``mesh_shape``; a fresh copy."""
        return _runtime.tensor_from_numpy(self._ranks)

    @property
    def root_mesh(self) -> "DeviceMesh":
        """The mesh that this one was cut out of; a mesh that was not cut is its own root."""
        return self._get_root_mesh()

    @property
    def sub_mesh(self) -> tuple["DeviceMesh", ...]:
        """The sub-meshes that were taken from this mesh so far."""
        return tuple(self._sub_mesh_cache.values())

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return platform.get_rank()

    def size(self, mesh_dim: Union[int, str, None] = None) -> int:
        """Number of ranks of the mesh, or along one axis given by name or position."""
        if mesh_dim is None:
            return self._ranks.size
        return self.get_device_num_along_axis(mesh_dim)

    def get_device_num_along_axis(self, axis: Union[int, str]) -> int:
        """Number of ranks along an axis given by name, flattened name or position."""
        shape = self._get_root_mesh().mesh_shape
        return math.prod(shape[root_axis] for root_axis in self._root_axes(self._name_of(axis)))

    # ---- where a rank is ----

    def get_coordinate(self) -> Optional[tuple[int, ...]]:
        """Position of this process along each axis; None if it is not in the mesh."""
        self._rank_here()
        return self._coordinate

    def get_local_rank(self, mesh_dim: Union[int, str, None] = None) -> int:
        """Position of this process along an axis, which a mesh of one axis need not name.

        Raises:
            RuntimeError: several axes and none given.
            TypeError: neither a name nor a position.
            ValueError: no such axis, or this process is not in the mesh.
        """
        name = self._name_of(mesh_dim)
        return self.get_rank_list_along_axis(name).index(platform.get_rank())

    def get_rank_list_along_axis(self, axis: Union[int, str]) -> list[int]:
        """The ranks beside this process along an axis, itself included, in mesh order.

        Raises:
            ValueError: no such axis, or this process is not in the mesh.
        """
        name = self._name_of(axis)
        rank = self._rank_here()
        if name not in self._cache_rank_list_along_axis:
            self._cache_rank_list_along_axis[name] = self.get_devices_for_axis(name, rank)
        return list(self._cache_rank_list_along_axis[name])

    def get_devices_for_axis(self, axis: Union[int, str], rank: int) -> list[int]:
        """The ranks beside ``rank`` along an axis, itself included, in mesh order.

        Raises:
            ValueError: no such axis, or ``rank`` is not in the mesh.
        """
        axes = self._root_axes(self._name_of(axis))
        if self._locate(rank) is None:
            raise ValueError(f"rank {rank} is not in {self!r}: only ranks of the mesh have "
                             f"neighbours along an axis")
        root = self._get_root_mesh()
        return root._along(axes, root._locate(rank)).reshape(-1).tolist()

    def _rank_here(self) -> int:
        """The rank of this process, after dropping what was kept for another one.

        A process learns its rank when it joins a process group, which can be after it made the
        mesh; and a mock may say another rank each time.
        """
        rank = platform.get_rank()
        if rank != self._viewer:
            self._viewer = rank
            self._coordinate = self._locate(rank)
            self._sub_mesh_cache.clear()
            self._cache_rank_list_along_axis.clear()
            self._cache_ranks_over_axes.clear()
            for name, flat in self._flatten_mapping.items():
                self._flatten_mapping[name] = self._cut((name,), flat._axes)
        return rank

    # ---- groups ----

    def get_group(self, mesh_dim: Union[int, str, None] = None) -> Any:
        """The process group of this process and those beside it along an axis.

        The first call for some ranks makes their group, and all of them have to call it; after
        that every mesh and axis with the same ranks gets the same group. An axis of size 1 gets
        a group of this process alone.

        Args:
            mesh_dim: axis by name, flattened name or position; a mesh of one axis need not say.

        Raises:
            RuntimeError: several axes and none given; the process group that the mesh was made
                with is gone; this process runs alone; a member never came (it names the ranks).
            TypeError: neither a name nor a position.
            ValueError: no such axis, or this process is not in the mesh.
        """
        return self.get_comm_group_by_axis(self._name_of(mesh_dim), platform.get_rank())

    def get_comm_group_by_axis(self, axis: Union[int, str], rank: int) -> Any:
        """The process group along an axis that ``rank`` is in; this process must be in it too.

        Raises:
            RuntimeError: see :meth:`get_group`.
            ValueError: no such axis, ``rank`` is not in the mesh, or its group is without this
                process.
        """
        own = platform.get_rank()
        if rank == own:
            ranks = tuple(self.get_rank_list_along_axis(axis))
        else:
            ranks = tuple(self.get_devices_for_axis(axis, rank))
        if own not in ranks:
            raise ValueError(f"only members can have a group: rank {own} is not among the ranks "
                             f"{ranks} along {axis!r} of rank {rank}")
        return self._group_of(ranks)

    def get_group_over_axes(self, axes: Sequence[int]) -> Any:
        """The process group that spans several axes, given by position, at this process.

        Its ranks are ordered as the axes are given, the last one running fastest.

        Raises:
            RuntimeError: see :meth:`get_group`.
            ValueError: this process is not in the mesh.
        """
        return self._group_of(self.get_ranks_over_axes(axes))

    def get_ranks_over_axes(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks of :meth:`get_group_over_axes`; no group is made."""
        axes = tuple(axes)
        rank = self._rank_here()
        if axes not in self._cache_ranks_over_axes:
            if self._coordinate is None:
                raise ValueError(f"rank {rank} is not in {self!r}: only members can have a group")
            root = self._get_root_mesh()
            inner = [root_axis for axis in axes for root_axis in self._axes[axis]]
            part = root._along(sorted(inner), root._locate(rank))
            order = [sorted(inner).index(root_axis) for root_axis in inner]
            self._cache_ranks_over_axes[axes] = tuple(part.transpose(order).reshape(-1).tolist())
        return self._cache_ranks_over_axes[axes]

    def _group_of(self, ranks: tuple[int, ...]) -> Any:
        """The group of ``ranks``, this process among them, made at the first call."""
        now = _runtime.generation()
        if self._generation != now:
            raise RuntimeError(f"the process group that {self!r} was made with has been destroyed "
                               f"since; build the mesh again after init_process_group")
        if len(ranks) == 1:
            return _runtime.self_group()
        if ranks not in _group_map or _group_generation.get(ranks, now) != now:
            _group_map[ranks] = platform.create_group(list(ranks))
            _group_generation[ranks] = now
        return _group_map[ranks]

    # ---- sub-meshes ----

    def __getitem__(self, sub_alias_name: Union[str, tuple[str, ...]]) -> "DeviceMesh":
        """The sub-mesh of some axes at the place of this process.

        A process outside the mesh gets the sub-mesh of the first rank.

        Args:
            sub_alias_name: names of axes or of flattened axes, in the order of the mesh.

        Raises:
            TypeError: not a string or a tuple of strings.
            KeyError: no such name.
            ValueError: no name, axes in another order than the mesh's, or an axis twice.
        """
        names = (sub_alias_name,) if isinstance(sub_alias_name, str) else sub_alias_name
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"a mesh is indexed by an axis name or a tuple of names, got "
                            f"{sub_alias_name!r}")
        if not names or "" in names:
            raise ValueError(f"a sub-mesh needs at least one axis name, and none that is empty, "
                             f"got {sub_alias_name!r}")
        if names == self._alias_name:
            return self
        root = self._get_root_mesh()
        self._rank_here()
        if names not in self._sub_mesh_cache:
            axes = tuple(self._axes_inside(name) for name in names)
            flat = [axis for group in axes for axis in group]
            if flat != sorted(set(flat)):
                raise ValueError(f"axes must stand in the order of the mesh, each once: {names!r} "
                                 f"are axes {flat} of {root.alias_name}")
            elsewhere = self is not root and self._coordinate is None
            self._sub_mesh_cache[names] = root._cut(names, axes, self._first_rank()) \
                if elsewhere else root._sub(names, axes)
        return self._sub_mesh_cache[names]

    def flatten(self, mesh_dim_name: Optional[str] = None) -> "DeviceMesh":
        """This mesh with its axes joined to one, the last axis running fastest.

        The root mesh knows the new axis from then on: ``root[name]``, ``root.get_group(name)``.
        Flattening the same axes to the same name again gives the same object, and a mesh of one
        axis flattened to its own name is the mesh itself.

        Args:
            mesh_dim_name: name of the new axis; None joins the names of the axes with ``_``.

        Raises:
            TypeError: the name is not a string.
            ValueError: the name is empty, ``"None"``, or means other axes already.
        """
        name = "_".join(self._alias_name) if mesh_dim_name is None else mesh_dim_name
        checks.check_name(name)
        if (name,) == self._alias_name:
            return self
        root = self._get_root_mesh()
        root._rank_here()
        axes = tuple(axis for group in self._axes for axis in group)
        if name in root._dev_name_to_index:
            raise ValueError(f"cannot flatten {self._alias_name} to {name!r}: that is an axis of "
                             f"{root.alias_name}; give another name")
        known = root._flatten_mapping.setdefault(name, root._cut((name,), (axes,)))
        if known._axes != (axes,):
            taken = tuple(root.alias_name[axis] for axis in known._axes[0])
            raise ValueError(f"cannot flatten {self._alias_name} to {name!r}: that is the name of "
                             f"{taken} flattened; give another name")
        if self._first_rank() != known._first_rank():  # a mesh at the place of another process
            return root._cut((name,), (axes,), self._first_rank())
        return known

    def _sub(self, names: tuple[str, ...], axes: _Axes) -> "DeviceMesh":
        """The sub-mesh of this root at the place of this process, one object for all askers."""
        self._rank_here()
        if len(names) == 1 and names[0] in self._flatten_mapping:
            return self._flatten_mapping[names[0]]
        if names not in self._sub_mesh_cache:
            self._sub_mesh_cache[names] = self._cut(names, axes)
        return self._sub_mesh_cache[names]

    def _cut(self, names: tuple[str, ...], axes: _Axes, at: Optional[int] = None) -> "DeviceMesh":
        """A sub-mesh of this root through the rank ``at`` (None: this process, else the first)."""
        coordinate = self._coordinate if at is None else self._locate(at)
        if coordinate is None:
            coordinate = (0,) * self.ndim
        part = self._along([axis for group in axes for axis in group], coordinate)
        shape = [math.prod(self.mesh_shape[axis] for axis in group) for group in axes]
        return DeviceMesh._make(part.reshape(shape), names, self, axes)

    def _get_root_mesh(self) -> "DeviceMesh":
        return self if self._root_mesh is None else self._root_mesh

    def _root_axes(self, name: str) -> tuple[int, ...]:
        """The root axes that an axis of this mesh or a flattened axis is made of."""
        if name in self._dev_name_to_index:
            return self._axes[self._dev_name_to_index[name]]
        return self._get_root_mesh()._flatten_mapping[name]._axes[0]

    def _axes_inside(self, name: str) -> tuple[int, ...]:
        """As :meth:`_root_axes`, for axes that lie within this mesh; else KeyError."""
        own = {axis for group in self._axes for axis in group}
        known = self._get_root_mesh()._flatten_mapping
        if name in self._dev_name_to_index or \
                (name in known and own.issuperset(known[name]._axes[0])):
            return self._root_axes(name)
        raise KeyError(f"the mesh has no axis {name!r}; its axes are {self._alias_name}, and "
                       f"flattened names are {tuple(known)}")

    def _name_of(self, mesh_dim: Union[int, str, None]) -> str:
        """The name of an axis given by name, position or, with one axis, not at all."""
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError(f"a mesh of several axes needs to be told which one: pass one "
                                   f"of {self._alias_name}")
            return self._alias_name[0]
        if isinstance(mesh_dim, str):
            if mesh_dim not in self._dev_name_to_index and \
                    mesh_dim not in self._get_root_mesh()._flatten_mapping:
                raise ValueError(f"the mesh has no axis {mesh_dim!r}; its axes are "
                                 f"{self._alias_name}, and flattened names are "
                                 f"{tuple(self._get_root_mesh()._flatten_mapping)}")
            return mesh_dim
        if isinstance(mesh_dim, bool) or not isinstance(mesh_dim, (int, np.integer)):
            raise TypeError(f"an axis is given by name or position, got {mesh_dim!r}")
        if not -self.ndim <= mesh_dim < self.ndim:
            raise ValueError(f"axis {mesh_dim} is out of range for the {self.ndim} axes "
                             f"{self._alias_name}")
        return self._alias_name[mesh_dim]

    # ---- copies ----

    def __reduce__(self) -> tuple:
        """Pickle the layout without groups; loading gives a mesh of the loader's own world."""
        root = self._get_root_mesh()
        flattened = tuple((name, flat._axes[0]) for name, flat in root._flatten_mapping.items())
        # A plain list, since torch.load refuses an array unless it is told to trust the file.
        return restore_mesh, (root._ranks.tolist(), root._alias_name,
                              flattened, self._alias_name, self._axes, self._first_rank())


def init_device_mesh(mesh_shape: tuple[int, ...], alias_name: tuple[str, ...], *,
                     rank_list: Optional[Sequence[int]] = None) -> DeviceMesh:
    """The mesh of a shape; the same arguments give the same object.

    Args:
        mesh_shape: number of ranks along each axis.
        alias_name: names of the axes.
        rank_list: the ranks, row by row; None takes 0, 1, 2, ...

    Raises:
        TypeError: ``mesh_shape`` or ``alias_name`` is not a tuple, or of wrong elements.
        ValueError: lengths that differ, an axis without ranks, repeated, empty or reserved
            names, a repeated rank, or more ranks than the world has.
    """
    shape = checks.check_shape(mesh_shape)
    checks.check_names(alias_name, len(shape))
    ranks = checks.check_rank_list(rank_list, shape)
    _check_world(ranks)
    return _create_device_mesh(ranks, alias_name)


def _create_device_mesh(ranks: np.ndarray, alias_name: tuple[str, ...]) -> DeviceMesh:
    """The one root mesh of these ranks and names in the current generation."""
    mesh = DeviceMesh._make(ranks, alias_name, None, None)
    key = (mesh.mesh_shape, alias_name, mesh.rank_list)
    known = _DEVICE_MESH_MAP.get(key)
    if known is None or known != mesh:  # unequal: it is of an earlier generation
        _DEVICE_MESH_MAP[key] = known = mesh
    return known


def restore_mesh(ranks: Sequence[Any], names: tuple[str, ...],
                 flattened: tuple[tuple[str, tuple[int, ...]], ...], own_names: tuple[str, ...],
                 own_axes: _Axes, first_rank: int) -> DeviceMesh:
    """The mesh that was pickled, as one of this process; ``ranks`` is a nested list."""
    root = _create_device_mesh(np.array(ranks), names)
    known = root._flatten_mapping
    if any(name in known and known[name]._axes != (axes,) for name, axes in flattened):
        # This process gave the name to other axes: keep the two roots apart.
        root = DeviceMesh._make(root._ranks, names, None, None)
    root._rank_here()
    for name, axes in flattened:
        root._flatten_mapping.setdefault(name, root._cut((name,), (axes,)))
    if own_names == names:
        return root
    mesh = root._sub(own_names, own_axes)
    same_place = mesh._first_rank() == first_rank
    return mesh if same_place else root._cut(own_names, own_axes, first_rank)


def _check_world(ranks: np.ndarray) -> None:
    if platform is _runtime:  # a stand-in for the platform has a world of its own
        _runtime.require_eager()
        checks.check_world(ranks, _runtime.known_world_size())

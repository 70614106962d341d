"""Layout: how one tensor lies on a mesh, and TensorSpec: a layout together with a global shape.

Both are frozen and interned: two equal ones are the same object, so that they are compared and
hashed by identity.  Nothing here touches a tensor or makes a group.
"""
from __future__ import annotations

import weakref
from functools import cached_property
from typing import Mapping, Optional, Sequence, Union

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.platform import get_platform

_REPLICATE = Replicate()
_PARTIAL = Partial()

AxisOrder = Mapping[int, Sequence[Union[int, str]]]


def chunk_bounds(size: int, pieces: int, index: int) -> tuple[int, int]:
    """Start and length of piece ``index`` when ``torch.chunk`` cuts ``size`` elements.

    All pieces but the last non-empty one have ``ceil(size / pieces)`` elements; the ones after
    that are empty.
    """
    step = -(-size // pieces)
    start = min(index * step, size)
    return start, min(step, size - start)


class Layout:
    """Mesh, one placement a mesh axis, and the order in which axes split a shared tensor dim.

    Args:
        device_mesh: the mesh.
        placements: one ``Shard``, ``Replicate`` or ``Partial`` for each axis of the mesh.
        shard_order: for tensor dims that several axes split, the axes (index or name) in the
            order in which they split it, outermost first, as ``{dim: (axis, ...)}``.  The
            default for every dim is mesh order.  ``{0: ("tp", "dp")}`` is what a JAX
            ``PartitionSpec(("tp", "dp"))`` says.

    Raises:
        TypeError: a mesh or a placement of another type.
        ValueError: a number of placements other than the mesh's number of axes, reduce ops that
            do not commute, or an order that does not name just the axes that split its dim.
    """

    __slots__ = ("device_mesh", "placements", "shard_order", "_axes_of_dim", "__weakref__",
                 "__dict__")

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...]
    _axes_of_dim: dict[int, tuple[int, ...]]

    _interned: "weakref.WeakValueDictionary[tuple, Layout]" = weakref.WeakValueDictionary()

    def __new__(cls, device_mesh: DeviceMesh, placements: Sequence[Placement],
                shard_order: Optional[AxisOrder] = None) -> "Layout":
        placements = _check_placements(device_mesh, placements)
        axes_of_dim = _axes_of_dim(placements)
        order = _canonical_order(device_mesh, axes_of_dim, shard_order) if shard_order else ()
        key = (device_mesh, placements, order)
        found = cls._interned.get(key)
        if found is not None:
            return found
        self = super().__new__(cls)
        axes_of_dim.update(order)
        for name, value in (("device_mesh", device_mesh), ("placements", placements),
                            ("shard_order", order), ("_axes_of_dim", axes_of_dim)):
            object.__setattr__(self, name, value)
        return cls._interned.setdefault(key, self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is frozen; make a new one instead of setting {name}")

    def __reduce__(self) -> tuple:
        return Layout, (self.device_mesh, self.placements, dict(self.shard_order))

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: dict) -> "Layout":
        return self

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={placement!r}" for name, placement in
                         zip(self.device_mesh.alias_name, self.placements))
        order = "".join(
            f", order of dim {dim}: {' > '.join(self.device_mesh.alias_name[a] for a in axes)}"
            for dim, axes in self.shard_order)
        return f"Layout({axes}{order})"

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Axes that split tensor dim ``dim``, outermost first."""
        return self._axes_of_dim.get(dim, ())

    @property
    def sharded_dims(self) -> tuple[int, ...]:
        """The tensor dims that some axis splits."""
        return tuple(self._axes_of_dim)

    def is_replicated(self) -> bool:
        """True when every rank of the mesh holds the whole tensor."""
        return all(type(placement) is Replicate for placement in self.placements)

    @cached_property
    def dual(self) -> "Layout":
        """Layout of the gradient of a tensor that has this layout.

        ``Shard`` stays, ``Replicate`` stays, a summand's gradient is the whole one.  Only the
        ranks that hold the extremum or the factor get a gradient under the other reduce ops, so
        there the local gradients are summands themselves.
        """
        return self.replaced({
            axis: _REPLICATE if placement.reduce_op in ("sum", "avg") else _PARTIAL
            for axis, placement in enumerate(self.placements) if type(placement) is Partial})

    def replaced(self, changes: Mapping[int, Placement]) -> "Layout":
        """The layout with some axes' placements changed.

        An axis that comes to split a dim others split already becomes its innermost axis.
        """
        if not changes:
            return self
        placements = tuple(changes.get(axis, old) for axis, old in enumerate(self.placements))
        order = {}
        for dim, default in _axes_of_dim(placements).items():
            kept = [a for a in self.axes_of(dim) if placements[a] == self.placements[a]]
            order[dim] = (*kept, *(a for a in default if a not in kept))
        return Layout(self.device_mesh, placements, order)

    def on_root(self) -> "Layout":
        """The layout on the root mesh that places the parts alike, where sizes divide evenly.

        An axis that the mesh does not have is ``Replicate``, a flattened axis is the axes that it
        is made of.
        """
        mesh, root = self.device_mesh, self.device_mesh.root_mesh
        if mesh is root:
            return self
        placements: list[Placement] = [_REPLICATE] * root.ndim
        for placement, axes in zip(self.placements, mesh._axes):
            for axis in axes:
                placements[axis] = placement
        order = {dim: [axis for own in axes for axis in mesh._axes[own]]
                 for dim, axes in self._axes_of_dim.items()}
        return Layout(root, placements, order)

    def for_ndim(self, ndim: int) -> "Layout":
        """The layout with negative dims made positive for a tensor of ``ndim`` dims.

        Raises:
            ValueError: a ``Shard`` names a dim that such a tensor does not have.
        """
        changes = {}
        for axis, placement in enumerate(self.placements):
            if type(placement) is Shard and not 0 <= placement.dim < ndim:
                if not -ndim <= placement.dim < 0:
                    raise ValueError(
                        f"{placement!r} on axis {self.device_mesh.alias_name[axis]!r} names a dim "
                        f"that a tensor of {ndim} dims does not have; dims run from {-ndim} to "
                        f"{ndim - 1}.")
                changes[axis] = Shard(placement.dim + ndim)
        if not changes:
            return self
        placements = tuple(changes.get(axis, old) for axis, old in enumerate(self.placements))
        order = {dim % ndim: axes for dim, axes in self.shard_order}
        return Layout(self.device_mesh, placements, order)

    def local_bounds(self, shape: Sequence[int], coordinate: Optional[Sequence[int]] = None
                     ) -> tuple[tuple[int, int], ...]:
        """For each tensor dim, start and length of the part that one rank holds.

        Args:
            shape: global shape.
            coordinate: the rank's coordinate in the mesh; by default the current rank's.

        Raises:
            ValueError: the current rank is not in the mesh.
        """
        if coordinate is None:
            coordinate = own_coordinate(self.device_mesh)
        sizes = self.device_mesh.mesh_shape
        bounds = []
        for dim, size in enumerate(shape):
            start, length = 0, size
            for axis in self.axes_of(dim):
                offset, length = chunk_bounds(length, sizes[axis], coordinate[axis])
                start += offset
            bounds.append((start, length))
        return tuple(bounds)

    def local_shape(self, shape: Sequence[int], coordinate: Optional[Sequence[int]] = None
                    ) -> tuple[int, ...]:
        """Shape of the part of a tensor of global ``shape`` that one rank holds."""
        return tuple(length for _, length in self.local_bounds(shape, coordinate))


class TensorSpec:
    """What a DTensor knows of itself: its layout and its global shape.

    Attributes:
        layout: the layout, its dims all positive.
        shape: the global shape, in the framework's own type.

    Raises:
        ValueError: the layout shards a dim that the shape does not have.
    """

    __slots__ = ("layout", "shape", "__weakref__", "__dict__")

    layout: Layout
    shape: tuple[int, ...]

    _interned: "weakref.WeakValueDictionary[tuple, TensorSpec]" = weakref.WeakValueDictionary()
    _shape_type = get_platform().Size

    def __new__(cls, layout: Layout, shape: Sequence[int]) -> "TensorSpec":
        shape = cls._shape_type(shape)
        layout = layout.for_ndim(len(shape))
        key = (layout, shape)
        found = cls._interned.get(key)
        if found is not None:
            return found
        self = super().__new__(cls)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "shape", shape)
        return cls._interned.setdefault(key, self)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a TensorSpec is frozen; make a new one instead of setting {name}")

    def __reduce__(self) -> tuple:
        return TensorSpec, (self.layout, tuple(self.shape))

    def __copy__(self) -> "TensorSpec":
        return self

    def __deepcopy__(self, memo: dict) -> "TensorSpec":
        return self

    def __repr__(self) -> str:
        return f"TensorSpec({list(self.shape)}, {self.layout!r})"

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the current rank's part."""
        return self.layout.local_shape(self.shape)

    @cached_property
    def dual(self) -> "TensorSpec":
        """Spec of the gradient."""
        return TensorSpec(self.layout.dual, self.shape)

    @cached_property
    def is_root(self) -> bool:
        """Whether a backward pass may start at a tensor with this spec.

        The gradient of a sum is the whole one; any other reduction has to be part of the graph.
        """
        return all(type(placement) is not Partial or placement.reduce_op == "sum"
                   for placement in self.layout.placements)


def _check_placements(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"a layout needs a DeviceMesh, but got {mesh!r} ({type(mesh).__name__}); "
                        "make one with init_device_mesh.")
    if isinstance(placements, Placement) or not isinstance(placements, (tuple, list)):
        raise TypeError("placements is a list or tuple with one placement for each mesh axis, "
                        f"but got {placements!r}; write [{placements!r}].")
    for placement in placements:
        if not isinstance(placement, (Shard, Replicate, Partial)):
            raise TypeError("a placement is Shard(dim), Replicate() or Partial(), but got "
                            f"{placement!r} ({type(placement).__name__}).")
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"one placement is needed for each of the {mesh.ndim} axes {mesh.alias_name} of the "
            f"mesh, but got {len(placements)}: {tuple(placements)}.")
    ops = {placement.reduce_op for placement in placements if isinstance(placement, Partial)}
    if len(ops) > 1 and not ops <= {"sum", "avg"}:
        raise ValueError(
            "the reduce ops of one tensor must commute, since their order is not part of a "
            f"layout, but got {tuple(placements)}; reduce one axis first.")
    return tuple(placements)


def _axes_of_dim(placements: Sequence[Placement]) -> dict[int, tuple[int, ...]]:
    axes: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            axes[placement.dim] = (*axes.get(placement.dim, ()), axis)
    return axes


def _canonical_order(mesh: DeviceMesh, axes_of_dim: Mapping[int, tuple[int, ...]],
                     shard_order: AxisOrder) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The dims whose order is not mesh order, sorted, axes as indices."""
    if not isinstance(shard_order, Mapping):
        raise TypeError("shard_order maps a tensor dim to the axes that split it, outermost "
                        f"first, as in {{0: ('tp', 'dp')}}, but got {shard_order!r}.")
    canonical = []
    for dim, axes in shard_order.items():
        indices = tuple(mesh.axis_index(a) if isinstance(a, str) else a for a in axes)
        expected = axes_of_dim.get(dim, ())
        if sorted(indices) != list(expected):
            names = tuple(mesh.alias_name[a] for a in expected)
            raise ValueError(
                f"the shard order of dim {dim} must name each axis that splits it once: "
                f"{names}, but got {tuple(axes)}.")
        if indices != expected:
            canonical.append((dim, indices))
    return tuple(sorted(canonical))


def own_coordinate(mesh: DeviceMesh) -> Sequence[int]:
    """The current rank's coordinate in ``mesh``.

    Raises:
        ValueError: the rank is not in the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"rank {get_platform().get_rank()} is not in {mesh!r} and so holds no part of a tensor "
            "on it; guard the code with `if mesh.get_coordinate() is not None`.")
    return coordinate

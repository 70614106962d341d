"""DTensor: a tensor spread over a mesh."""
from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, Iterator, Optional, Sequence

from hyper_parallel.core.device_mesh import DeviceMesh, restore_mesh
from hyper_parallel.core.dtensor import tensor_redistribution
from hyper_parallel.core.dtensor._redistribute_plan import RedistributionPlan
from hyper_parallel.core.dtensor.tensor_redistribution import Move, plan_move, redistribute
from hyper_parallel.core.layout import Layout, TensorSpec, chunk_bounds, own_coordinate
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.identity_map import IdentityMap
from hyper_parallel.platform.translation_adapter import NativeTensor

platform = get_platform()

Placements = Sequence[Placement]


class DTensor(platform.DTensorBase):
    """A tensor spread over a mesh, with the interface of an ordinary one.

    ``shape``, ``size()``, ``numel()``, ``stride()`` and ``len()`` speak of the global tensor,
    ``dtype``, ``device`` and the like are those of the local one.  Make one with
    :func:`distribute_tensor` or :meth:`from_local`; the constructor is not meant to be called.
    """

    _spec: TensorSpec
    _views_of_leaf = False  # whether the views shared with a plain tensor hang at a leaf
    _in_files = (TensorSpec, Layout, restore_mesh, Shard, Replicate, Partial)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is spread over."""
        return self._spec.layout.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return self._spec.layout.placements

    @staticmethod
    def from_local(local_tensor: Any, device_mesh: DeviceMesh,
                   placements: Optional[Placements] = None, *, run_check: bool = False,
                   shape: Optional[Sequence[int]] = None, stride: Optional[Sequence[int]] = None,
                   grad_placements: Optional[Placements] = None) -> "DTensor":
        """Call the ranks' local tensors one DTensor; nothing is sent and nothing is copied.

        Args:
            local_tensor: this rank's part.  The result is an alias of it in the same graph.
            device_mesh: the mesh.
            placements: how the parts lie; by default replicated on every axis.
            run_check: accepted as in PyTorch; True overwrites replicated parts by those of the
                axis' first rank.
            shape: global shape.  By default every rank is taken to hold as much as this one
                does, which is right when the sharded dims divide evenly.
            stride: accepted as in PyTorch and not needed: strides follow the local tensor.
            grad_placements: placements that the gradient which flows back to ``local_tensor``
                shall have, by default those that its type implies.

        Raises:
            TypeError: ``local_tensor`` is not a plain tensor.
            ValueError: placements that do not fit, or a local tensor that is not the part that
                this rank holds of a tensor of ``shape``.
        """
        del stride
        platform.require_eager()
        if isinstance(local_tensor, DTensor) or not isinstance(local_tensor, platform.Tensor):
            raise TypeError("from_local takes this rank's plain tensor, but got a "
                            f"{type(local_tensor).__name__}.")
        if placements is None:
            placements = (Replicate(),) * device_mesh.ndim
        spec = _spec_of_local(device_mesh, _hashable(placements), tuple(local_tensor.shape),
                              None if shape is None else tuple(shape))
        local = platform.undress(local_tensor)
        if run_check:
            _overwrite_replicas(local, spec.layout)
        if grad_placements is not None:
            # The node's gradient arrives in the dual layout and leaves as the caller wants it.
            wanted = _layout(device_mesh, grad_placements, len(spec.shape))
            local = _with_gradient_as(local, spec.layout.dual, wanted, spec.shape)
        return platform.dress(local, DTensor, spec)

    @staticmethod
    def from_torch(tensor: Any) -> "DTensor":
        """A ``torch.distributed.tensor.DTensor`` as one of this library; nothing is copied or sent.

        Gradients flow back into it.

        Raises:
            TypeError: ``tensor`` is another thing.
            ValueError: a placement without a counterpart.
        """
        native = platform.read_native_tensor(tensor)
        kinds = {"shard": Shard, "replicate": lambda _: Replicate(), "partial": Partial}
        return DTensor.from_local(
            native.local, DeviceMesh.from_torch(native.mesh),
            [kinds[kind](value) for kind, value in native.placements], shape=native.shape)

    def to_torch(self) -> Any:
        """The tensor as a ``torch.distributed.tensor.DTensor``; nothing is copied or sent.

        Gradients flow back into this one. All ranks of the mesh have to call it, since PyTorch's
        mesh needs the groups of all axes.

        Raises:
            ValueError: axes that split a dim in another than mesh order, or a mesh that PyTorch
                does not have; see :meth:`DeviceMesh.to_torch`.
        """
        if self.layout.shard_order:
            raise ValueError(f"PyTorch's DTensor splits dims in mesh order, but this one lies as "
                             f"{self.layout!r}; redistribute it before.")
        placements = tuple(
            ("shard", placement.dim) if isinstance(placement, Shard) else
            ("partial", placement.reduce_op) if isinstance(placement, Partial) else
            ("replicate", None) for placement in self.placements)
        return platform.build_native_tensor(NativeTensor(
            platform.undress(self), self.device_mesh.to_torch(), placements, tuple(self.shape)))

    def to_local(self, *, grad_placements: Optional[Placements] = None) -> Any:
        """This rank's part as a plain tensor, an alias in the same graph.

        Args:
            grad_placements: placements of the gradient that will flow back into the result, by
                default those that its type implies: whole and equal on every rank where the
                tensor is Replicate or Partial.
        """
        local = platform.undress(self)
        if grad_placements is not None:
            layout = _layout(self.device_mesh, grad_placements, len(self.shape))
            local = _with_gradient_as(local, layout, self.layout.dual, self.shape)
        return local

    def full_tensor(self, *, grad_placements: Optional[Placements] = None) -> Any:
        """The whole tensor on every rank, as a plain tensor."""
        whole = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(self, device_mesh: Optional[DeviceMesh] = None,
                     placements: Optional[Placements] = None, *, async_op: bool = False,
                     shard_order: Optional[Any] = None) -> "DTensor":
        """The same tensor in another layout.

        Args:
            device_mesh: the mesh wanted, by default the tensor's own; a sub-mesh or a flattened
                mesh of the same root is another one. Along axes that one of the two does not
                have, the tensor is replicated.
            placements: the placements wanted, one for each axis of that mesh.
            async_op: accepted as in PyTorch; the result may be used at once either way.
            shard_order: order in which axes split a shared dim; see :class:`Layout`.

        Raises:
            ValueError: no placements, a mesh of another root, or a dim that the tensor does not
                have.
        """
        del async_op
        spec = self._spec
        target = _target_spec(spec, device_mesh, placements, shard_order)
        if target is spec:
            return platform.dress(platform.undress(self), DTensor, spec)
        if target.layout.device_mesh != self.device_mesh:
            return _to_other_mesh(self, target)
        move = plan_move(spec, target.layout, target.layout.dual)
        result = platform.dress(move(self), DTensor, target)
        if move.gathers and platform.needs_gradient(result):
            # A use of the result that varies reduces and scatters its gradient straight to here.
            result._gathered_from = self
        return result

    def plan_to(self, placements: Placements, device_mesh: Optional[DeviceMesh] = None, *,
                shard_order: Optional[Any] = None) -> RedistributionPlan:
        """What ``redistribute`` with the same arguments would do; nothing is sent.

        Printing the plan shows the steps, their groups, and the bytes that this rank sends.

        Raises:
            ValueError: see :meth:`redistribute`.
        """
        target = _target_spec(self._spec, device_mesh, placements, shard_order)
        moves = _moves_to(self._spec, target)
        steps = tuple(step for move in moves for step in move.all_steps)
        return RedistributionPlan(steps, tuple(self.shape), self.itemsize)

    def share_views_with(self, plain: Any) -> None:
        """Sum the gradients of this replicated alias of ``plain`` with those of its other aliases.

        The views through which uses that vary are summed are ``plain``'s then, so that all of
        them cost one all-reduce.
        """
        self.__dict__.update(_views=views_of(plain), _views_of_leaf=platform.is_leaf(plain))

    @staticmethod
    def _local_gradient(grad: Any, spec: TensorSpec) -> Any:
        """This rank's part of ``grad`` for a tensor with ``spec``; a plain one is replicated."""
        if isinstance(grad, DTensor):
            source = grad._spec
            if source is spec.dual is spec:
                return platform.undress(grad)
        else:
            whole = Layout(spec.layout.device_mesh, [Replicate()] * spec.layout.device_mesh.ndim)
            source = TensorSpec(whole, grad.shape)
        if source.shape != spec.shape:
            raise ValueError(f"a gradient has the shape of its tensor, which is "
                             f"{tuple(spec.shape)}, but got {tuple(source.shape)}.")
        # What made a summand uses the gradient for its own part alone: see Move.backward.
        return redistribute(grad, source, spec.dual.layout, gradient=spec.layout, tensor=grad)

    @staticmethod
    def _global_gradient(grad: Any, spec: TensorSpec) -> "DTensor":
        """The local gradient ``grad`` of a tensor with ``spec`` as a DTensor of the dual layout."""
        grad = platform.undress(grad)
        if spec.dual is not spec:
            grad = _with_gradient_as(grad, spec.dual.layout.dual, spec.layout, spec.shape)
        return platform.dress(grad, DTensor, spec.dual)

    def _as_root(self) -> "DTensor":
        """The tensor to start a backward pass from."""
        if self._spec.is_root:
            return self
        return self.redistribute(placements=[
            Replicate() if placement.is_partial() else placement
            for placement in self.placements])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        local = tensor_contents
        if local is None:
            local = platform.detach(platform.undress(self))
        return (f"DTensor(local_tensor={local!r}, device_mesh={self.device_mesh!r}, "
                f"placements={self.placements})")


# Not set on the user's own tensors, which may be pickled with all that is set on them.
_views_of_plain: IdentityMap[dict] = IdentityMap()


def views_of(tensor: Any) -> dict[Move, tuple]:
    """The views of a tensor that stand for its uses, by the move of their gradient."""
    views = tensor.__dict__.get("_views")
    if views is not None:
        return views
    if type(tensor) is DTensor:
        views = tensor._views = {}
        return views
    views = _views_of_plain.get(tensor)
    if views is None:
        views = {}
        _views_of_plain.set(tensor, views)
    return views


def distribute_tensor(tensor: Any, device_mesh: DeviceMesh,
                      placements: Optional[Placements] = None, *,
                      src_data_rank: Optional[int] = 0) -> DTensor:
    """Spread a tensor over a mesh.

    Args:
        tensor: the whole tensor, of the same shape on every rank of the mesh.
        device_mesh: the mesh.
        placements: one placement for each axis, by default Replicate.
        src_data_rank: position along each axis of the rank whose values count; the others'
            values are ignored.  None takes every rank's own values and sends nothing.

    Returns:
        A DTensor; a leaf, which requires gradients where ``tensor`` does.

    Raises:
        RuntimeError: ``tensor`` was computed from tensors that require gradients, which could
            not flow back to them.
        TypeError: ``tensor`` is not a tensor.
        ValueError: placements that do not fit the mesh or the tensor, or a rank outside of it.
    """
    platform.require_eager()
    if not isinstance(tensor, platform.Tensor):
        raise TypeError(f"distribute_tensor takes a tensor, but got a {type(tensor).__name__}.")
    if isinstance(tensor, DTensor):
        raise ValueError(f"the tensor is spread already, as {tensor.layout!r}; use redistribute.")
    layout = _layout(device_mesh, placements, len(tensor.shape))
    own_coordinate(device_mesh)
    whole = TensorSpec(Layout(device_mesh, [Replicate()] * device_mesh.ndim), tensor.shape)
    spec = TensorSpec(layout, tensor.shape)
    if not platform.is_leaf(tensor):
        raise RuntimeError(
            "distribute_tensor makes a leaf, so it does not take a tensor with a history; use "
            "DTensor.from_local(tensor, mesh, [Replicate(), ...]).redistribute(...).")
    local = platform.copied(platform.detach(tensor))
    if src_data_rank is None:
        local = redistribute(local, whole, layout)
        return platform.dress(platform.as_leaf(local, tensor), DTensor, spec)
    sent = (src_data_rank,) if device_mesh.size() > 1 else ()
    with _observed(tensor, whole, layout, sent):
        for axis in range(device_mesh.ndim):
            local = _send_along(local, layout, axis, src_data_rank)
        local = redistribute(local, TensorSpec(_only_shards(layout), spec.shape), layout)
    return platform.dress(platform.as_leaf(local, tensor), DTensor, spec)


@contextmanager
def _observed(tensor: Any, source: TensorSpec, target: Layout, steps: Sequence[Any]
              ) -> Iterator[None]:
    """A context in which a tensor moves without a plan, shown to the tracer like any move."""
    observer = tensor_redistribution._redistribute_observer
    if observer is None:
        yield
        return
    token = observer.begin(tensor, source.layout, target, source.shape, steps)
    try:
        yield
    finally:
        observer.end(token)


def _send_along(local: Any, layout: Layout, axis: int, source: int) -> Any:
    """Give every rank along ``axis`` its part of what the source rank holds."""
    mesh, placement = layout.device_mesh, layout.placements[axis]
    size = mesh.mesh_shape[axis]
    if size == 1:
        return local
    group = mesh.get_group(axis)
    if not isinstance(placement, Shard) or layout.shard_order:
        return platform.broadcast(local, source, group)
    dim = placement.dim
    bounds = [chunk_bounds(local.shape[dim], size, index) for index in range(size)]
    longest = bounds[0][1]
    pieces = [platform.contiguous(platform.pad_end(platform.narrow(local, dim, start, count), dim,
                                                   longest - count)) for start, count in bounds]
    own = platform.scatter(platform.zeros_like(pieces[0]), pieces, source, group)
    count = bounds[mesh.get_coordinate()[axis]][1]
    return own if count == longest else platform.contiguous(platform.narrow(own, dim, 0, count))


def _only_shards(layout: Layout) -> Layout:
    """How a tensor lies after it was sent: what is not scattered is whole."""
    if layout.shard_order:
        return layout.replaced(dict.fromkeys(range(len(layout.placements)), Replicate()))
    return layout.replaced({axis: Replicate() for axis, placement in enumerate(layout.placements)
                            if isinstance(placement, Partial)})


def _hashable(placements: Any) -> Any:
    """A list of placements as a tuple; anything else is left for Layout to refuse."""
    return tuple(placements) if isinstance(placements, list) else placements


def _target_spec(spec: TensorSpec, mesh: Optional[DeviceMesh], placements: Optional[Placements],
                 shard_order: Optional[Any]) -> TensorSpec:
    mesh = spec.layout.device_mesh if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"the first argument of redistribute is a DeviceMesh, but got {mesh!r}; "
                        "write redistribute(placements=[...]) to stay on the tensor's own.")
    if placements is None:
        raise ValueError("redistribute needs placements, one for each of the axes "
                         f"{mesh.alias_name}; the tensor has {spec.layout.placements}.")
    if shard_order is None:
        return _spec_with(mesh, spec.shape, _hashable(placements))
    return TensorSpec(Layout(mesh, placements, shard_order), spec.shape)


@lru_cache(maxsize=4096)
def _spec_with(mesh: DeviceMesh, shape: Sequence[int], placements: Placements) -> TensorSpec:
    return TensorSpec(Layout(mesh, placements), shape)


def _to_other_mesh(tensor: DTensor, target: TensorSpec) -> DTensor:
    """Move ``tensor`` to a mesh of the same root."""
    local: Any = tensor
    for move in _moves_to(tensor._spec, target):
        local = move(local)
    return platform.dress(platform.undress(local) if local is tensor else local, DTensor, target)


@lru_cache(maxsize=4096)
def _moves_to(spec: TensorSpec, target: TensorSpec) -> tuple[Move, ...]:
    """The moves between two specs, by way of the root mesh where their meshes differ."""
    shape, before, after = spec.shape, spec.layout, target.layout
    if before.device_mesh == after.device_mesh:
        return (plan_move(spec, after, after.dual),)
    if before.device_mesh.root_mesh != after.device_mesh.root_mesh:
        raise ValueError(
            f"a tensor moves between meshes of one root, but it is on {before.device_mesh!r} and "
            f"{after.device_mesh!r} is of another; gather it with full_tensor() and distribute it "
            "again on the other mesh.")
    own_coordinate(after.device_mesh)
    ways = (before, _divided_by_root(before, shape), _divided_by_root(after, shape), after)
    return tuple(plan_move(TensorSpec(one, shape), other, other.dual) for one, other in (
        ways[:2], (ways[1].on_root(), ways[2].on_root()), ways[2:]) if one is not other)


def _divided_by_root(layout: Layout, shape: Sequence[int]) -> Layout:
    """``layout`` without the flattened axes that cut a dim otherwise than their parts would."""
    sizes = layout.device_mesh.mesh_shape
    return layout.replaced({
        axis: Replicate() for dim in layout.sharded_dims for axis in layout.axes_of(dim)
        if shape[dim] % prod(sizes[other] for other in layout.axes_of(dim))
        and any(len(layout.device_mesh._axes[other]) > 1 for other in layout.axes_of(dim))})


@lru_cache(maxsize=4096)
def _spec_of_local(mesh: DeviceMesh, placements: Placements, local_shape: tuple[int, ...],
                   shape: Optional[tuple[int, ...]]) -> TensorSpec:
    """The spec of a tensor of which this rank holds a part of ``local_shape``."""
    layout = _layout(mesh, placements, len(local_shape))
    spec = TensorSpec(layout, _even_global_shape(local_shape, layout) if shape is None else shape)
    if spec.local_shape != local_shape:
        raise ValueError(
            f"under {layout!r} rank {platform.get_rank()} holds a part of shape "
            f"{tuple(spec.local_shape)} of a tensor of shape {tuple(spec.shape)}, but the local "
            f"tensor has the shape {local_shape}; pass the right shape=, or lay the pieces out as "
            "torch.chunk does.")
    return spec


def _layout(mesh: DeviceMesh, placements: Optional[Placements], ndim: int) -> Layout:
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    return Layout(mesh, placements).for_ndim(ndim)


def _even_global_shape(local_shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    shape = list(local_shape)
    for dim in layout.sharded_dims:
        for axis in layout.axes_of(dim):
            shape[dim] *= layout.device_mesh.mesh_shape[axis]
    return tuple(shape)


def _overwrite_replicas(local: Any, layout: Layout) -> None:
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Replicate) and layout.device_mesh.mesh_shape[axis] > 1:
            platform.broadcast(local, 0, layout.device_mesh.get_group(axis))


def _with_gradient_as(local: Any, arrives: Layout, leaves: Layout, shape: Sequence[int]) -> Any:
    """An alias of ``local`` whose gradient comes in one layout and goes on in another."""
    back = plan_move(TensorSpec(arrives, shape), leaves, leaves.dual)
    if not platform.needs_gradient(local):
        return local
    return platform.apply_with_gradient(platform.detach, back, local)

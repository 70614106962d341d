"""Redistribution: runs a plan on the local tensor of a rank, forward and backward.

A ``Move`` is a plan made ready for one global shape: what every step slices, pads or exchanges
is worked out once.  Its gradient is another ``Move``, from the layout in which the local
gradient arrives to the dual of the source layout, so one mechanism serves every row of the
gradient table:

    forward                         gradient arrives as      backward
    Partial -> Replicate            Replicate                Replicate -> Replicate  nothing
    Replicate -> Shard              Shard                    Shard -> Replicate      all-gather
    Shard -> Replicate              Replicate                Replicate -> Shard      own slice
    Replicate, used varyingly       Partial                  Partial -> Replicate    all-reduce
    Shard -> Replicate, likewise    Partial                  Partial -> Shard        reduce-scatter

Used varyingly means: by an operator whose results differ over the axis, so that every rank's
gradient is only its own contribution.
"""
from __future__ import annotations

import itertools
from functools import lru_cache
from math import prod
from typing import Any, Callable, NamedTuple, Optional, Protocol, Sequence

from hyper_parallel.core.dtensor._redistribute_plan import (
    AllGather, AllReduce, AllToAll, KeepFirst, PlaceInZeros, ReduceScatter, Slice, Step,
    plan_redistribution)
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.platform import get_platform

platform = get_platform()

LocalFunction = Callable[[Any], Any]


class OperandUse(NamedTuple):
    """Which argument of which operator a tensor moves for.

    The argument is a position such as ``"1"``, a name, or an entry such as ``"0[2]"``; None where
    the operator as a whole needs the move. ``parameter`` refers weakly to a trained tensor beside
    it, by which a trace that begins later can tell the module.
    """

    operator: str
    argument: Optional[str]
    parameter: Optional[Callable[[], Any]] = None


class RedistributeObserver(Protocol):
    """What the tracer puts into ``_redistribute_observer`` while it records."""

    def begin(self, tensor: Any, source: Layout, target: Layout, shape: Sequence[int],
              steps: Sequence[Step], use: Optional[OperandUse] = None) -> object:
        """A forward move starts.

        ``steps`` is empty when only the gradient will move; a tensor that is spread for the first
        time has no plan, and the position of its source there.
        ``use`` is None for a move that no operator asked for.
        """

    def begin_backward(self, origin: object, source: Layout, target: Layout,
                       shape: Sequence[int], steps: Sequence[Step]) -> object:
        """The gradient of a move starts to move.

        ``origin`` is what ``begin`` returned for it, or its ``use`` if nobody observed it.
        """

    def end(self, token: object) -> None:
        """What ``begin`` or ``begin_backward`` started is over."""

    def fallback(self, operator: str) -> None:
        """An operator has no rule for its operands and runs on gathered ones."""


# A module global and not a ContextVar, since backward passes run on threads of their own.
_redistribute_observer: Optional[RedistributeObserver] = None


class Move:
    """A tensor's way from one layout to another, gradient included.

    Attributes:
        source: layout and global shape before.
        target: layout after.
        gradient: layout in which the local gradient of the result arrives.
        leaves: layout in which the local gradient of the source leaves.
        steps: the plan; empty when only the gradient moves.
        all_steps: the plan with the reductions that run under autograd of their own.
        gathers: some step joins shards.
    """

    __slots__ = ("source", "target", "gradient", "leaves", "steps", "all_steps", "gathers",
                 "_reduce_first", "_reduced", "_run_steps", "_backward", "_scale")

    def __init__(self, source: TensorSpec, target: Layout, gradient: Layout,
                 leaves: Optional[Layout] = None) -> None:
        self.source = source
        self.target = target
        self.gradient = gradient
        layout, self._reduce_first = _reduce_nonlinear(source.layout, target)
        self._reduced = layout
        self.leaves = layout.dual if leaves is None else leaves
        self.steps = plan_redistribution(layout, target)
        self.all_steps = (*self._reduce_first, *self.steps)
        self.gathers = any(isinstance(step, AllGather) for step in self.steps)
        self._run_steps = tuple(_COMPILE[type(step)](step, source.shape) for step in self.steps)
        self._backward: Optional[Move] = None
        self._scale = _average_scale(layout, target)

    def __call__(self, local: Any, tensor: Any = None, use: Optional[OperandUse] = None) -> Any:
        """Move ``local``.

        Args:
            local: the rank's part before.
            tensor: what the observer is shown as the thing that moves, by default ``local``.
            use: the argument that it moves for, remembered for the gradient.
        """
        observer = _redistribute_observer
        if observer is None:
            return platform.run_undressed(self._apply, (local, use), {})
        token = observer.begin(local if tensor is None else tensor, self.source.layout,
                               self.target, self.source.shape, self.all_steps, use)
        try:
            return platform.run_undressed(self._apply, (local, token), {})
        finally:
            observer.end(token)

    def with_value(self, local: Any, value: Any, use: Optional[OperandUse] = None) -> Any:
        """``value``, which this move gave for ``local`` before, with this move's gradient."""
        origin: object = use
        if _redistribute_observer is not None:
            origin = _redistribute_observer.begin(
                local, self.source.layout, self.target, self.source.shape, (), use)
            _redistribute_observer.end(origin)
        known = platform.run_undressed(value.detach, (), {})
        return platform.run_undressed(platform.apply_with_gradient, (
            lambda _: known, lambda grad: self._move_gradient(grad, origin), local), {})

    def backward(self) -> "Move":
        """The move of the gradient.

        It is the same move the other way round: the gradient's own gradient arrives as the source
        lies and leaves as the target does.  So where a summand was made of a whole tensor, whose
        gradient each rank uses for its own part, these uses add up.
        """
        if self._backward is None:
            self._backward = plan_move(TensorSpec(self.gradient, self.source.shape), self.leaves,
                                       self._reduced, self.target)
        return self._backward

    def _apply(self, local: Any, origin: object) -> Any:
        if self._reduce_first:
            local = platform.undress(local)
        for step in self._reduce_first:
            local = _compile_all_reduce(step, self.source.shape)(local)
        if not platform.needs_gradient(local):
            return self._run(local)
        return platform.apply_with_gradient(
            self._run, lambda grad: self._move_gradient(grad, origin), local)

    def _run(self, local: Any) -> Any:
        # A plain alias for the collectives. Not a view: that would hold its base, and the base may
        # hold the result (a cache).
        local = local.detach()
        for run in self._run_steps:
            local = run(local)
        return local

    def _move_gradient(self, grad: Any, origin: object) -> Any:
        back = self._backward or self.backward()
        if back.all_steps or platform.needs_gradient(grad):
            return platform.run_undressed(self._move_back, (back, grad, origin), {})
        return grad if self._scale == 1 else grad * self._scale

    def _move_back(self, back: "Move", grad: Any, origin: object) -> Any:
        observer = _redistribute_observer
        if observer is None or not back.all_steps:
            grad = back._apply(grad, origin)
        else:
            token = observer.begin_backward(
                origin, back.source.layout, back.target, back.source.shape, back.all_steps)
            try:
                grad = back._apply(grad, origin)
            finally:
                observer.end(token)
        return grad if self._scale == 1 else grad * self._scale


@lru_cache(maxsize=4096)
def plan_move(source: TensorSpec, target: Layout, gradient: Layout,
              leaves: Optional[Layout] = None) -> Move:
    """The move from ``source`` to ``target``, made once.

    Args:
        source: layout and global shape before.
        target: layout after, on the same mesh.
        gradient: layout in which the local gradient of the result arrives; ``target.dual`` when
            it is used as its type says.
        leaves: layout in which the local gradient of the source leaves, by default the dual of
            the source's.
    """
    return Move(source, target, gradient, leaves)


def redistribute(local: Any, source: TensorSpec, target: Layout,
                 gradient: Optional[Layout] = None, tensor: Any = None) -> Any:
    """Move a local tensor from one layout to another.

    Args:
        local: the rank's part under ``source``; a tensor of the framework, not a DTensor.
        source: layout and global shape of the whole tensor.
        target: the layout wanted.
        gradient: layout in which the gradient of the result arrives, by default the dual of
            ``target``.
        tensor: the DTensor that moves, for the tracer.

    Returns:
        The rank's part under ``target``; an alias of ``local`` when nothing has to be done.
    """
    return plan_move(source, target, target.dual if gradient is None else gradient)(local, tensor)


def note_fallback(operator: str) -> None:
    """Tell whoever observes that an operator runs on gathered operands."""
    if _redistribute_observer is not None:
        _redistribute_observer.fallback(operator)


def _reduce_nonlinear(source: Layout, target: Layout) -> tuple[Layout, tuple[Step, ...]]:
    """Reductions whose gradient depends on the values, and the layout after them.

    A maximum sends its gradient to where it was reached, so its all-reduce keeps the values and
    has a gradient of its own, where all other steps have the one their types imply.
    """
    axes = tuple(
        axis for axis, placement in enumerate(source.placements)
        if type(placement) is Partial and placement.reduce_op in ("max", "min", "product")
        and placement != target.placements[axis] and source.device_mesh.mesh_shape[axis] > 1)
    if not axes:
        return source, ()
    after = source.replaced({axis: Replicate() for axis in axes})
    return after, (AllReduce(source, after, axes),)


def _average_scale(source: Layout, target: Layout) -> float:
    """Factor of the gradient: a summand of a mean over n ranks has 1 / n of the mean's."""
    sizes = source.device_mesh.mesh_shape
    scale = 1.0
    for axis, (before, after) in enumerate(zip(source.placements, target.placements)):
        if before != after:
            if before == Partial("avg"):
                scale /= sizes[axis]
            if after == Partial("avg"):
                scale *= sizes[axis]
    return scale


# --- One compiler a step: everything that depends only on the shape is worked out here. ---------


def _coordinates_of_group(step: Step) -> list[tuple[int, ...]]:
    """Mesh coordinates of the ranks that take part, in the order of the group."""
    mesh = step.source.device_mesh
    own = list(mesh.get_coordinate())
    ranges = (range(mesh.mesh_shape[axis]) for axis in step.axes)
    coordinates = []
    for position in itertools.product(*ranges):
        for axis, index in zip(step.axes, position):
            own[axis] = index
        coordinates.append(tuple(own))
    return coordinates


def _group(step: Step) -> Any:
    return step.source.device_mesh.get_group_over_axes(step.axes)


def _changed_dim(step: Step, layout: Layout) -> int:
    return layout.placements[step.axes[0]].dim


def _compile_all_reduce(step: Step, shape: Sequence[int]) -> LocalFunction:
    del shape
    op = step.source.placements[step.axes[0]].reduce_op
    return lambda local: platform.differentiable_all_reduce(local, op, _group(step))


def _piece_lengths(step: Step, layout: Layout, dim: int, shape: Sequence[int]) -> list[int]:
    return [layout.local_shape(shape, coordinate)[dim]
            for coordinate in _coordinates_of_group(step)]


def _compile_all_gather(step: Step, shape: Sequence[int]) -> LocalFunction:
    dim = _changed_dim(step, step.source)
    lengths = _piece_lengths(step, step.source, dim, shape)
    own = step.source.local_shape(shape)[dim]
    longest, count, total = max(lengths), len(lengths), sum(lengths)

    def run(local: Any) -> Any:
        if own < longest:
            local = platform.pad_end(local, dim, longest - own)
        whole = platform.differentiable_all_gather_concat(local, _group(step), count, dim)
        if total == longest * count:
            return whole
        pieces = [platform.narrow(whole, dim, index * longest, length)
                  for index, length in enumerate(lengths) if length]
        return platform.concat(pieces, dim) if pieces else platform.narrow(whole, dim, 0, 0)

    return run


def _compile_reduce_scatter(step: Step, shape: Sequence[int]) -> LocalFunction:
    dim = _changed_dim(step, step.target)
    op = step.source.placements[step.axes[0]].reduce_op
    lengths = _piece_lengths(step, step.target, dim, shape)
    own = step.target.local_shape(shape)[dim]
    longest, count = max(lengths), len(lengths)
    starts = list(itertools.accumulate([0, *lengths]))

    def run(local: Any) -> Any:
        if sum(lengths) < longest * count:
            pieces = [platform.pad_end(platform.narrow(local, dim, start, length), dim,
                                       longest - length)
                      for start, length in zip(starts, lengths)]
            local = platform.concat(pieces, dim)
        part = platform.differentiable_reduce_scatter(local, count, dim, op, _group(step))
        return part if own == longest else platform.narrow(part, dim, 0, own)

    return run


def _compile_slice(step: Step, shape: Sequence[int]) -> LocalFunction:
    dim = _changed_dim(step, step.target)
    old = step.source.local_bounds(shape)[dim]
    start, length = step.target.local_bounds(shape)[dim]

    def run(local: Any) -> Any:
        # A copy, so that writing to the part never changes the whole, nor keeps it in memory.
        return platform.narrow(local, dim, start - old[0], length).clone()

    return run


def _compile_keep_first(step: Step, shape: Sequence[int]) -> LocalFunction:
    del shape
    op = step.target.placements[step.axes[0]].reduce_op
    first = step.source.device_mesh.get_coordinate()[step.axes[0]] == 0
    if first or op in ("avg", "max", "min"):
        return lambda local: local
    if op == "product":
        return lambda local: platform.zeros_like(local) + 1
    return platform.zeros_like


def _compile_place_in_zeros(step: Step, shape: Sequence[int]) -> LocalFunction:
    before = step.source.local_bounds(shape)
    after = step.target.local_bounds(shape)
    whole = tuple(length for _, length in after)
    place = tuple(slice(old[0] - new[0], old[0] - new[0] + old[1])
                  for old, new in zip(before, after))

    def run(local: Any) -> Any:
        result = local.new_zeros(whole)
        result[place] = local
        return result

    return run


def _compile_all_to_all(step: Step, shape: Sequence[int]) -> LocalFunction:
    coordinates = _coordinates_of_group(step)
    before = step.source.local_bounds(shape)
    after = step.target.local_bounds(shape)
    sent = [_overlap(before, step.target.local_bounds(shape, other)) for other in coordinates]
    received = [_overlap(after, step.source.local_bounds(shape, other)) for other in coordinates]
    result_shape = tuple(length for _, length in after)
    sent_sizes = [_numel(block) for block in sent]
    received_sizes = [_numel(block) for block in received]
    # All ranks of the group must choose the same collective: on one axis the blocks outside of it
    # are the same for all of them.
    even = len(step.axes) == 1 and all(
        bounds[_changed_dim(step, layout)][1] % step.size == 0
        for bounds, layout in ((after, step.source), (before, step.target)))

    def run(local: Any) -> Any:
        flat = platform.concat(
            [local[_slices(block, before)].reshape((-1,)) for block in sent], 0)
        if even:
            flat = platform.differentiable_all_to_all(flat, tuple(flat.shape), _group(step))
        else:
            flat = platform.differentiable_all_to_all_single(
                flat, sent_sizes, received_sizes, _group(step))
        result = local.new_zeros(result_shape)
        start = 0
        for block, size in zip(received, received_sizes):
            if size:
                piece = platform.narrow(flat, 0, start, size)
                result[_slices(block, after)] = piece.reshape(
                    tuple(length for _, length in block))
                start += size
        return result

    return run


def _overlap(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]
             ) -> tuple[tuple[int, int], ...]:
    """The block that two blocks share, each given by (start, length) a dim."""
    shared = []
    for (start, length), (other_start, other_length) in zip(one, other):
        low = max(start, other_start)
        shared.append((low, max(0, min(start + length, other_start + other_length) - low)))
    return tuple(shared)


def _numel(block: Sequence[tuple[int, int]]) -> int:
    return prod(length for _, length in block)


def _slices(block: Sequence[tuple[int, int]], inside: Sequence[tuple[int, int]]
            ) -> tuple[slice, ...]:
    """Index of ``block`` within the local tensor that covers ``inside``."""
    return tuple(slice(start - origin, start - origin + length) if length else slice(0, 0)
                 for (start, length), (origin, _) in zip(block, inside))


_COMPILE: dict[type, Callable[[Step, Sequence[int]], LocalFunction]] = {
    AllReduce: _compile_all_reduce,
    AllGather: _compile_all_gather,
    ReduceScatter: _compile_reduce_scatter,
    AllToAll: _compile_all_to_all,
    Slice: _compile_slice,
    KeepFirst: _compile_keep_first,
    PlaceInZeros: _compile_place_in_zeros,
}

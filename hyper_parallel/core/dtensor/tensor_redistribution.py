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

from functools import lru_cache
from typing import Any, Callable, NamedTuple, Optional, Protocol, Sequence

from hyper_parallel.core.dtensor._redistribute_plan import (
    AllGather, AllReduce, Step, plan_redistribution)
from hyper_parallel.core.dtensor._run_steps import as_it_is, compile_step
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.history_adapter import Watch

platform = get_platform()
_detach = platform.detach


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
                 "_reduce_first", "_reduced", "_run_steps", "_changes", "_backward", "_scale")

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
        self._run_steps = tuple(compile_step(step, source.shape) for step in self.steps)
        self._changes = bool(self._reduce_first) or any(
            run is not as_it_is for run in self._run_steps)
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

    def past(self, local: Any, value: Any, short: "Move", watch: Watch,
             use: Optional[OperandUse] = None) -> Any:
        """``value``, which this move gave for ``local`` before, with this move's gradient.

        Args:
            local: what moved.
            value: where it is now.
            short: the move from ``value`` to the result, which changes nothing but the gradient.
            watch: where ``value`` itself is wanted a gradient, by the time of the backward pass,
                it gets that of ``short`` instead.
            use: the argument that it moves for.
        """
        origin: object = use
        if _redistribute_observer is not None:
            origin = _redistribute_observer.begin(
                local, self.source.layout, self.target, self.source.shape, (), use)
            _redistribute_observer.end(origin)

        def gradients(grad: Any) -> tuple[Any, Any]:
            if watch.wanted:
                return short._move_gradient(grad, origin), None
            return None, self._move_gradient(grad, origin)

        known = platform.run_undressed(_detach, (value,), {})
        return platform.run_undressed(platform.value_between, (known, value, local, gradients), {})

    def moves_no_gradient(self) -> bool:
        """Whether the gradient leaves this rank as it arrives."""
        return self._scale == 1 and not (self._backward or self.backward()).all_steps

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
            local = compile_step(step, self.source.shape)(local)
            if origin is not None:
                platform.mark_backward(local, origin)
        if not platform.needs_gradient(local):
            return self._run(local)
        if not self._changes and self.moves_no_gradient():
            return platform.undress(local)
        return platform.apply_with_gradient(
            self._run, lambda grad: self._move_gradient(grad, origin), local)

    def _run(self, local: Any) -> Any:
        # A plain alias for the collectives. Not a view: that would hold its base, and the base may
        # hold the result (a cache).
        local = _detach(local)
        for run in self._run_steps:
            local = run(local)
        # On one rank a step may end with a view and on another not: modified in place, only one
        # of them would raise.
        return platform.released(local) if self._changes else local

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

"""What a cached call does: move operands, run on local tensors, dress the results."""
from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

from hyper_parallel.core.dtensor.dtensor import DTensor, views_of
from hyper_parallel.core.dtensor.random_state import piece_of, same_draws
from hyper_parallel.core.dtensor.tensor_redistribution import (
    Move, OperandUse, note_fallback, plan_move)
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.core.shard._write_through import note_moved, write_back
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.history_adapter import Watch

platform = get_platform()
_Tensor = platform.Tensor
_dress = platform.dress
_undress = platform.undress
_run_undressed = platform.run_undressed
_is_leaf = platform.is_leaf
_is_trained = platform.is_trained
_is_watched = platform.is_watched
_needs_gradient = platform.needs_gradient
_value_version = platform.value_version
_NOTHING: Mapping[str, Any] = {}
# Their result may be no view where the operand's elements do not follow each other in memory.
COPY_UNLESS_CONTIGUOUS = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous"})


class OperandMove(NamedTuple):
    """How one operand gets to its place.

    ``shared`` when only its gradient has to be moved; ``use`` says to the tracer what for, and
    ``returns`` whether a gradient will move, which may be when a trace begins only later.
    """

    path: tuple
    move: Optional[Move]
    shared: bool
    use: Optional[OperandUse] = None
    returns: bool = False


class Plan(ABC):
    """What a call does from its second time on.

    Attributes:
        simple: nothing moves, one tensor comes out: run ``local`` (or the operator itself) on
            local tensors and dress what comes out with ``result``.
        local: function to run in place of the operator, or None.
        result: spec of the one result of a simple plan.
    """

    __slots__ = ("simple", "local", "result")

    def __init__(self) -> None:
        self.simple = False
        self.local: Optional[Callable] = None
        self.result: Optional[TensorSpec] = None

    @abstractmethod
    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The results of calling ``func``, its tensors as DTensors."""


class FunctionPlan(Plan):
    """Runs a function of the same arguments in place of the operator."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self._function = function

    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        return platform.run_with_own_layouts(self._function, args, kwargs)


class LocalPlan(Plan):
    """A solved call: move operands, run on local tensors, dress the results.

    Attributes:
        results: spec of each result; None for one that is not a tensor.
    """

    __slots__ = ("results", "_moves", "_plain_paths", "_take_off", "_piece", "_viewed", "_checked")

    def __init__(self, moves: Sequence[OperandMove], results: Sequence[Optional[TensorSpec]],
                 local: Optional[Callable] = None, plain_paths: Sequence[tuple] = (),
                 take_off: bool = False, *, random: Optional[Layout] = None,
                 views: bool = False) -> None:
        super().__init__()
        self.local = local
        self.results = tuple(results)
        self._moves = tuple(moves)
        self._plain_paths = tuple(plain_paths)
        self._take_off = take_off
        self._piece = None if random is None else piece_of(random)
        self._viewed = next((move for move in moves[:1] if views and move.move is not None
                             and not move.shared), None)
        self._checked = False

    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if not self._checked:
            return self._first_run(func, args, kwargs)
        plain = [argument_at(args, kwargs, path) for path in self._plain_paths] \
            if self._plain_paths else ()
        views = ()
        own = args, kwargs
        if self._moves:
            args, kwargs, views = self._move_operands(args, kwargs)
        if self._piece is None:
            result = _run_undressed(self.local or func, args, kwargs)
        else:
            with same_draws(self._piece, kwargs.get("generator")):
                result = _run_undressed(self.local or func, args, kwargs)
        if views:
            _keep_views(result, views)
        if self._take_off:
            result = _not_saved(result)
        if self._viewed is not None:
            self._note_views(func, own, (args, kwargs), result)
        if isinstance(result, _Tensor):
            if plain and is_one_of(result, plain):
                result = _undress(result)
            return _dress(result, DTensor, self.results[0])
        return self._dress_several(result, plain)

    def _note_views(self, func: Callable, own: tuple, moved: tuple, result: Any) -> None:
        """Note what ``result`` is a view of, if it is one: not of the operand, which was moved."""
        tensor = argument_at(*own, self._viewed.path)
        if isinstance(tensor, DTensor) and (
                platform.operator_name(func) not in COPY_UNLESS_CONTIGUOUS
                or tensor.is_contiguous()):
            note_moved(tensor, argument_at(*moved, self._viewed.path), self._viewed.move.target,
                       result)

    def _first_run(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Run once with a check that the rule was right about the shapes."""
        self._checked = True
        try:
            result = self(func, args, kwargs)
            self._check(func, result)
        except BaseException:
            self._checked = False
            raise
        if isinstance(result, DTensor) and not self._moves and not self._plain_paths \
                and self._piece is None:
            self.result = self.results[0]
            self.simple = True
        return result

    def _check(self, func: Callable, result: Any) -> None:
        results = result if isinstance(result, (tuple, list)) else (result,)
        for value, spec in zip(results, self.results):
            if isinstance(value, _Tensor) and spec is not None:
                local = tuple(_run_undressed(_shape, (value,), {}))
                if local != spec.local_shape:
                    raise RuntimeError(
                        f"the rule of {platform.operator_name(func)!r} promised a local result of "
                        f"shape {tuple(spec.local_shape)} (global {tuple(spec.shape)}, "
                        f"{spec.layout!r}), but the operator gave {local}; correct the rule with "
                        "register_rule, or take it away with register_rule(operator, None).")

    def _move_operands(self, args: tuple, kwargs: Mapping[str, Any]
                       ) -> tuple[Sequence[Any], Mapping[str, Any], Sequence[Any]]:
        """The arguments with operands in place, and the views that the graph has to keep."""
        args = list(args)
        kept: list[Any] = []
        for path, move, shared, use, returns in self._moves:
            position = path[0]
            top = len(path) == 1 and type(position) is int
            tensor = args[position] if top else argument_at(args, kwargs, path)
            if move is None:
                moved = tensor
            elif shared:
                moved = _run_undressed(_shared_view, (tensor, move, kept, use, args), _NOTHING)
            else:
                moved = move(tensor, None, use if not returns else
                             _run_undressed(_beside_parameter, (use, args), _NOTHING))
            if self._take_off and isinstance(moved, DTensor):
                moved = _undress(moved)
            if top:
                args[position] = moved
            elif type(position) is int:
                args[position] = _replaced(args[position], path[1:], moved)
            else:
                kwargs = {**kwargs, position: _replaced(kwargs[position], path[1:], moved)}
        return args, kwargs, kept

    def _dress_several(self, result: Any, plain: Sequence[Any]) -> Any:
        if not isinstance(result, (tuple, list)):
            return result
        if any(is_one_of(value, plain) for value in result):
            result = type(result)(_undress(value) if is_one_of(value, plain)
                                  else value for value in result)
        for index, value in enumerate(result):
            if isinstance(value, _Tensor):
                _dress(value, DTensor, self.results[index])
            elif isinstance(value, (tuple, list)):
                self._dress_several(value, plain)
        return result


class OwnMemoryPlan(Plan):
    """Copies the result where it would share memory that the whole tensors do not share."""

    __slots__ = ("_plan",)

    def __init__(self, plan: LocalPlan) -> None:
        super().__init__()
        self._plan = plan

    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        result = self._plan(func, args, kwargs)
        if not platform.shares_too_much(result, func, args, kwargs):
            return result
        return _dress(_run_undressed(platform.copied, (result,), _NOTHING), DTensor, result._spec)


class ReplicatedPlan(LocalPlan):
    """Runs on replicated operands; whatever tensors come out are replicated.

    ``fallback`` names an operator that runs like this for want of a rule, for the tracer;
    ``of_user`` says that it is a user's, which may save its results for its backward.
    """

    __slots__ = ("_layout", "_fallback", "_of_user")

    def __init__(self, moves: Sequence[OperandMove], layout: Layout,
                 plain_paths: Sequence[tuple], random: bool, fallback: Optional[str], *,
                 of_user: bool) -> None:
        super().__init__(moves, (), plain_paths=plain_paths, take_off=True,
                         random=layout if random else None, views=True)
        self._layout = layout
        self._fallback = fallback
        self._of_user = of_user

    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if self._fallback is not None:
            note_fallback(self._fallback)
        plain = [argument_at(args, kwargs, path) for path in self._plain_paths]
        whole_args, whole_kwargs, _ = self._move_operands(args, kwargs)
        if self._piece is None:
            result = func(*whole_args, **whole_kwargs)
        else:
            with same_draws(self._piece, kwargs.get("generator")):
                result = func(*whole_args, **whole_kwargs)
        self._written(args, kwargs, whole_args, whole_kwargs)
        if self._of_user:
            result = _not_saved(result)
        if self._viewed is not None:
            self._note_views(func, (args, kwargs), (whole_args, whole_kwargs), result)
        return self._dress_tree(result, plain)

    def _written(self, args: tuple, kwargs: Mapping[str, Any], whole_args: Sequence[Any],
                 whole_kwargs: Mapping[str, Any]) -> None:
        """The operator has run on the whole operands."""

    def _dress_tree(self, value: Any, plain: Sequence[Any]) -> Any:
        if isinstance(value, _Tensor):
            # An alias wherever the caller may hold the very object: an input handed back.
            if not isinstance(value, DTensor):
                if type(value) is not _Tensor or is_one_of(value, plain):
                    value = _undress(value)
                return _dress(value, DTensor, TensorSpec(self._layout, value.shape))
            return value
        if isinstance(value, (tuple, list)):
            if not any(is_one_of(entry, plain) for entry in value):
                for entry in value:
                    self._dress_tree(entry, plain)
                return value
            return type(value)(self._dress_tree(entry, plain) for entry in value)
        return value


class WritingPlan(ReplicatedPlan):
    """Also copies what the operator wrote into the arguments at ``written``."""

    __slots__ = ("_paths_written",)

    def __init__(self, moves: Sequence[OperandMove], layout: Layout, plain_paths: Sequence[tuple],
                 random: bool, fallback: Optional[str], written: Sequence[tuple]) -> None:
        super().__init__(moves, layout, plain_paths, random, fallback, of_user=True)
        self._paths_written = written

    def _written(self, args: tuple, kwargs: Mapping[str, Any], whole_args: Sequence[Any],
                 whole_kwargs: Mapping[str, Any]) -> None:
        for path in self._paths_written:
            target = argument_at(args, kwargs, path)
            whole = argument_at(whole_args, whole_kwargs, path)
            if isinstance(target, DTensor):
                write_back(target, whole.detach(), self._layout)


def _not_saved(result: Any) -> Any:
    """Results of a user's function, aliases of those that it may have saved for its backward.

    Only a result with a history is saved as a tensor of its own.
    """
    if isinstance(result, (tuple, list)):
        return type(result)(map(_not_saved, result)) if type(result) in (tuple, list) else result
    if isinstance(result, _Tensor) and not _needs_gradient(result):
        return _undress(result)
    return result


def is_one_of(value: Any, plain: Sequence[Any]) -> bool:
    """Whether ``value`` is one of the very tensors that the caller passed."""
    return any(value is tensor for tensor in plain)


def operand_move(operator: str, path: tuple, spec: TensorSpec, target: Layout,
                 varying: Sequence[int]) -> Optional[OperandMove]:
    """How an operand gets to ``target``; None when it is there and its gradient is too."""
    gradient = target.dual.replaced({axis: Partial() for axis in varying})
    if target is spec.layout and not varying:
        return None
    move = plan_move(spec, target, gradient)
    if not move.all_steps and not move.backward().all_steps:
        return None  # along axes of one rank all layouts are the same
    argument = str(path[0]) + "".join(f"[{index}]" for index in path[1:])
    return OperandMove(path, move, target is spec.layout, OperandUse(operator, argument),
                       bool(move.backward().all_steps))


def _shape(tensor: Any) -> Any:
    return tensor.shape


def argument_at(args: Sequence[Any], kwargs: Mapping[str, Any], path: tuple) -> Any:
    """The argument at ``path``: a position or a keyword, then indices within sequences."""
    value = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
    for index in path[1:]:
        value = value[index]
    return value


def _replaced(value: Any, path: tuple, new: Any) -> Any:
    """``value`` with the entry at ``path`` replaced; the caller's own sequence stays as it is."""
    if not path:
        return new
    entries = list(value)
    entries[path[0]] = _replaced(entries[path[0]], path[1:], new)
    return tuple(entries) if isinstance(value, tuple) else entries


def _shared_view(tensor: Any, move: Move, kept: list[Any], use: OperandUse,
                 args: Sequence[Any]) -> Any:
    """The view of a replicated tensor through which gradients that vary are summed.

    There is one for all uses, so that the contributions add up before a single all-reduce.
    Runs undressed.  A leaf's view is put into ``kept``: a leaf's gradient accumulator holds the
    leaf, so holding the view there would make a cycle that the garbage collector cannot see.
    The graph keeps it alive instead.
    """
    if not _needs_gradient(tensor):
        return tensor
    views = views_of(tensor)
    at_leaf = _is_leaf(tensor) or getattr(tensor, "_views_of_leaf", False)
    version = _value_version(tensor)
    known, view = views.get(move), None
    if known is not None and known[0] == version:
        view = known[1]
        if type(view) is weakref.ref:
            view = view()
    if view is None:
        view = _make_view(tensor, move, _beside_parameter(use, args))
        views[move] = (version, weakref.ref(view) if at_leaf else view)
    if at_leaf:
        kept.append(view)
    return view


def _beside_parameter(use: OperandUse, args: Sequence[Any]) -> OperandUse:
    """``use`` with the first trained tensor among the operator's arguments. Runs undressed."""
    for value in args:
        if isinstance(value, DTensor) and _is_trained(value):
            return OperandUse(use.operator, use.argument, weakref.ref(value))
    return use


def _make_view(tensor: Any, move: Move, use: OperandUse) -> Any:
    """A fresh view; past an all-gather when the tensor came from one.

    There the gradient that varies is reduced and scattered in one step to where it was gathered.
    """
    origin = tensor.__dict__.get("_gathered_from")
    if origin is None or _is_watched(tensor):
        return move(tensor, None, use)
    back = plan_move(origin._spec, tensor._spec.layout, move.gradient)
    if not any(type(origin.placements[axis]) is not Replicate
               for axis, placement in enumerate(move.gradient.placements)
               if type(placement) is Partial):
        return move(tensor, None, use)
    watch = tensor.__dict__.setdefault("_watch", Watch())
    return back.past(origin, tensor, move, watch, use)


def _keep_views(result: Any, views: Sequence[Any]) -> None:
    results = result if isinstance(result, (tuple, list)) else (result,)
    for value in results:
        if isinstance(value, _Tensor):
            for view in views:
                platform.keep_with_graph(value, view)
            return

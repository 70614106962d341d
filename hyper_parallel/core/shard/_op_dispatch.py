"""The dispatcher: what happens when an operator meets a DTensor.

A call is looked up in its operator's cache, by the specs of the tensors and every other
argument.  On a hit the plan moves what has to move, runs the operator on local tensors and
dresses the results.  On a miss a rule and the solver make the plan.
"""
from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any, Callable, Mapping, Optional

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard import _registry
from hyper_parallel.core.shard._error_note import tell_globally
from hyper_parallel.core.shard._local_plan import Plan
from hyper_parallel.core.shard._planner import is_in_place, make_plan
from hyper_parallel.core.shard._write_through import write_through, writes_to_copies
from hyper_parallel.platform import get_platform

platform = get_platform()
_Tensor = platform.Tensor
_run_and_dress = platform.run_and_dress

# Whoever wants to see operators come and go, or None. The tracer sets it.
_debug_mode_observer: ContextVar = ContextVar('_debug_mode_observer', default=None)

_MOST_PLANS = 2048
_NUMBERS = frozenset({int, float, bool})
# Stands before the keyword arguments in a key, so that f(x, "dim", 1) is not f(x, dim=1).
_KEYWORDS = object()


class Operator:
    """One function of the framework, with the plans of its calls.

    Attributes:
        name: the library's name for it.
        plans: plan by key, oldest first; bounded.
        number_blind: numbers among the arguments are known by their type alone.
        by_dtype: the dtypes of tensor arguments matter.
        in_place: it writes to its first argument.
    """

    __slots__ = ("name", "plans", "number_blind", "by_dtype", "in_place", "hits", "misses")

    def __init__(self, name: str, func: Callable) -> None:
        self.name = name
        self.plans: dict[tuple, Plan] = {}
        self.in_place = is_in_place(name, func)
        names = () if _registry.is_function(func) else (
            (name, name[:-1]) if self.in_place else (name,))
        self.number_blind = any(map(_registry.is_number_blind, names))
        self.by_dtype = any(map(_registry.is_by_dtype, names))
        self.hits = 0
        self.misses = 0


class OpDispatcher:
    """Runs operators on DTensors."""

    def __init__(self) -> None:
        self._operators: dict[Callable, Operator] = {}
        _registry.on_change(self.clear_cache)

    def dispatch(self, op_call: Callable, args: tuple = (),
                 kwargs: Optional[Mapping[str, Any]] = None) -> Any:
        """Run ``op_call``; at least one of its arguments is a DTensor, maybe within a list.

        Returns:
            What the operator returns, its tensors as DTensors.

        Raises:
            ValueError: the tensors are on different meshes.
        """
        kwargs = kwargs or {}
        operator = self._operators.get(op_call) or self._add(op_call)
        observer = _debug_mode_observer.get()
        if observer is not None:
            observer._on_op_dispatch_enter(operator.name, op_call, args, kwargs)
        result = None
        try:
            writes = writes_to_copies(operator.name, args, kwargs) if operator.in_place or (
                kwargs and kwargs.get("inplace")) else ()
            key = _key(args, kwargs, operator)
            try:
                plan = operator.plans[key]
                operator.hits += 1
            except (KeyError, TypeError):
                plan = self._plan(operator, op_call, key, args, kwargs)
            if plan.simple:
                result = _run_and_dress(plan.local or op_call, args, kwargs, DTensor, plan.result)
            else:
                result = plan(op_call, args, kwargs)
            if writes:
                write_through(writes)
            return result
        except Exception as error:
            tell_globally(error, op_call, operator.name, args, kwargs)
            raise
        finally:
            if observer is not None:
                observer._on_op_dispatch_exit(operator.name, result)

    @staticmethod
    def is_observed() -> bool:
        """Whether somebody here wants to see operators come and go."""
        return _debug_mode_observer.get() is not None

    def cache_info(self) -> dict[str, int]:
        """Number of cached plans, of hits and of misses, over all operators."""
        operators = self._operators.values()
        return {"plans": sum(len(operator.plans) for operator in operators),
                "hits": sum(operator.hits for operator in operators),
                "misses": sum(operator.misses for operator in operators)}

    def clear_cache(self) -> None:
        """Forget every plan, as after a new rule."""
        self._operators.clear()

    def _add(self, op_call: Callable) -> Operator:
        operator = Operator(platform.operator_name(op_call), op_call)
        self._operators[op_call] = operator
        return operator

    @staticmethod
    def _plan(operator: Operator, op_call: Callable, key: tuple, args: tuple,
              kwargs: Mapping[str, Any]) -> Plan:
        operator.misses += 1
        plan = make_plan(operator.name, op_call, args, kwargs)
        try:
            hash(key)
        except TypeError:
            return plan  # an argument that cannot be compared: this call is planned every time
        if len(operator.plans) >= _MOST_PLANS:
            del operator.plans[next(iter(operator.plans))]
        operator.plans[key] = plan
        return plan


def _key(args: tuple, kwargs: Mapping[str, Any], operator: Operator) -> tuple:
    """What a plan depends on."""
    parts = [value._spec if type(value) is DTensor else _part(value, operator) for value in args]
    if kwargs:
        parts.append(_KEYWORDS)
        for name, value in kwargs.items():
            parts.append(name)
            parts.append(_part(value, operator))
    if operator.by_dtype:
        parts += [value.dtype for value in _tensors(args) + _tensors(list(kwargs.values()))]
    return tuple(parts)


def _part(value: Any, operator: Operator) -> Any:
    """The part of a key that stands for one argument."""
    kind = type(value)
    if kind in _NUMBERS:
        # 1, 1.0 and True are equal, but they are not the same argument.
        return kind if operator.number_blind else (kind, value)
    if value is None or kind is str:
        return value
    if kind is DTensor:
        return value._spec
    if isinstance(value, _Tensor):
        # A parameter's class may be one of its own.
        return value._spec if isinstance(value, DTensor) else (_Tensor, value.shape)
    return _compound_part(kind, value, operator)


def _compound_part(kind: type, value: Any, operator: Operator) -> tuple:
    if kind is tuple or kind is list:
        return (kind, *[_part(entry, operator) for entry in value])
    if kind is slice:
        return slice, value.start, value.stop, value.step
    try:
        # A function or a module may hold tensors, which a plan must not keep alive.
        return kind, weakref.ref(value)
    except TypeError:
        return kind, value


def _tensors(values: Any) -> list:
    found = []
    for value in values:
        if isinstance(value, _Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


dispatcher = OpDispatcher()

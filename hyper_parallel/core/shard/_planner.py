"""From a call that was never seen to a plan: the rule, the solver, or one of the detours."""
from __future__ import annotations

import warnings
from typing import Any, Callable, Mapping, Optional, Sequence

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.tensor_redistribution import note_fallback
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.shard import _registry
from hyper_parallel.core.shard._error_note import note_arguments
from hyper_parallel.core.shard._local_plan import (
    COPY_UNLESS_CONTIGUOUS, FunctionPlan, LocalPlan, OperandMove, OwnMemoryPlan, Plan,
    ReplicatedPlan, WritingPlan, argument_at, operand_move)
from hyper_parallel.core.shard._rule import Call, Decomposition, Rule, check_sizes
from hyper_parallel.core.shard._solver import Solution, solve
from hyper_parallel.core.shard._write_through import write_back
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.call_site import users_stack_level

platform = get_platform()
_Tensor = platform.Tensor

def make_plan(name: str, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Plan:
    """Decide how to run one call.

    Args:
        name: the operator's name.
        func: the function called.
        args, kwargs: its arguments.

    Returns:
        A function of (func, args, kwargs) for this call and all that have the same key.

    Raises:
        ValueError: the tensors are on different meshes.
        Exception: what the framework raises for whole tensors of these shapes.
    """
    if kwargs.get("out") is not None:
        return _IntoOut()
    try:
        return _plan_of_call(name, func, args, kwargs)
    except Exception as error:
        refused = platform.refusal(func, args, kwargs)
        if refused is None or isinstance(error, IndexError):
            note_arguments(error, name, args, kwargs)
            raise error from error.__cause__  # not from the miss in the cache
        note_arguments(refused, name, args, kwargs)
        raise refused from None


def _plan_of_call(name: str, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Plan:
    call, mesh, plain_paths = _describe(name, func, args, kwargs)
    in_place = is_in_place(name, func) or bool(kwargs.get("inplace"))
    maker = _registry.find_maker(name, func) or (
        _registry.find_maker(name[:-1], func) if is_in_place(name, func) else None)
    rule = maker(call) if maker is not None else None
    if isinstance(rule, Decomposition):
        return FunctionPlan(rule.function)
    if rule is not None:
        _check_rule(call, rule)
    if call.declared and call.declared.written:
        return _plan_that_writes(call, mesh, rule, plain_paths)
    if rule is None:
        return _without_rule(call, mesh, plain_paths, in_place, maker is not None)
    solution = solve(rule, call.specs, mesh, in_place)
    return InPlaceDetour() if solution is None else _local_plan(call, rule, solution, plain_paths)


def _check_rule(call: Call, rule: Rule) -> None:
    """What can be told of a rule before its operator has run.

    Raises:
        TypeError: it is no rule.
        ValueError: it does not fit the operator's results, or the sizes of its arguments.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"the rule of {call.name!r} is a Rule, a Decomposition or None, but the "
                        f"function registered for it returned {rule!r}.")
    if call.declared and len(rule.results) != call.declared.returned + len(call.written()):
        raise ValueError(
            f"{call.name!r} returns {call.declared.returned} results and writes to "
            f"{len(call.written())} arguments, but its rule has {len(rule.results)} results; write "
            "those that are returned and then those that are written to, as in '..., ... -> ...' "
            "for y += x.")
    check_sizes(call, rule)


def _describe(name: str, func: Callable, args: tuple, kwargs: Mapping[str, Any]
              ) -> tuple[Call, DeviceMesh, list[tuple]]:
    """The call as rule makers see it, its mesh, and where its plain tensors stand."""
    paths = list(_tensor_paths(args, kwargs))
    tensors = [argument_at(args, kwargs, path) for path in paths]
    mesh = _common_mesh(name, tensors)
    whole = _replicated(mesh)
    specs = [tensor._spec if isinstance(tensor, DTensor) else TensorSpec(whole, tensor.shape)
             for tensor in tensors]
    plain = [path for path, tensor in zip(paths, tensors) if not isinstance(tensor, DTensor)]
    declared = platform.declared_arguments(func)
    return Call(name, func, args, kwargs, specs, paths, declared), mesh, plain


def _replicated(mesh: DeviceMesh) -> Layout:
    return Layout(mesh, [Replicate()] * mesh.ndim)


def _local_plan(call: Call, rule: Rule, solution: Solution, plain_paths: Sequence[tuple]) -> Plan:
    """The plan of a call that the solver has solved."""
    # A user's code sees plain tensors, and what it saves for its backward is what it was given.
    take_off = platform.without_override(call.func) or call.declared is not None
    moves = _moves(call, solution.operands, solution.varying, take_off)
    local = None
    if rule.localize is not None:
        moved = [TensorSpec(layout, spec.shape)
                 for layout, spec in zip(solution.operands, call.specs)]
        local = rule.localize(moved, solution.results)
    random = solution.results[0].layout if rule.random else None
    plan = LocalPlan(moves, solution.results, local, plain_paths, take_off, random=random,
                     views=rule.moves)
    first = call.specs[0]
    if call.name in COPY_UNLESS_CONTIGUOUS and any(
            one == 1 < length for one, length in zip(first.local_shape, first.shape)):
        return OwnMemoryPlan(plan)
    return plan


def _moves(call: Call, targets: Sequence[Layout], varying: Sequence[Sequence[int]],
           take_off: bool) -> list[OperandMove]:
    moves = []
    for path, spec, target, axes in zip(call.paths, call.specs, targets, varying):
        move = operand_move(call.name, path, spec, target, axes)
        if move is None and take_off:
            move = OperandMove(path, None, False)
        if move is not None:
            moves.append(move)
    return moves


def _plan_that_writes(call: Call, mesh: DeviceMesh, rule: Optional[Rule],
                      plain_paths: Sequence[tuple]) -> Plan:
    """The plan of a user's operator that declares to write to some of its arguments.

    It runs on the parts where those arguments may stay as they lie.
    """
    written = call.written()
    if rule is not None:
        first = call.declared.returned
        solution = solve(rule, call.specs, mesh, False)
        if all(solution.operands[index] is solution.results[first + k].layout is
               call.specs[index].layout for k, index in enumerate(written)):
            return _local_plan(call, rule, solution, plain_paths)
    else:
        _warn_once(call.name)
    whole = _replicated(mesh)
    moves = _moves(call, [whole] * len(call.specs), [()] * len(call.specs), True)
    return WritingPlan(moves, whole, plain_paths, False, call.name,
                       [call.paths[index] for index in written])


def _without_rule(call: Call, mesh: DeviceMesh, plain_paths: Sequence[tuple], in_place: bool,
                  expected: bool) -> Plan:
    """An operator without a rule: its parts one by one, or replicated operands."""
    body = platform.decomposed(call.func)
    if body is not None and not expected:
        return FunctionPlan(body)
    function = _registry.is_function(call.func)
    unforeseen = not expected and (function or not _registry.is_whole_by_nature(call.name))
    if unforeseen:
        _warn_once(call.name)
    if in_place:
        return InPlaceDetour()
    whole = _replicated(mesh)
    moves = _moves(call, [whole] * len(call.specs), [()] * len(call.specs), True)
    random = not function and _registry.is_random_by_nature(call.name)
    return ReplicatedPlan(moves, whole, plain_paths, random, call.name if unforeseen else None,
                          of_user=function or call.declared is not None)


_warned: set[str] = set()


def _warn_once(name: str) -> None:
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name!r} has no sharding rule, so its operands are gathered and it runs on every "
            "rank; give it one with hyper_parallel.register_rule (see docs/adding_an_operator.md).",
            stacklevel=users_stack_level())


def is_in_place(name: str, func: Callable) -> bool:
    """Whether an operator writes to its first argument, by its name."""
    return name.endswith("_") and not name.endswith("__") and not _registry.is_function(func)


class _IntoOut(Plan):
    """``out=``: compute, then copy into the tensor given, which keeps its layout."""

    __slots__ = ()

    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        out = kwargs["out"]
        result = func(*args, **rest)
        several = isinstance(out, (tuple, list))
        pairs = list(zip(out, result)) if several else [(out, result)]
        for target, value in pairs:
            if target.shape != value.shape:
                raise ValueError(
                    f"out= of {platform.operator_name(func)!r} has the global shape "
                    f"{tuple(target.shape)}, but the result has {tuple(value.shape)}; pass a "
                    "tensor of that shape, which keeps its layout, or leave out= out.")
        copies = [target.copy_(value) for target, value in pairs]
        return out if several else copies[0]


class InPlaceDetour(Plan):
    """Writes to operand 0 where its layout does not allow the operator to run on local parts.

    The operator runs in place on a whole copy, of which this rank's part is copied back.
    """

    __slots__ = ()

    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        note_fallback(platform.operator_name(func))
        target = args[0]
        whole = platform.copied(self._whole(target))
        rest = [self._deep_whole(value) for value in args[1:]]
        more = {name: self._deep_whole(value) for name, value in kwargs.items()}
        func(whole, *rest, **more)
        if whole.shape != target.shape:
            raise ValueError(
                f"{platform.operator_name(func)!r} would change the shape {tuple(target.shape)} to "
                f"{tuple(whole.shape)} in place, which the layout of a DTensor does not allow: "
                f"{target.layout!r}; use the operator that returns a new tensor.")
        if not isinstance(target, DTensor):
            target.copy_(whole)
            spec = TensorSpec(_replicated(_describe("", func, args, kwargs)[1]), target.shape)
            return platform.dress(platform.undress(target), DTensor, spec)
        write_back(target, whole, _replicated(target._spec.layout.device_mesh))
        return target

    @staticmethod
    def _whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _deep_whole(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._deep_whole(entry) for entry in value)
        return self._whole(value)


def _tensor_paths(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Where the tensors stand: a position or keyword, then indices within sequences."""
    for position, value in enumerate(args):
        yield from _paths_within(value, (position,))
    for name, value in kwargs.items():
        yield from _paths_within(value, (name,))


def _paths_within(value: Any, path: tuple) -> Any:
    if isinstance(value, _Tensor):
        yield path
    elif isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from _paths_within(entry, (*path, index))


def _common_mesh(name: str, tensors: Sequence[Any]) -> DeviceMesh:
    mesh: Optional[DeviceMesh] = None
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            if mesh is None:
                mesh = tensor.device_mesh
            elif tensor.device_mesh != mesh:
                raise ValueError(
                    f"the tensors of one operator must be on one mesh, but {name!r} was given "
                    f"tensors on {mesh!r} and on {tensor.device_mesh!r}; bring one over with "
                    "full_tensor() and distribute_tensor.")
    return mesh

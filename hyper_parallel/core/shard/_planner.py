"""From a call that was never seen to a plan: the rule, the solver, or one of the detours."""
from __future__ import annotations

import warnings
from typing import Any, Callable, Mapping, Optional, Sequence

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.tensor_redistribution import redistribute
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.shard import _registry
from hyper_parallel.core.shard._local_plan import (
    CopiedPart, FunctionPlan, LocalPlan, OperandMove, Plan, ReplicatedPlan, argument_at, operand_move)
from hyper_parallel.core.shard._rule import Call, Decomposition, Rule
from hyper_parallel.core.shard._solver import solve
from hyper_parallel.platform import get_platform

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
    """
    if kwargs.get("out") is not None:
        return _IntoOut()
    paths = list(_tensor_paths(args, kwargs))
    tensors = [argument_at(args, kwargs, path) for path in paths]
    mesh = _common_mesh(name, tensors)
    whole = Layout(mesh, [Replicate()] * mesh.ndim)
    specs = [tensor._spec if isinstance(tensor, DTensor) else TensorSpec(whole, tensor.shape)
             for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    call = Call(name, func, args, kwargs, specs, paths, dtypes)
    in_place = is_in_place(name) or bool(kwargs.get("inplace"))
    maker = _registry.find_maker(name) or (
        _registry.find_maker(name[:-1]) if name.endswith("_") else None)
    rule = maker(call) if maker is not None else None
    if isinstance(rule, Decomposition):
        return FunctionPlan(rule.function)
    plain_paths = [path for path, tensor in zip(paths, tensors) if not isinstance(tensor, DTensor)]
    if rule is None:
        return _without_rule(call, mesh, whole, plain_paths, in_place, maker is not None)
    solution = solve(rule, specs, mesh, in_place)
    if solution is None:
        return InPlaceDetour()
    take_off = platform.without_override(func)
    moves = _moves(call, solution.operands, solution.varying, take_off)
    local = None
    if rule.localize is not None:
        moved = [TensorSpec(layout, spec.shape) for layout, spec in zip(solution.operands, specs)]
        local = rule.localize(moved, solution.results)
    random = solution.results[0].layout if rule.random else None
    plan = LocalPlan(moves, solution.results, local, plain_paths, take_off, random)
    return CopiedPart(plan) if rule.part and solution.operands[0] is not specs[0].layout else plan


def _moves(call: Call, targets: Sequence[Layout], varying: Sequence[Sequence[int]],
           take_off: bool) -> list[OperandMove]:
    moves = []
    for path, spec, target, axes in zip(call.paths, call.specs, targets, varying):
        move = operand_move(path, spec, target, axes)
        if move is None and take_off:
            move = OperandMove(path, None, False)
        if move is not None:
            moves.append(move)
    return moves


def _without_rule(call: Call, mesh: DeviceMesh, whole: Layout, plain_paths: Sequence[tuple],
                  in_place: bool, expected: bool) -> Plan:
    """An operator without a rule: its parts one by one, or replicated operands."""
    body = platform.decomposed(call.func)
    if body is not None and not expected:
        return FunctionPlan(body)
    quiet = expected or _registry.is_whole_by_nature(call.name)
    if not quiet:
        _warn_once(call.name)
    if in_place:
        return InPlaceDetour()
    moves = _moves(call, [whole] * len(call.specs), [()] * len(call.specs), True)
    return ReplicatedPlan(moves, whole, plain_paths, random=not quiet and mesh.size() > 1)


_warned: set[str] = set()


def _warn_once(name: str) -> None:
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name!r} has no sharding rule, so its operands are gathered and it runs on every rank; "
            "give it one with hyper_parallel.register_rule (see docs/adding_an_operator.md).",
            stacklevel=6)


def is_in_place(name: str) -> bool:
    """Whether an operator writes to its first argument, by its name."""
    return name.endswith("_") and not name.endswith("__")


class _IntoOut(Plan):
    """``out=``: compute, then copy into the tensor given, which keeps its layout."""

    __slots__ = ()

    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        out = kwargs["out"]
        result = func(*args, **rest)
        if not isinstance(out, (tuple, list)):
            return out.copy_(result)
        for target, value in zip(out, result):
            target.copy_(value)
        return out


class InPlaceDetour(Plan):
    """Writes to operand 0 where its layout does not allow the operator to run on local parts.

    The operator runs in place on a whole copy, of which this rank's part is copied back.
    """

    __slots__ = ()

    def __call__(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        target = args[0]
        whole = self._whole(target).clone()
        rest = [self._deep_whole(value) for value in args[1:]]
        more = {name: self._deep_whole(value) for name, value in kwargs.items()}
        func(whole, *rest, **more)
        if not isinstance(target, DTensor):
            target.copy_(whole)
            return platform.dress(platform.undress(target), DTensor, self._replicated(args, kwargs,
                                                                                     target))
        spec = target._spec
        mesh = spec.layout.device_mesh
        source = TensorSpec(Layout(mesh, [Replicate()] * mesh.ndim), spec.shape)
        part = redistribute(whole, source, spec.layout)
        platform.run_undressed(_copy, (target, part), {})
        return target

    @staticmethod
    def _replicated(args: tuple, kwargs: Mapping[str, Any], target: Any) -> TensorSpec:
        tensors = [argument_at(args, kwargs, path) for path in _tensor_paths(args, kwargs)]
        mesh = _common_mesh("in-place operator", tensors)
        return TensorSpec(Layout(mesh, [Replicate()] * mesh.ndim), target.shape)

    @staticmethod
    def _whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _deep_whole(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._deep_whole(entry) for entry in value)
        return self._whole(value)


def _copy(target: Any, part: Any) -> None:
    target.copy_(part)


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

"""``parallelize_module``: from a plan to a model that is spread over a mesh."""
from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Union

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, distribute_tensor
from hyper_parallel.core.placement_types import Placement
from hyper_parallel.core.tensor_parallel._buckets import is_reduced
from hyper_parallel.core.tensor_parallel._heads import check_heads
from hyper_parallel.core.tensor_parallel._mesh_axis import check_axis
from hyper_parallel.core.tensor_parallel._record import Applied, applied_to, forget, note
from hyper_parallel.core.tensor_parallel.style import ModulePlan, ParallelStyle
from hyper_parallel.platform import get_platform

platform = get_platform()

Styles = Union[ParallelStyle, Sequence[ParallelStyle], None]
Plan = Union[ParallelStyle, Mapping[str, Styles]]


class _Job(NamedTuple):
    """One style for one module that a plan entry names."""

    path: str
    module: Any
    style: ParallelStyle
    plan: ModulePlan


class _Place(NamedTuple):
    """One place where a parameter is held; tied parameters have several."""

    path: str
    module: Any
    name: str


def parallelize_module(module: Any, device_mesh: DeviceMesh, plan: Optional[Plan] = None, *,
                       parallelize_plan: Optional[Plan] = None,
                       src_data_rank: Optional[int] = 0) -> Any:
    """Spread a module's parameters over a mesh, and make its layers compute with them.

    Everything is checked before anything is changed.  Make the optimizer afterwards: the
    parameters are new objects, without the gradients and hooks of the old ones.  Parameters that
    are shared within ``module`` stay shared.

    Args:
        module: the module; it is changed and returned.
        device_mesh: mesh of one axis, such as ``mesh["tp"]``.
        plan: a style for ``module`` itself, or styles by path.  A path is written as in
            ``named_modules``; each of its components may have the wildcards of ``fnmatch``, so
            ``"layers.*.fc1"`` names a layer in each block.  ``""`` is ``module`` itself.  Several
            styles for one module - in a sequence, or by several entries - are applied one around
            the other in the order of the plan; one of them may spread parameters.  None leaves a
            module alone.
        parallelize_plan: PyTorch's name of ``plan``.
        src_data_rank: rank along the axis whose parameters count; None takes every rank's own
            ones and sends nothing.

    Returns:
        ``module``.

    Raises:
        TypeError: an argument of a wrong type, or a style for a module that it does not know.
        ValueError: a mesh of several axes or without this rank, a path that names nothing, two
            styles that spread one module's parameters, a layer that cannot be split, attention
            heads that the ranks do not divide, or a shared parameter that would be spread in two
            ways.
        RuntimeError: a module that is parallelized, or replicated, already.
    """
    plan = _the_plan(plan, parallelize_plan)
    if not isinstance(module, platform.Module):
        raise TypeError(f"parallelize_module takes a module, but got a {type(module).__name__}.")
    _check_mesh(device_mesh, src_data_rank)
    platform.require_eager()
    modules = list(platform.named_modules(module))
    jobs = _jobs(modules, plan, device_mesh)
    _check_shared(jobs)
    _spread_parameters(jobs, _places(modules), device_mesh, src_data_rank)
    for job in jobs:
        platform.wrap_forward(job.module, job.plan.before, job.plan.after)
        note(job.module, Applied(job.style, device_mesh, tuple(job.plan.parameters)))
    return module


def unparallelize_module(module: Any) -> Any:
    """Undo :func:`parallelize_module` and ``distribute_module``, whatever was trained since.

    All ranks of the mesh call it.  Every parameter becomes a plain one with all its values, on
    each rank; as the parameters are new objects, make the optimizer anew.

    Args:
        module: the module, or a part of one; it is changed and returned.

    Raises:
        TypeError: ``module`` is no module.
        RuntimeError: nothing in it was parallelized, or its parameters are replicated.
    """
    if not isinstance(module, platform.Module):
        raise TypeError(f"unparallelize_module takes a module, but got a {type(module).__name__}.")
    modules = list(platform.named_modules(module))
    changed = [part for _, part in modules if applied_to(part)]
    if not changed:
        raise RuntimeError("nothing in this module was parallelized, so there is nothing to undo.")
    for path, part in modules:
        for value in platform.own_parameters(part).values() if applied_to(part) else ():
            _check_not_replicated(path, value)
    _gather_parameters(changed, _places(modules))
    for part in changed:
        platform.unwrap_forward(part)
        forget(part)
    return module


def _gather_parameters(changed: Sequence[Any], places: Mapping[int, Any]) -> None:
    """Put whole plain tensors in the place of DTensors; all are gathered before any is put."""
    whole: dict[int, Any] = {}
    buffers: list[tuple[Any, str, Any]] = []
    for part in changed:
        for value in platform.own_parameters(part).values():
            if isinstance(value, DTensor) and id(value) not in whole:
                whole[id(value)] = platform.detach(value.full_tensor())
        buffers += [(part, name, value.full_tensor()) for name, value
                    in platform.own_buffers(part).items() if isinstance(value, DTensor)]
    for key, value in whole.items():
        _replace(places[key], value)
    for part, name, value in buffers:
        platform.replace_buffer(part, name, value)


def _the_plan(plan: Optional[Plan], parallelize_plan: Optional[Plan]) -> Mapping[str, Any]:
    """The plan as styles by path."""
    if (plan is None) == (parallelize_plan is None):
        raise TypeError("parallelize_module needs one plan, as plan or under PyTorch's name "
                        f"parallelize_plan, but got {plan!r} and {parallelize_plan!r}.")
    plan = parallelize_plan if plan is None else plan
    if not isinstance(plan, Mapping):
        plan = {"": plan if isinstance(plan, ParallelStyle) else (plan,)}
    for entry, styles in plan.items():
        if not isinstance(entry, str):
            raise TypeError(f"a plan names modules by path, but has the key {entry!r}.")
        for style in _styles(styles):
            if not isinstance(style, ParallelStyle):
                call = f"; write {style.__name__}()" if isinstance(style, type) else ""
                raise TypeError("a plan holds styles of hyper_parallel, such as ColwiseParallel(), "
                                f"but for {entry!r} it has {style!r}{call}.")
    return plan


def _styles(styles: Styles) -> Sequence[ParallelStyle]:
    """The value of a plan's entry as a sequence."""
    if styles is None:
        return ()
    return styles if isinstance(styles, (tuple, list)) else (styles,)


def _check_mesh(mesh: DeviceMesh, source: Optional[int]) -> None:
    check_axis(mesh, "parallelize_module", "a style spreads a module", -1)
    if source is not None and not 0 <= source < mesh.size():
        raise ValueError(f"src_data_rank is a rank along the axis {mesh.alias_name[0]!r}, 0 to "
                         f"{mesh.size() - 1}, or None, but got {source!r}.")


def _jobs(modules: list[tuple[str, Any]], plan: Mapping[str, ParallelStyle], mesh: DeviceMesh
          ) -> list[_Job]:
    """What to do to each module that the plan names, in the order of the modules.

    That order is the same on every rank, while a plan may have been written in any.
    """
    entries_of: dict[int, list[str]] = {}
    for entry in plan:
        named = {id(module) for path, module in modules if _names(entry, path)}
        if not named:
            raise ValueError(f"no module has the path {entry!r}{_near(entry, modules)}.")
        for key in named:
            entries_of.setdefault(key, []).append(entry)
    by_path = dict(modules)
    jobs = []
    for path, module in modules:
        entries = entries_of.pop(id(module), [])
        own = [_Job(path, module, style, style.plan_module(path, module, mesh))
               for entry in entries for style in _styles(plan[entry])]
        _check_together(own, entries, modules)
        for job in own:
            _check_fresh(job)
            if job.plan.cut is not None:
                check_heads(path, by_path.get(path.rpartition(".")[0]), job.plan.cut, mesh.size())
        jobs += own
    return jobs


def _check_together(jobs: Sequence[_Job], entries: Sequence[str], modules: list[tuple[str, Any]]
                    ) -> None:
    """Raise unless at most one of the styles for one module spreads parameters."""
    spreading = [job for job in jobs if job.plan.parameters]
    if len(spreading) < 2:
        return
    path, module = spreading[0].path, spreading[0].module
    if len(entries) > 1:
        path = next(other for other, one in modules if one is module and _names(entries[1], other))
        raise ValueError(f"two entries of the plan, {entries[0]!r} and {entries[1]!r}, name the "
                         f"same module {path!r}; take one of them out.")
    raise ValueError(f"{path!r} has two styles that spread its parameters, {spreading[0].style!r} "
                     f"and {spreading[1].style!r}; take one of them out.")


def _names(entry: str, path: str) -> bool:
    """Whether a plan entry names a path; a wildcard stays within its component."""
    if not path:
        return not entry  # the module itself is no child that a "*" could mean
    patterns, names = entry.split("."), path.split(".")
    return len(patterns) == len(names) and all(map(fnmatchcase, names, patterns))


def _near(entry: str, modules: list[tuple[str, Any]]) -> str:
    paths = [path for path, _ in modules if path]
    near = difflib.get_close_matches(entry, paths, cutoff=0.45)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    if not paths:
        return "; the module has no children, and is itself named ''"
    more = ", ..." if len(paths) > 8 else ""
    return f"; the paths are {', '.join(map(repr, paths[:8]))}{more}"


def _parameters(job: _Job) -> list[tuple[str, Any, Placement]]:
    """Name, present value and placement of each parameter that a job spreads."""
    own = platform.own_parameters(job.module)
    return [(name, own[name], placement) for name, placement in job.plan.parameters.items()]


def _check_fresh(job: _Job) -> None:
    for name, parameter, _ in _parameters(job):
        if isinstance(parameter, DTensor):
            raise RuntimeError(
                f"{job.path!r} is parallelized already: its {name} is spread as "
                f"{parameter.layout!r}; name each module, and all that share a parameter with it, "
                "in one plan.")
        _check_not_replicated(job.path, parameter)


def _check_not_replicated(path: str, parameter: Any) -> None:
    if is_reduced(parameter):
        raise RuntimeError(
            f"the parameters of {path!r} are replicated, and new ones would not be: their "
            "gradients would differ between the ranks; call unreplicate first, and replicate "
            "afterwards.")


def _places(modules: list[tuple[str, Any]]) -> dict[int, list[_Place]]:
    """Where each parameter is held, by its id."""
    places: dict[int, list[_Place]] = {}
    seen: set[int] = set()
    for path, module in modules:
        if id(module) not in seen:
            seen.add(id(module))
            for name, parameter in platform.own_parameters(module).items():
                places.setdefault(id(parameter), []).append(_Place(path, module, name))
    return places


def _check_shared(jobs: list[_Job]) -> None:
    """A shared parameter must be wanted in one way by all of its modules that have a style."""
    wanted: dict[int, tuple[str, Placement]] = {}
    for job in jobs:
        for name, parameter, placement in _parameters(job):
            path = f"{job.path}.{name}"
            other, before = wanted.setdefault(id(parameter), (path, placement))
            if before != placement:
                raise ValueError(
                    f"{other!r} and {path!r} are one shared parameter, but the plan wants "
                    f"{before!r} for the one and {placement!r} for the other; give both modules "
                    "styles that agree, or untie them.")


def _spread_parameters(jobs: list[_Job], places: Mapping[int, list[_Place]], mesh: DeviceMesh,
                       source: Optional[int]) -> None:
    """Replace each parameter wherever it is held, one at a time, so that memory stays low."""
    for job in jobs:
        for _, parameter, placement in _parameters(job):
            if not isinstance(parameter, DTensor):  # else it came with another module
                _replace(places[id(parameter)], distribute_tensor(
                    parameter, mesh, [placement], src_data_rank=source))


def _replace(places: Sequence[_Place], value: Any) -> None:
    """Put one new parameter wherever the old one is held."""
    for place in places:
        value = platform.replace_parameter(place.module, place.name, value)

"""Styles that spread no parameter: they say how tensors lie where a module begins and ends."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence, Union

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Placement
from hyper_parallel.core.tensor_parallel._boundary import Arrange, PrepareArguments, PrepareResults
from hyper_parallel.core.tensor_parallel.style import ModulePlan, ParallelStyle, check_flag

Layouts = Union[Placement, Sequence[Optional[Placement]], None]
KeywordLayouts = Optional[Mapping[str, Optional[Placement]]]


def _several(layouts: Layouts) -> Optional[tuple[Optional[Placement], ...]]:
    """One placement, or one for each tensor, as a tuple."""
    if layouts is None or isinstance(layouts, tuple):
        return layouts
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _check(style: Any, name: str, layouts: Any) -> None:
    for layout in layouts.values() if isinstance(layouts, Mapping) else layouts or ():
        if layout is not None and not isinstance(layout, Placement):
            raise TypeError(f"{name} of {type(style).__name__} holds placements of hyper_parallel, "
                            f"such as Shard(1), or None, but got {layout!r} "
                            f"({type(layout).__module__}.{type(layout).__name__}).")


def _check_pair(style: Any, given: str, wanted: str) -> None:
    """Check two fields that must say something of the same tensors."""
    one, other = getattr(style, given), getattr(style, wanted)
    for name, layouts in ((given, one), (wanted, other)):
        _check(style, name, layouts)
    same = one.keys() == other.keys() if isinstance(one, Mapping) and isinstance(other, Mapping) \
        else len(one or ()) == len(other or ())
    if not same:
        raise ValueError(f"{given} and {wanted} of {type(style).__name__} speak of the same "
                         f"tensors, but got {one!r} and {other!r}.")


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Makes DTensors of a module's arguments and moves them to the layouts that it works on.

    Args:
        input_layouts: how each positional argument lies where it is a plain tensor; None for one
            to leave alone.  A single placement speaks of the only argument.
        desired_input_layouts: how the module wants each; of the same length.
        input_kwarg_layouts: the same for arguments by keyword.
        desired_input_kwarg_layouts: the same for arguments by keyword.
        use_local_output: whether the module gets this rank's parts as plain tensors.

    Raises:
        TypeError: an argument of another type.
        ValueError: layouts that are not as many as those desired.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: KeywordLayouts = None
    desired_input_kwarg_layouts: KeywordLayouts = None
    use_local_output: bool = False

    def __post_init__(self) -> None:
        for name in ("input_layouts", "desired_input_layouts"):
            object.__setattr__(self, name, _several(getattr(self, name)))
        _check_pair(self, "input_layouts", "desired_input_layouts")
        _check_pair(self, "input_kwarg_layouts", "desired_input_kwarg_layouts")
        check_flag(self, "use_local_output")

    def plan_module(self, path: str, module: Any, device_mesh: DeviceMesh) -> ModulePlan:
        """See :meth:`ParallelStyle.plan_module`."""
        who = f"{type(self).__name__} module {path!r}"
        positions = None if self.input_layouts is None else tuple(
            Arrange.of(who, device_mesh, given, wanted, self.use_local_output)
            for given, wanted in zip(self.input_layouts, self.desired_input_layouts))
        keywords = {
            name: Arrange.of(who, device_mesh, given, self.desired_input_kwarg_layouts[name],
                             self.use_local_output)
            for name, given in (self.input_kwarg_layouts or {}).items()}
        return ModulePlan({}, PrepareArguments(who, positions, keywords), None)


@dataclass(frozen=True, kw_only=True)
class PrepareModuleOutput(ParallelStyle):
    """Makes DTensors of a module's results and moves them to the layouts that are wanted.

    Args:
        output_layouts: how each result lies where it is a plain tensor; None for one to leave
            alone.  A single placement speaks of the only result.
        desired_output_layouts: how each shall lie; of the same length.
        use_local_output: whether the caller gets this rank's parts as plain tensors.

    Raises:
        TypeError: an argument of another type.
        ValueError: layouts that are not as many as those desired.
    """

    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def __post_init__(self) -> None:
        for name in ("output_layouts", "desired_output_layouts"):
            object.__setattr__(self, name, _several(getattr(self, name)))
        _check_pair(self, "output_layouts", "desired_output_layouts")
        check_flag(self, "use_local_output")

    def plan_module(self, path: str, module: Any, device_mesh: DeviceMesh) -> ModulePlan:
        """See :meth:`ParallelStyle.plan_module`."""
        who = f"{type(self).__name__} module {path!r}"
        return ModulePlan({}, None, PrepareResults(who, tuple(
            Arrange.of(who, device_mesh, given, wanted, self.use_local_output)
            for given, wanted in zip(self.output_layouts or (),
                                     self.desired_output_layouts or ()))))


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one.

    Args:
        input_layouts: see :class:`PrepareModuleInput`, like the next three.
        desired_input_layouts: how the module wants each positional argument.
        input_kwarg_layouts: how each argument by keyword lies.
        desired_input_kwarg_layouts: how the module wants each of them.
        use_local_input: whether the module gets this rank's parts as plain tensors.
        output_layouts: see :class:`PrepareModuleOutput`, like the next two.
        desired_output_layouts: how each result shall lie.
        use_local_output: whether the caller gets this rank's parts as plain tensors.

    Raises:
        TypeError: an argument of another type.
        ValueError: layouts that are not as many as those desired.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: KeywordLayouts = None
    desired_input_kwarg_layouts: KeywordLayouts = None
    use_local_input: bool = False
    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def __post_init__(self) -> None:
        check_flag(self, "use_local_input")
        self._halves()

    def _halves(self) -> tuple[PrepareModuleInput, PrepareModuleOutput]:
        return PrepareModuleInput(
            input_layouts=self.input_layouts, desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_input,
        ), PrepareModuleOutput(
            output_layouts=self.output_layouts, desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output)

    def plan_module(self, path: str, module: Any, device_mesh: DeviceMesh) -> ModulePlan:
        """See :meth:`ParallelStyle.plan_module`."""
        first, second = self._halves()
        return ModulePlan({}, first.plan_module(path, module, device_mesh).before,
                          second.plan_module(path, module, device_mesh).after)

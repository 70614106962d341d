"""What happens at the boundary of a parallel module: plain tensors and DTensors change places.

All of it only redistributes, dresses and undresses, so a trace shows the module's own operators
and nothing of the boundary but the collectives that a change of layout costs.  The functions are
values that know no module, so a copied or pickled module takes its own copies along.
"""
from __future__ import annotations

from typing import Any, Mapping, Optional

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.tensor_redistribution import redistribute
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.platform import get_platform

platform = get_platform()

_MOST_SHAPES = 256  # of plain tensors that a boundary keeps in mind


class _Boundary:
    """A module's way in or out, where tensors get one placement.

    Args:
        who: style and module, for messages.
        mesh: mesh of one axis.
        wanted: the placement.
    """

    def __init__(self, who: str, mesh: DeviceMesh, wanted: Placement) -> None:
        self._who = who
        self._mesh = mesh
        self._wanted = wanted
        self._layouts: dict[int, Layout] = {}

    def _layout(self, ndim: int) -> Layout:
        """The layout wanted of a tensor of so many dims."""
        wanted = self._layouts.get(ndim)
        if wanted is None:
            wanted = self._layouts[ndim] = Layout(self._mesh, (self._wanted,)).for_ndim(ndim)
        return wanted

    def _arrange(self, value: DTensor) -> DTensor:
        """``value`` in the layout wanted; itself where it has that already."""
        spec = value._spec
        wanted = self._layout(len(spec.shape))
        if spec.layout is wanted:
            return value
        return value.redistribute(self._mesh, wanted.placements)

    def _arrange_local(self, value: DTensor) -> Any:
        """This rank's part of ``value`` in the layout wanted, as a plain tensor."""
        spec = value._spec
        wanted = self._layout(len(spec.shape))
        if spec.layout is wanted:
            return value.to_local()
        if spec.layout.device_mesh is not wanted.device_mesh:
            return value.redistribute(self._mesh, wanted.placements).to_local()
        return redistribute(value, spec, wanted)


class _Arrival(_Boundary):
    """A boundary where plain tensors become DTensors.

    Args:
        who: style and module, for messages.
        mesh: mesh of one axis.
        given: how a plain tensor lies.
        wanted: the placement.
        features: global length of the last dim, where the module knows it: only so can a plain
            tensor that is split there be uneven.
    """

    def __init__(self, who: str, mesh: DeviceMesh, given: Placement, wanted: Placement,
                 features: Optional[int] = None) -> None:
        super().__init__(who, mesh, wanted)
        self._given = given
        self._features = features
        self._specs: dict[tuple[int, ...], TensorSpec] = {}

    def _dressed(self, plain: Any) -> DTensor:
        """A plain tensor as a DTensor.

        One tensor may enter several modules, as the input of attention enters its three
        projections. So that its gradients still add up before one all-reduce, its dressed aliases
        share the views through which they are summed.
        """
        shape = plain.shape
        spec = self._specs.get(shape)
        if spec is None:
            value = DTensor.from_local(plain, self._mesh, (self._given,),
                                       shape=self._global_shape(shape))
            if len(self._specs) >= _MOST_SHAPES:
                self._specs.clear()
            self._specs[shape] = value._spec
        else:
            value = platform.dress(platform.undress(plain), DTensor, spec)
        if isinstance(self._given, Replicate) and platform.needs_gradient(plain):
            value.share_views_with(plain)
        return value

    def _global_shape(self, local_shape: tuple[int, ...]) -> Optional[tuple[int, ...]]:
        ndim = len(local_shape)
        if self._features is None or not isinstance(self._given, Shard) \
                or self._given.dim not in (-1, ndim - 1):
            return None
        return (*local_shape[:-1], self._features)


class EnterModule(_Arrival):
    """Gives a module its first argument in the layout that it works on; see ``_Arrival``."""

    def __call__(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (self._prepare(args[0]), *args[1:]), kwargs
        if kwargs:
            name = next(iter(kwargs))
            return args, {**kwargs, name: self._prepare(kwargs[name])}
        return args, kwargs

    def _prepare(self, value: Any) -> DTensor:
        if not isinstance(value, platform.Tensor):
            raise TypeError(f"{self._who} takes a tensor as its first argument, but got a "
                            f"{type(value).__name__}.")
        if not isinstance(value, DTensor):
            value = self._dressed(value)
        return self._arrange(value)


class LeaveModule(_Boundary):
    """Gives a module's result the layout that the plan asks for.

    Args:
        who: style and module, for messages.
        mesh: mesh of one axis.
        wanted: how the result shall lie.
        to_plain: whether the caller gets this rank's part as a plain tensor.
    """

    def __init__(self, who: str, mesh: DeviceMesh, wanted: Placement, to_plain: bool) -> None:
        super().__init__(who, mesh, wanted)
        self._to_plain = to_plain

    def __call__(self, module: Any, args: tuple, output: Any) -> Any:
        if not isinstance(output, DTensor):
            raise TypeError(f"the forward of {self._who} must give a DTensor, but gave a "
                            f"{type(output).__name__}.")
        return self._arrange_local(output) if self._to_plain else self._arrange(output)


class Arrange(_Arrival):
    """Moves one tensor from the layout that it has to the one wanted.

    Args:
        who: style and module, for messages.
        mesh: mesh of one axis.
        given: how a plain tensor lies.
        wanted: how it shall lie.
        to_plain: whether the result is this rank's part as a plain tensor.
    """

    def __init__(self, who: str, mesh: DeviceMesh, given: Placement, wanted: Placement,
                 to_plain: bool) -> None:
        super().__init__(who, mesh, given, wanted)
        self._to_plain = to_plain

    @staticmethod
    def of(who: str, mesh: DeviceMesh, given: Optional[Placement], wanted: Optional[Placement],
           to_plain: bool) -> Optional[Arrange]:
        """What to do with one tensor; None to leave it alone."""
        return None if given is None else Arrange(who, mesh, given, wanted or given, to_plain)

    def __call__(self, value: Any) -> Any:
        if value is None:  # an optional argument that was not given
            return None
        if not isinstance(value, platform.Tensor):
            raise TypeError(f"{self._who} has a layout for a {type(value).__name__}; a layout is "
                            "for a tensor, write None in its place.")
        if not isinstance(value, DTensor):
            value = self._dressed(value)
        return self._arrange_local(value) if self._to_plain else self._arrange(value)


class PrepareArguments:
    """Arranges the arguments of a module, each in its way.

    Args:
        who: style and module, for messages.
        positions: what to do with each positional argument; None leaves all alone.
        keywords: what to do with arguments by keyword.
    """

    def __init__(self, who: str, positions: Optional[tuple[Optional[Arrange], ...]],
                 keywords: Mapping[str, Optional[Arrange]]) -> None:
        self._who = who
        self._positions = positions
        self._keywords = keywords

    def __call__(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self._positions is not None:
            args = _each(self._who, "input_layouts", self._positions, args)
        if self._keywords:
            kwargs = {name: _arranged(self._keywords.get(name), value)
                      for name, value in kwargs.items()}
        return args, kwargs


class PrepareResults:
    """Arranges the results of a module, each in its way.

    Args:
        who: style and module, for messages.
        results: what to do with each of them.
    """

    def __init__(self, who: str, results: tuple[Optional[Arrange], ...]) -> None:
        self._who = who
        self._results = results

    def __call__(self, module: Any, args: tuple, output: Any) -> Any:
        if isinstance(output, (tuple, list)):
            return _each(self._who, "output_layouts", self._results, tuple(output))
        return _each(self._who, "output_layouts", self._results, (output,))[0]


def _each(who: str, name: str, arrangements: tuple[Optional[Arrange], ...], values: tuple) -> tuple:
    if len(values) != len(arrangements):
        raise ValueError(f"{who} has {name} for {len(arrangements)} tensors, but there are "
                         f"{len(values)}; write one for each, None to leave it alone.")
    return tuple(map(_arranged, arrangements, values))


def _arranged(arrange: Optional[Arrange], value: Any) -> Any:
    return value if arrange is None else arrange(value)

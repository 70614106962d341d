"""What happens at the boundary of a parallel module: plain tensors and DTensors change places.

Both halves only redistribute, dress and undress, so a trace shows the module's own operators and
nothing of the boundary but the collectives that a change of layout costs.  They are values that
know no module, so a copied or pickled module takes its own copies along.
"""
from __future__ import annotations

from typing import Any, Optional

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Placement, Shard
from hyper_parallel.platform import get_platform

platform = get_platform()


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

    def _arrange(self, value: DTensor) -> DTensor:
        """``value`` in the layout wanted; itself where it has that already."""
        ndim = len(value.shape)
        wanted = self._layouts.get(ndim)
        if wanted is None:
            wanted = self._layouts[ndim] = Layout(self._mesh, (self._wanted,)).for_ndim(ndim)
        if value.layout is wanted:
            return value
        return value.redistribute(self._mesh, wanted.placements)


class EnterModule(_Boundary):
    """Gives a module its first argument in the layout that it works on.

    Args:
        who: style and module, for messages.
        mesh: mesh of one axis.
        given: how a plain tensor lies.
        wanted: how the module wants it.
        features: global length of the last dim, where the module knows it: only so can a plain
            tensor that is split there be uneven.
    """

    def __init__(self, who: str, mesh: DeviceMesh, given: Placement, wanted: Placement,
                 features: Optional[int] = None) -> None:
        super().__init__(who, mesh, wanted)
        self._given = given
        self._features = features

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
            value = DTensor.from_local(value, self._mesh, (self._given,),
                                       shape=self._global_shape(value))
        return self._arrange(value)

    def _global_shape(self, local: Any) -> Optional[tuple[int, ...]]:
        ndim = len(local.shape)
        if self._features is None or not isinstance(self._given, Shard) \
                or self._given.dim not in (-1, ndim - 1):
            return None
        return (*local.shape[:-1], self._features)


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
        output = self._arrange(output)
        return output.to_local() if self._to_plain else output

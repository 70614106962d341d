"""The batch of a replicated module: DTensors outside, each rank's rows within.

Within the module every rank works on its rows as a program on one rank would, and the gradients
of the parameters are averaged over the ranks.  A program that holds the batch as a DTensor, split
along dim 0, asks for the gradient of its loss over all rows, which is a sum.  So gradients are
multiplied by the number of ranks where they come in, at the output, and divided where they leave,
at the input.
"""
from __future__ import annotations

from typing import Any, Optional

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.platform import get_platform

platform = get_platform()


class BatchOnMesh:
    """Takes DTensors apart that are spread over an axis, and puts results together.

    Args:
        axis: mesh of the one axis that the batch is split over.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self._name = axis.alias_name[0]
        self._size = axis.size()

    def mesh_of(self, arguments: Any) -> Optional[DeviceMesh]:
        """The mesh of the batch, None where it is plain or not spread over the axis."""
        for value in platform.tensors_within(arguments):
            if isinstance(value, DTensor) and self._name in value.device_mesh.alias_name:
                return value.device_mesh
        return None

    def rows(self, value: Any) -> Any:
        """This rank's rows of a tensor, as the module takes them.

        Raises:
            ValueError: a number of rows that the axis does not divide, or another placement on it.
        """
        if not isinstance(value, DTensor) or self._name not in value.device_mesh.alias_name:
            return value
        mesh = value.device_mesh
        axis = mesh.alias_name.index(self._name)
        placement = value.placements[axis]
        if placement not in (Shard(0), Replicate()):
            raise ValueError(f"the batch of a replicated module is Shard(0) or Replicate() on "
                             f"{self._name!r}, but a tensor of shape {tuple(value.shape)} is "
                             f"{placement!r}; redistribute it.")
        if placement == Shard(0) and value.shape[0] % self._size:
            raise ValueError(f"a batch of {value.shape[0]} rows does not divide by the "
                             f"{self._size} ranks of {self._name!r}, so that ranks would average "
                             "over different numbers of rows; pad or cut it.")
        others = [one for number, one in enumerate(value.placements) if number != axis]
        if any(one != Replicate() for one in others):
            raise ValueError(f"the batch of a replicated module is whole on the axes other than "
                             f"{self._name!r}, but lies as {value.layout!r}; redistribute it.")
        return _scaled(value.to_local(), 1 / self._size)

    def together(self, value: Any, mesh: DeviceMesh) -> Any:
        """A tensor that every rank computed from its rows, as a DTensor on the mesh of the batch.

        A scalar is the mean of what the ranks have.
        """
        axis = mesh.alias_name.index(self._name)
        placements: list[Placement] = [Replicate()] * mesh.ndim
        shape = list(value.shape)
        if shape:
            placements[axis] = Shard(0)
            shape[0] *= self._size
        else:
            placements[axis] = Partial("avg")
        if isinstance(value, DTensor):
            value = self._on_axes_of(value, mesh, placements)
        value = _scaled(value, float(self._size))
        return DTensor.from_local(value, mesh, placements, shape=shape)

    @staticmethod
    def _on_axes_of(value: DTensor, mesh: DeviceMesh, placements: list[Placement]) -> Any:
        """This rank's part of a module's DTensor; its placements are entered for the axes."""
        names = value.device_mesh.alias_name
        kept = [placement if name in mesh.alias_name else Replicate()
                for name, placement in zip(names, value.placements)]
        if any(placement == Shard(0) for placement in kept):
            kept = [Replicate()] * len(names)  # the rows are the batch's
        for name, placement in zip(names, kept):
            if name in mesh.alias_name:
                placements[mesh.alias_name.index(name)] = placement
        return value.redistribute(placements=kept).to_local()


def _scaled(value: Any, factor: float) -> Any:
    """``value`` with its gradient multiplied."""
    if factor == 1 or not platform.needs_gradient(value):
        return value
    return platform.apply_with_gradient(lambda x: x, lambda grad: grad * factor, value)

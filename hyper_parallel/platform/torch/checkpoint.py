"""How a DTensor goes into and comes out of ``torch.distributed.checkpoint``.

That package knows a tensor by the boxes of it that each rank holds. It asks a tensor class which
boxes those are, and for their memory, by the three methods of its protocol ``_Checkpointable``.
Of the ranks that name the same box one writes it; at load a rank reads whatever parts of the saved
boxes overlap its own. So nothing is gathered, and a checkpoint fits any mesh and any placements.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata, MetadataIndex, TensorProperties)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_undressed = torch._C.DisableTorchFunctionSubclass


class CheckpointableTensor(torch.Tensor):
    """A tensor of which this rank holds the box that ``_spec`` says."""

    _spec: Any

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        """What this rank could write of the tensor called ``fqn``: its box, or nothing.

        Raises:
            RuntimeError: the tensor is Partial.
        """
        del value  # the tensor itself
        boxes = self._boxes(repr(fqn))
        with _undressed():
            properties = TensorProperties.create_from_tensor(self.detach())
        return [WriteItem(index=MetadataIndex(fqn, box.offsets), type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk=box, properties=properties,
                                                      size=self._spec.shape)) for box in boxes]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes that this rank wants to read.

        Raises:
            RuntimeError: the tensor is Partial.
        """
        return self._boxes(f"a tensor of shape {tuple(self._spec.shape)}")

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of this rank's box, to read or to write; a rank holds one box at most."""
        del index
        with _undressed():
            return self.detach()

    def _boxes(self, name: str) -> list[ChunkStorageMetadata]:
        """This rank's box; none outside of the mesh, and none where the part is empty.

        An empty part would stand at the end of the tensor, like all other empty parts. Only a
        tensor without elements consists of one, which says that it exists.
        """
        layout, shape = self._spec.layout, self._spec.shape
        mesh = layout.device_mesh
        if mesh.get_coordinate() is None:
            return []
        if any(placement.is_partial() and size > 1
               for placement, size in zip(layout.placements, mesh.mesh_shape)):
            raise RuntimeError(
                f"a checkpoint holds values, but {name} lies as {layout!r}, where each rank has a "
                "summand; redistribute it to Shard or Replicate before.")
        bounds = layout.local_bounds(shape)
        sizes = torch.Size(length for _, length in bounds)
        if not sizes.numel() and shape.numel():
            return []
        offsets = torch.Size(start for start, _ in bounds) if shape.numel() else [0] * len(shape)
        return [ChunkStorageMetadata(torch.Size(offsets), sizes if shape.numel() else shape)]

"""PyTorch's own DeviceMesh and DTensor, read and built."""
from typing import Any, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hyper_parallel.platform.torch import groups
from hyper_parallel.platform.translation_adapter import NativeMesh, NativeTensor

_KINDS = {"shard": Shard, "replicate": lambda _: Replicate(), "partial": Partial}


def read_native_mesh(mesh: Any) -> NativeMesh:
    """See ``TranslationAdapter.read_native_mesh``."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError("from_torch takes a torch.distributed.device_mesh.DeviceMesh, but got "
                        f"{mesh!r} ({type(mesh).__name__}).")
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        for axis in range(mesh.ndim):
            place = [slice(None) if other == axis else index
                     for other, index in enumerate(coordinate)]
            groups.adopt_group(tuple(mesh.mesh[tuple(place)].tolist()), mesh.get_group(axis))
    return NativeMesh(mesh.mesh.numpy(), mesh.mesh_dim_names)


def build_native_mesh(ranks: np.ndarray, names: tuple[str, ...], axis_groups: Sequence[Any]) -> Any:
    """See ``TranslationAdapter.build_native_mesh``."""
    for axis in range(ranks.ndim):
        if (np.diff(ranks, axis=axis) < 0).any():
            raise ValueError(
                "the groups of PyTorch's DeviceMesh are in ascending order of ranks, but this mesh "
                f"is {ranks.tolist()}; redistribute to a mesh in that order before.")
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    group = list(axis_groups) if ranks.ndim > 1 else axis_groups[0]
    return DeviceMesh.from_group(group, device, torch.from_numpy(ranks.copy()),
                                 mesh_dim_names=names)


def read_native_tensor(tensor: Any) -> NativeTensor:
    """See ``TranslationAdapter.read_native_tensor``."""
    if not isinstance(tensor, DTensor):
        raise TypeError("from_torch takes a torch.distributed.tensor.DTensor, but got a "
                        f"{type(tensor).__name__}.")
    return NativeTensor(tensor.to_local(), tensor.device_mesh,
                        tuple(map(_read_placement, tensor.placements)), tuple(tensor.shape))


def _read_placement(placement: Any) -> tuple[str, Any]:
    if type(placement) is Shard:
        return "shard", placement.dim
    if placement.is_replicate():
        return "replicate", None
    if type(placement) is Partial:
        return "partial", placement.reduce_op
    raise ValueError(f"PyTorch's {placement!r} has no counterpart here; redistribute the tensor to "
                     "Shard, Replicate or Partial before.")


def build_native_tensor(parts: NativeTensor) -> Any:
    """See ``TranslationAdapter.build_native_tensor``."""
    placements = [_KINDS[kind](value) for kind, value in parts.placements]
    stride = torch.empty(parts.shape, device="meta").stride()
    return DTensor.from_local(parts.local, parts.mesh, placements, run_check=False,
                              shape=torch.Size(parts.shape), stride=stride)

"""What PyTorch's own DTensor would send, for comparison; run as a program of its own.

It plans in a fake process group, which must not become the default group of the tests. The
argument is a JSON list of ``[mesh shape, dims of the tensor, source, target]``, a placement
written ``R``, ``P`` or its dim. It prints for each the bytes that one rank sends, as a fraction
of the global tensor, and the number of collectives, for the cheaper of PyTorch's two planners (of
fewer collectives where they send the same), or null where there is no way.
"""

import json
import sys
from math import prod
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos_non_cached, _optimize_transform_infos)
from torch.testing._internal.distributed.fake_pg import FakeStore


def _placements(text: str) -> tuple[Any, ...]:
    kinds = {"R": Replicate(), "P": Partial()}
    return tuple(kinds.get(letter) or Shard(int(letter)) for letter in text)


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh with all flattened meshes that its collectives could be joined on."""
    names = tuple("abc"[:len(shape)])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for start in range(len(names)):
        for stop in range(start + 2, len(names) + 1):
            mesh[names[start:stop]]._flatten("".join(names[start:stop]))
    return mesh


def _spec(mesh: DeviceMesh, ndim: int, placements: tuple[Any, ...]) -> DTensorSpec:
    tensor = torch.empty((96,) * ndim, device="meta")
    return DTensorSpec(mesh, placements, TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))


def _wire(kind: Any, size: int, before: float, after: float) -> float:
    if kind is None:
        return 0.0
    held = {"all_reduce": 2 * before, "reduce_scatter": before, "all_gather": after,
            "all_to_all": before}[kind]
    return held * (size - 1) / size


def _held(mesh: DeviceMesh, placements: list[Any]) -> float:
    """Part of the tensor that a rank holds."""
    return 1 / prod(mesh.shape[axis] for axis, p in enumerate(placements) if p.is_shard())


def _cost(mesh: DeviceMesh, ndim: int, source: tuple[Any, ...], target: tuple[Any, ...],
          graph: bool) -> Optional[tuple[float, int]]:
    try:
        infos = _gen_transform_infos_non_cached(
            _spec(mesh, ndim, source), _spec(mesh, ndim, target), graph)
        infos = _optimize_transform_infos(infos, mesh, source, target)
    except (RuntimeError, AssertionError, ValueError):
        return None
    placements, total, launches = list(source), 0.0, 0
    for info in infos:
        axes = getattr(info, "original_mesh_dims", (info.mesh_dim,))
        after = info.src_dst_placements[1]
        if info.src_dst_placements[0].is_shard() and after.is_partial():
            return None  # it plans this step and then refuses to take it
        held, kind = _held(mesh, placements), info._comm_type_key()
        for axis in axes:
            placements[axis] = after
        total += _wire(kind, prod(mesh.shape[axis] for axis in axes), held,
                       _held(mesh, placements))
        launches += kind is not None
    return round(total, 9), launches


def main() -> None:
    """Answers the cases given as the argument."""
    cases = json.loads(sys.argv[1])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    answers = []
    for shape, ndim, source, target in cases:
        world = prod(shape)
        if dist.get_world_size() != world:
            dist.destroy_process_group()
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
            mesh = _mesh(tuple(shape))
        elif tuple(mesh.shape) != tuple(shape):
            mesh = _mesh(tuple(shape))
        costs = [_cost(mesh, ndim, _placements(source), _placements(target), graph)
                 for graph in (False, True)]
        answers.append(min((cost for cost in costs if cost is not None), default=None))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

"""What a call costs whose plan is not cached: this library's DTensor and PyTorch's.

    python benchmarks/cache_miss.py

Rank 0 of a fake process group that sends nothing.  Every call has a length that was not seen
before, as a batch of sequences has, and is then repeated; the miss is what the first call takes
longer than the second.  The libraries take turns.  Times are medians in microseconds, and the
ratio is that of the medians.  A last part runs one operator on many shapes, and tells what the
cache holds.
"""
from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
import warnings
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import tensor as torch_dtensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyper_parallel as hp
from hyper_parallel.core.shard._op_dispatch import dispatcher

WIDTH = 64
MESHES = {(4,): 500.0, (2, 2): 1000.0}
"""Mesh shapes, and the microseconds that a miss may take on them."""


def operators() -> dict[str, Callable]:
    """Calls on an input of (batch, length, width) and a weight of (width, width)."""
    return {
        "add": lambda x, w: x + x,
        "linear": F.linear,
        "gelu": lambda x, w: F.gelu(x),
        "view": lambda x, w: x.view(x.shape[0], -1, 4, WIDTH // 4),
        "transpose": lambda x, w: x.transpose(1, 2),
        "sum": lambda x, w: x.sum(-1),
        "softmax": lambda x, w: F.softmax(x, -1),
        "layer_norm": lambda x, w: F.layer_norm(x, (WIDTH,)),
        "matmul": lambda x, w: x @ w,
    }


def redistributions(library: Any, axes: int) -> dict[str, Callable]:
    """Explicit moves of the same input."""
    lengths = [library.Shard(0)] * (axes - 1) + [library.Shard(1)]
    return {
        "batch -> length": lambda x, w: x.redistribute(placements=lengths),
        "batch -> whole": lambda x, w: x.redistribute(placements=[library.Replicate()] * axes),
    }


def operands(library: Any, mesh: Any, length: int) -> tuple[Any, Any]:
    """Input with the batch sharded over the mesh's first axis, weight replicated."""
    axes = mesh.ndim
    placements = [library.Shard(0)] + [library.Replicate()] * (axes - 1)
    first = mesh.mesh_shape[0] if library is hp else mesh.shape[0]
    return (library.DTensor.from_local(torch.randn(8 // first, length, WIDTH), mesh, placements),
            library.DTensor.from_local(torch.randn(WIDTH, WIDTH), mesh,
                                       [library.Replicate()] * axes))


def seconds(function: Callable, pair: tuple) -> float:
    """One call."""
    start = time.perf_counter()
    function(*pair)
    return time.perf_counter() - start


def miss(function: Callable, pair: tuple, warm: bool) -> float:
    """Microseconds that the first call of a shape takes longer than the next.

    ``warm`` runs the plain operator before, which is slow itself when its memory is new.
    """
    if warm:
        function(*(one.to_local() for one in pair))
    first = seconds(function, pair)
    return (first - min(seconds(function, pair) for _ in range(3))) * 1e6


def measure(shape: tuple[int, ...], lengths: int) -> None:
    """Print a row an operator, for one mesh."""
    names = ("dp", "tp")[:len(shape)]
    meshes = {hp: hp.init_device_mesh(shape, names),
              torch_dtensor: torch_dtensor.init_device_mesh("cpu", shape, mesh_dim_names=names)}
    calls = {library: {**operators(), **redistributions(library, len(shape))}
             for library in meshes}
    print(f"\nmesh {shape}: a miss may take {MESHES[shape]:.0f} us")
    print(f"{'operator':<18}{'ours':>10}{'torch':>10}{'ratio':>8}")
    medians = []
    for name in calls[hp]:
        samples: dict[Any, list[float]] = {library: [] for library in meshes}
        for length in range(8, 8 + 4 * lengths, 4):
            for library, mesh in meshes.items():
                samples[library].append(
                    miss(calls[library][name], operands(library, mesh, length),
                         warm=name in operators()))
        ours, theirs = (statistics.median(values[2:]) for values in samples.values())
        medians.append(ours)
        print(f"{name:<18}{ours:>10.0f}{theirs:>10.0f}{ours / theirs:>8.3f}", flush=True)
    print(f"median {statistics.median(medians):.0f} us, largest {max(medians):.0f} us")


def many_shapes(count: int) -> None:
    """Run one operator on many shapes, and print what is held of them."""
    mesh = hp.init_device_mesh((4,), ("tp",))
    resident = []
    before = dispatcher.cache_info()
    for length in range(1, count + 1):
        x = hp.DTensor.from_local(torch.empty(1, length), mesh, [hp.Shard(0)])
        _ = x + x
        if length % (count // 4) == 0:
            gc.collect()
            resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    after = dispatcher.cache_info()
    print(f"\n{count} shapes: {after['misses'] - before['misses']} misses, "
          f"{after['plans'] - before['plans']} plans more are held; most memory so far, "
          f"at each quarter: {', '.join(map(str, resident))} MiB")


def main() -> None:
    """Measure on both meshes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, default=40)
    parser.add_argument("--shapes", type=int, default=10_000)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    for shape in MESHES:
        measure(shape, arguments.lengths)
    many_shapes(arguments.shapes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

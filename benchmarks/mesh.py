"""Time to describe a large mesh, take a slice of it and flatten two axes; no group is made.

    python benchmarks/mesh.py

The number is the median over the rounds in milliseconds; every round starts without caches.
"""
from __future__ import annotations

import argparse
import statistics
import time

from hyper_parallel import init_device_mesh
from hyper_parallel.core import device_mesh

SHAPES = {16_384: (16, 64, 16), 65_536: (64, 64, 16)}


def build(shape: tuple[int, int, int]) -> float:
    """Milliseconds for one mesh, one slice and one flatten."""
    device_mesh._DEVICE_MESH_MAP.clear()
    start = time.perf_counter()
    mesh = init_device_mesh(shape, ("pp", "dp", "tp"))
    assert mesh["tp"].mesh_shape == (shape[2],)
    assert mesh["pp", "dp"].flatten().mesh_shape == (shape[0] * shape[1],)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Print one line a size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    for ranks, shape in SHAPES.items():
        samples = [build(shape) for _ in range(rounds)]
        print(f"{ranks:>7,} ranks: {statistics.median(samples):.1f} ms")


if __name__ == "__main__":
    main()

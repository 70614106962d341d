"""What moving a tensor between all pairs of layouts sends: ours, PyTorch's, and the least.

    python benchmarks/redistribution.py

For each mesh it plans every ordered pair of placements of a 2-D tensor, and prints the sums of
the bytes that a rank sends, as fractions of the global tensor, and of the collectives. PyTorch's
number is that of the cheaper of its two planners, over the pairs that it can plan; ``torch<``
counts the pairs where it sends less, ``shorter`` those where it sends the same in fewer calls.
The least is what a rank lacks of its new part, for the pairs without Partial: no algorithm can
send less.
"""
from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.dtensor._redistribute_plan import plan_redistribution

NDIM = 2
MESHES = ((2,), (4,), (2, 2), (2, 4), (2, 2, 2))
KINDS = {"R": hp.Replicate(), "P": hp.Partial(), "0": hp.Shard(0), "1": hp.Shard(1)}
EVEN, UNEVEN = (16, 16), (13, 7)


def pairs(axes: int) -> list[tuple[str, str]]:
    """All ordered pairs of placements, a letter an axis."""
    words = ["".join(word) for word in itertools.product(KINDS, repeat=axes)]
    return list(itertools.product(words, repeat=2))


def pytorchs(shape: tuple[int, ...]) -> list[list[float] | None]:
    """Bytes and collectives of PyTorch's DTensor for each pair; None where it has no way."""
    program = Path(__file__).with_name("torch_planner.py")
    cases = json.dumps([[shape, NDIM, *pair] for pair in pairs(len(shape))])
    done = subprocess.run([sys.executable, str(program), cases], check=True, text=True,
                          capture_output=True)
    return json.loads(done.stdout)


def lacking(source: hp.Layout, target: hp.Layout, sizes: tuple[int, ...]) -> float:
    """What a rank does not hold of its new part, the mean over ranks."""
    total = 0.0
    for coordinate in np.ndindex(*source.device_mesh.mesh_shape):
        needed = kept = 1
        for (old, length), (new, wanted) in zip(source.local_bounds(sizes, coordinate),
                                                target.local_bounds(sizes, coordinate)):
            needed *= wanted
            kept *= max(0, min(old + length, new + wanted) - max(old, new))
        total += needed - kept
    return total / prod(source.device_mesh.mesh_shape) / prod(sizes)


def measure(shape: tuple[int, ...]) -> None:
    """Print the line of one mesh."""
    mesh = hp.DeviceMesh(np.arange(prod(shape)).reshape(shape), ("a", "b", "c")[:len(shape)])
    sums, times = Counter[str](), []
    for words, other in zip(pairs(len(shape)), pytorchs(shape), strict=True):
        source, target = (hp.Layout(mesh, [KINDS[letter] for letter in word]) for word in words)
        start = time.perf_counter()
        plan = plan_redistribution(source, target)
        times.append(time.perf_counter() - start)
        wire = sum(step.wire for step in plan)
        launches = sum(step.communicates for step in plan)
        sums.update(ours=wire, launches=launches)
        if other is not None:
            sent, calls = other
            sums.update(theirs=sent, calls=calls, both=wire, more=wire > sent + 1e-9,
                        longer=abs(wire - sent) < 1e-9 and launches > calls)
        if "P" not in "".join(words):
            sums.update(bounded=wire, even=lacking(source, target, EVEN),
                        uneven=lacking(source, target, UNEVEN))
    print(f"{str(shape):<11}{len(times):>6}{sums['ours']:>10.2f}{sums['launches']:>12}"
          f"{sums['both']:>12.2f}{sums['theirs']:>9.2f}{sums['calls']:>13}{sums['more']:>8}"
          f"{sums['longer']:>9}"
          f"{sums['bounded'] / sums['even']:>13.3f}{sums['bounded'] / sums['uneven']:>9.3f}"
          f"{statistics.median(times) * 1e3:>11.2f} ms", flush=True)


def main() -> None:
    """One line a mesh."""
    print(f"{'mesh':<11}{'pairs':>6}{'sent':>10}{'collectives':>12}{'both plan':>12}{'torch':>9}"
          f"{'collectives':>13}{'torch<':>8}{'shorter':>9}{'sent/least':>13}{'uneven':>9}"
          f"{'a new plan':>14}")
    for shape in MESHES:
        measure(shape)


if __name__ == "__main__":
    main()

"""Training steps that take turns, so that all meet the same load of a shared machine."""
from __future__ import annotations

import statistics
import time
from typing import Callable

import torch.distributed as dist


def take_turns(runs: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each run, step by step; the ranks begin each one together."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - start) * 1e6)
    return samples


def medians(samples: dict[str, list[float]], base: str) -> dict[str, tuple[float, float]]:
    """Of each run its median, and the median of its ratios to the base's neighbouring step."""
    return {name: (statistics.median(values),
                   statistics.median(a / b for a, b in zip(values, samples[base])))
            for name, values in samples.items()}

"""Training steps that take turns, so that all meet the same load of a shared machine."""
from __future__ import annotations

import os
import statistics
import time
import warnings
from typing import Callable

import torch
import torch.distributed as dist


def join_ranks() -> None:
    """Join the ranks that torchrun started, each on one thread."""
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun --nproc-per-node 2")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


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

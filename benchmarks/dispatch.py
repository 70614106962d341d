"""Overhead of one operator call: this library's DTensor and PyTorch's, above the plain operator.

    python benchmarks/dispatch.py

World size 1, forward only, 16x16 float32 tensors.  The variants take turns within one process,
and every number is the median over the rounds, in microseconds a call.
"""
from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import tensor as torch_dtensor

import hyper_parallel as hp


def operators() -> dict[str, Callable]:
    """The operators that the numbers in docs/performance.md speak of."""
    return {
        "add": lambda x, w: x + w,
        "mul": lambda x, w: x * w,
        "linear": F.linear,
        "gelu": lambda x, w: F.gelu(x),
        "view": lambda x, w: x.view(4, 4, 16),
        "transpose": lambda x, w: x.transpose(0, 1),
        "sum": lambda x, w: x.sum(),
        "softmax": lambda x, w: F.softmax(x, -1),
        "layer_norm": lambda x, w: F.layer_norm(x, (16,)),
    }


def spread(tensor: torch.Tensor) -> tuple[tuple, tuple, tuple]:
    """Two operands, plain, ours and PyTorch's."""
    other = torch.randn_like(tensor)
    ours = hp.init_device_mesh((1,), ("tp",))
    theirs = torch_dtensor.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    return (
        (tensor, other),
        tuple(hp.DTensor.from_local(t, ours, [hp.Replicate()]) for t in (tensor, other)),
        tuple(torch_dtensor.DTensor.from_local(t, theirs, [torch_dtensor.Replicate()])
              for t in (tensor, other)))


def timed(function: Callable, operands: tuple, calls: int) -> float:
    """Microseconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        function(*operands)
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    """Print a row an operator, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    variants = spread(torch.randn(16, 16))
    print(f"{'operator':<12}{'plain':>8}{'ours':>8}{'torch':>8}{'above plain':>22}{'ratio':>8}")
    ratios = []
    for name, function in operators().items():
        for operands in variants:
            timed(function, operands, 100)
        samples = [[timed(function, operands, arguments.calls) for operands in variants]
                   for _ in range(arguments.rounds)]
        plain, ours, theirs = (statistics.median(column) for column in zip(*samples))
        ratio = statistics.median((b - a) / (c - a) for a, b, c in samples)
        ratios.append(ratio)
        above = f"{ours - plain:.2f} / {theirs - plain:.2f}"
        print(f"{name:<12}{plain:>8.2f}{ours:>8.2f}{theirs:>8.2f}{above:>22}{ratio:>8.3f}")
    print(f"median ratio {statistics.median(ratios):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Overhead of one operator call: this library's DTensor and PyTorch's, above the plain operator.

    python benchmarks/dispatch.py

16x16 float32 tensors; forward alone, then forward and backward.  World size 1 has the operands
replicated; world size 8, on a fake process group that sends nothing, has the rows of the input
sharded.  A sample is a chain, each call on the result of the one before as in a model, with one
backward pass at its end.  The variants take turns within one process; every number is the median
over the rounds, in microseconds a call, and a ratio the median of the rounds' ratios.  The floor
is a class whose ``__torch_function__`` does nothing but run the operator.
"""
from __future__ import annotations

import argparse
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

SIZE = 16
CALLS = 20
GOALS = {"forward": 0.4, "forward and backward": 0.15}


def operators() -> dict[str, Callable]:
    """The operators that the numbers in docs/performance.md speak of; each suits its result."""
    return {
        "add": lambda x, w: x + w,
        "mul": lambda x, w: x * w,
        "linear": F.linear,
        "gelu": lambda x, w: F.gelu(x),
        "view": lambda x, w: x.view(1, -1, SIZE),
        "transpose": lambda x, w: x.transpose(0, 1),
        "sum": lambda x, w: x.sum(1, keepdim=True),
        "softmax": lambda x, w: F.softmax(x, -1),
        "layer_norm": lambda x, w: F.layer_norm(x, (SIZE,)),
    }


class Floor(torch.Tensor):
    """What any such class costs: the call of ``__torch_function__``, and to run the operator."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (),
                           kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            result.__class__ = cls
        return result


class Sample:
    """One variant of one operator, ready to be timed.

    Args:
        function: the operator.
        x: the input of the first call.
        w: the second operand of every call.
    """

    def __init__(self, function: Callable, x: Any, w: Any) -> None:
        self._function = function
        self._leaves = x, w
        # The gradient that arrives lies as the result does.
        self._grad = torch.ones_like(self._chain()).detach()

    def _chain(self) -> Any:
        function = self._function
        x, w = self._leaves
        for _ in range(CALLS):
            x = function(x, w)
        return x

    def forward(self) -> float:
        """Microseconds a call, without a graph."""
        with torch.no_grad():
            start = time.perf_counter()
            self._chain()
            return (time.perf_counter() - start) / CALLS * 1e6

    def forward_and_backward(self) -> float:
        """Microseconds a call, with its share of the backward pass."""
        for leaf in self._leaves:
            leaf.grad = None
        start = time.perf_counter()
        self._chain().backward(self._grad)
        return (time.perf_counter() - start) / CALLS * 1e6


def variants(name: str, function: Callable, world: int) -> list[Sample]:
    """Plain on a rank's part, the floor, ours and PyTorch's."""
    ours = hp.init_device_mesh((world,), ("tp",))
    theirs = torch_dtensor.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    operands = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE) / SIZE ** 0.5
    sharded = (world > 1, world > 1 and name != "linear")
    parts = [whole.chunk(world)[0].clone() if cut else whole
             for whole, cut in zip(operands, sharded)]

    def spread(library: Any, mesh: Any) -> list[Any]:
        return [library.DTensor.from_local(
            part, mesh, [library.Shard(0) if cut else library.Replicate()])
                for part, cut in zip(parts, sharded)]

    return [Sample(function, *(leaf.detach().clone().requires_grad_() for leaf in leaves))
            for leaves in (parts, [part.as_subclass(Floor) for part in parts],
                           spread(hp, ours), spread(torch_dtensor, theirs))]


def measure(world: int, rounds: int) -> None:
    """Print a row an operator, and the medians."""
    print(f"\nworld size {world}; above the plain operator: floor / ours / torch, ratio")
    print(f"{'operator':<12}" + "".join(f"{title:>40}" for title in GOALS))
    ratios: dict[str, list[float]] = {title: [] for title in GOALS}
    for name, function in operators().items():
        samples = variants(name, function, world)
        columns = []
        for title, timed in zip(GOALS, (Sample.forward, Sample.forward_and_backward)):
            for _ in range(5):
                for sample in samples:
                    timed(sample)
            times = [[timed(sample) for sample in samples] for _ in range(rounds)]
            above = [statistics.median(row[column] - row[0] for row in times)
                     for column in range(1, 4)]
            ratio = statistics.median((row[2] - row[0]) / (row[3] - row[0]) for row in times)
            ratios[title].append(ratio)
            columns.append(" / ".join(f"{time:6.2f}" for time in above) + f"{ratio:9.3f}")
        print(f"{name:<12}" + "".join(f"{column:>40}" for column in columns), flush=True)
    print("median ratio " + ", ".join(
        f"{title} {statistics.median(values):.3f} (goal {GOALS[title]})"
        for title, values in ratios.items()))


def main() -> None:
    """Measure at both world sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 8])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for world in arguments.worlds:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        measure(world, arguments.rounds)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

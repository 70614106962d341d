"""One training step of the two-rank tensor-parallel MLP: hand-written, ours and PyTorch's.

    torchrun --nproc-per-node 2 benchmarks/mlp_step.py

The hand-written step is Megatron's: two autograd functions, one all-reduce in the forward pass
and one in the backward pass, on plain tensors.  All three variants issue the same collectives,
and take turns step by step in one process.  The numbers are medians over the steps; the ratio is
the median of the ratios of neighbouring steps.
"""
from __future__ import annotations

import argparse
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.tensor import parallel as torch_parallel
from turns import join_ranks, medians, take_turns

import hyper_parallel as hp
from hyper_parallel.demo import TwoLayerMLP

BATCH = 4


class CopyToRanks(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' gradients."""
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class SumOverRanks(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' inputs."""
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The gradient."""
        return grad


class HandWritten(nn.Module):
    """The same, as one writes it by hand: each rank has its part of the weights."""

    def __init__(self, whole: TwoLayerMLP, rank: int, size: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(whole.fc1.weight.detach().chunk(size, 0)[rank].clone())
        self.w2 = nn.Parameter(whole.fc2.weight.detach().chunk(size, 1)[rank].contiguous().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole result on every rank."""
        hidden = F.gelu(F.linear(CopyToRanks.apply(x), self.w1))
        return SumOverRanks.apply(F.linear(hidden, self.w2))


def make_variants(hidden: int) -> dict[str, nn.Module]:
    """The three models, from the same weights."""
    torch.manual_seed(0)
    whole = TwoLayerMLP(hidden, 2 * hidden)
    size = dist.get_world_size()
    ours, theirs = (TwoLayerMLP(hidden, 2 * hidden) for _ in range(2))
    ours.load_state_dict(whole.state_dict())
    theirs.load_state_dict(whole.state_dict())
    hp.parallelize_module(ours, hp.init_device_mesh((size,), ("tp",)), {
        "fc1": hp.ColwiseParallel(), "fc2": hp.RowwiseParallel()})
    torch_parallel.parallelize_module(theirs, torch_init_device_mesh("cpu", (size,)), {
        "fc1": torch_parallel.ColwiseParallel(), "fc2": torch_parallel.RowwiseParallel()})
    return {"hand-written": HandWritten(whole, dist.get_rank(), size), "ours": ours,
            "torch": theirs}


def make_step(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A training step of ``model`` with plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def measure(hidden: int, steps: int) -> None:
    """Print the medians for one hidden size."""
    x = torch.randn(BATCH, hidden, requires_grad=True)
    dist.broadcast(x.data, 0)
    runs = {name: make_step(model, x) for name, model in make_variants(hidden).items()}
    losses = {name: [float(run().detach()) for _ in range(20)] for name, run in runs.items()}
    for name, values in losses.items():
        if not torch.allclose(torch.tensor(values), torch.tensor(losses["hand-written"])):
            raise SystemExit(f"{name} computes something else: {values[-1]}")
    times = medians(take_turns(runs, steps), "hand-written")
    if dist.get_rank() == 0:
        for name, (time, ratio) in times.items():
            print(f"hidden {hidden:>5}  {name:<14}{time:>10.0f} us{ratio:>8.2f}x", flush=True)


def main() -> None:
    """Measure a small and a larger model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--hidden", type=int, nargs="*", default=[16, 256, 1024])
    arguments = parser.parse_args()
    join_ranks()
    for hidden in arguments.hidden:
        measure(hidden, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What CommDebugMode costs a training step, ours and PyTorch's, each against its own untraced step.

    torchrun --nproc-per-node 2 benchmarks/tracing.py

Two models on two ranks, tensor-parallel: the two-layer MLP, and a transformer of four layers
(hidden 64, causal attention).  The variants take turns step by step in one process.  A line has
the median time of the step alone and of the step with the mode's entry and exit, and the medians
of the ratios to the neighbouring untraced step of the same library.
"""
from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

import hyper_parallel as hp
from hyper_parallel.demo import TwoLayerMLP

BATCH, LENGTH, HIDDEN, HEADS, LAYERS = 4, 16, 64, 4, 4
MLP_HIDDEN = 16


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, hidden) in and out."""
        y = self.norm1(x)
        q, k, v = (layer(y).view(BATCH, LENGTH, -1, HIDDEN // HEADS).transpose(1, 2)
                   for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Variant(NamedTuple):
    """A step and how it is traced.

    Attributes:
        step: one training step.
        mode: makes the context that it runs in.
        base: name of the variant that it is compared with.
    """

    step: Callable[[], torch.Tensor]
    mode: Callable[[], AbstractContextManager]
    base: str


def make_mlp() -> tuple[nn.Module, dict[str, str], tuple[int, ...]]:
    """The MLP, how its layers are split, and the shape of its input."""
    return (TwoLayerMLP(MLP_HIDDEN, 2 * MLP_HIDDEN), {"fc1": "columns", "fc2": "rows"},
            (BATCH, MLP_HIDDEN))


def make_transformer() -> tuple[nn.Module, dict[str, str], tuple[int, ...]]:
    """The transformer, how its layers are split, and the shape of its input."""
    kinds = dict.fromkeys(("q", "k", "v", "fc1"), "columns") | dict.fromkeys(("o", "fc2"), "rows")
    return (nn.Sequential(*(Block() for _ in range(LAYERS))),
            {f"{layer}.{name}": kind for layer in range(LAYERS) for name, kind in kinds.items()},
            (BATCH, LENGTH, HIDDEN))


MODELS = {"mlp": make_mlp, "transformer": make_transformer}


def make_step(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A training step with plain SGD, which gives the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def spread(ours: nn.Module, theirs: nn.Module, plan: dict[str, str]
           ) -> tuple[nn.Module, nn.Module]:
    """Two models with the first one's weights, each spread by one of the libraries."""
    size = dist.get_world_size()
    theirs.load_state_dict(ours.state_dict())
    styles = {"columns": "ColwiseParallel", "rows": "RowwiseParallel"}
    hp.parallelize_module(ours, hp.init_device_mesh((size,), ("tp",)), {
        path: getattr(hp, styles[kind])() for path, kind in plan.items()})
    torch_parallel.parallelize_module(theirs, torch_init_device_mesh("cpu", (size,)), {
        path: getattr(torch_parallel, styles[kind])() for path, kind in plan.items()})
    return ours, theirs


def make_variants(name: str) -> dict[str, Variant]:
    """All variants of one model, from the same weights."""
    torch.manual_seed(0)
    first, plan, shape = MODELS[name]()
    ours, theirs = spread(first, MODELS[name]()[0], plan)
    x = torch.randn(shape)
    our_step, their_step = make_step(ours, x), make_step(theirs, x)
    return {
        "ours": Variant(our_step, nullcontext, "ours"),
        "ours, CommDebugMode()": Variant(our_step, hp.CommDebugMode, "ours"),
        "ours, CommDebugMode(module)": Variant(
            our_step, lambda: hp.CommDebugMode(module=ours), "ours"),
        "torch": Variant(their_step, nullcontext, "torch"),
        "torch, CommDebugMode()": Variant(their_step, TorchCommDebugMode, "torch"),
    }


def sample(variant: Variant) -> tuple[float, float]:
    """Microseconds of one step, without and with the entry and exit of its mode."""
    dist.barrier()
    mode = variant.mode()
    before = time.perf_counter()
    with mode:
        start = time.perf_counter()
        variant.step()
        end = time.perf_counter()
    return (end - start) * 1e6, (time.perf_counter() - before) * 1e6


def measure(name: str, steps: int) -> None:
    """Print the medians for one model."""
    variants = make_variants(name)
    ours, theirs = (variants[base].step() for base in ("ours", "torch"))
    if not torch.allclose(ours, theirs):
        raise SystemExit(f"the libraries compute different losses: {ours} and {theirs}")
    for variant in variants.values():
        for _ in range(10):
            sample(variant)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(steps):
        for label, variant in variants.items():
            samples[label].append(sample(variant))
    if dist.get_rank() == 0:
        for label, values in samples.items():
            columns = []
            for column in range(2):
                base = [value[column] for value in samples[variants[label].base]]
                mine = [value[column] for value in values]
                ratio = statistics.median(a / b for a, b in zip(mine, base))
                columns.append(f"{statistics.median(mine):>8.0f} us{ratio:>6.2f}x")
            print(f"{name:<12} {label:<28} step {columns[0]}   with entry {columns[1]}",
                  flush=True)


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        raise SystemExit("this needs two ranks: torchrun --nproc-per-node 2 benchmarks/tracing.py")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for name in arguments.models:
        measure(name, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

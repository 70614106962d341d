"""One training step of a tensor-parallel transformer: hand-written, ours and PyTorch's.

    torchrun --nproc-per-node 2 benchmarks/transformer_step.py
    python benchmarks/transformer_step.py

Four layers, hidden 64, causal attention, SGD.  The hand-written model is Megatron's: per layer two
all-reduces forward and two backward, on plain tensors; all variants have to issue as many.  The
second command takes the network out: one process is rank 0 of a fake group that sends nothing,
so that only the work of the libraries is left.  The variants take turns step by step; numbers are
medians, a ratio is the median of the ratios to the neighbouring hand-written step.
"""
from __future__ import annotations

import argparse
import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlp_step import CopyToRanks, SumOverRanks
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracing import BATCH, HEADS, HIDDEN, LENGTH, Block, make_step, make_transformer, spread
from turns import medians, take_turns

import hyper_parallel as hp


class HandWrittenBlock(nn.Module):
    """A rank's part of a block: some heads of the attention, some units of the MLP."""

    def __init__(self, whole: Block, rank: int, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        for name in ("norm1", "norm2"):
            getattr(self, name).load_state_dict(getattr(whole, name).state_dict())
        self.columns = nn.ParameterDict()
        self.rows = nn.ParameterDict()
        for name in ("q", "k", "v", "fc1"):
            layer = getattr(whole, name)
            self.columns[name] = layer.weight.detach().chunk(size, 0)[rank].clone()
            self.columns[f"{name}_bias"] = layer.bias.detach().chunk(size, 0)[rank].clone()
        for name in ("o", "fc2"):
            layer = getattr(whole, name)
            self.rows[name] = layer.weight.detach().chunk(size, 1)[rank].clone()
            self.rows[f"{name}_bias"] = layer.bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, hidden) in and out."""
        columns, rows = self.columns, self.rows
        y = CopyToRanks.apply(self.norm1(x))
        q, k, v = (F.linear(y, columns[name], columns[f"{name}_bias"])
                   .view(BATCH, LENGTH, -1, HIDDEN // HEADS).transpose(1, 2) for name in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + SumOverRanks.apply(F.linear(mixed, rows["o"])) + rows["o_bias"]
        y = CopyToRanks.apply(self.norm2(x))
        y = F.gelu(F.linear(y, columns["fc1"], columns["fc1_bias"]))
        return x + SumOverRanks.apply(F.linear(y, rows["fc2"])) + rows["fc2_bias"]


def make_models() -> dict[str, nn.Module]:
    """The three models, from the same weights."""
    torch.manual_seed(0)
    whole, plan, _ = make_transformer()
    hand = nn.Sequential(*(HandWrittenBlock(block, dist.get_rank(), dist.get_world_size())
                           for block in whole))
    ours, theirs = spread(whole, make_transformer()[0], plan)
    return {"hand-written": hand, "ours": ours, "torch": theirs}


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    models = make_models()
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    dist.broadcast(x, 0)
    steps = {name: make_step(model, x) for name, model in models.items()}
    losses = torch.stack([torch.stack([step() for _ in range(10)]) for step in steps.values()])
    if "RANK" in os.environ and not torch.allclose(losses, losses[:1].expand_as(losses), rtol=1e-4):
        raise SystemExit(f"the models compute different losses: {losses}")
    times = medians(take_turns(steps, arguments.steps), "hand-written")
    for name, (time, ratio) in times.items():
        count = collectives(name, steps)
        if dist.get_rank() == 0:
            print(f"{name:<14}{time:>10.0f} us{ratio:>8.2f}x  {count} collectives", flush=True)
    dist.destroy_process_group()


def collectives(name: str, steps: dict) -> int:
    """How many collectives one step issues."""
    mode = hp.CommDebugMode(trace_native=True) if name != "torch" else TorchCommDebugMode()
    with mode:
        steps[name]()
    return mode.get_total_counts()


if __name__ == "__main__":
    main()

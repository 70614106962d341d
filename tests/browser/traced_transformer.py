"""A small transformer's training step, traced on four real ranks with the axes "dp" and "tp".

The browser's tests read this trace, and the picture in the documentation is of it:

    torchrun --nproc-per-node 4 tests/browser/traced_transformer.py OUT
    python -m tests.browser.picture OUT.html docs/images/comm_debug_page.png
"""
import sys

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel, CommDebugMode, DTensor, RowwiseParallel, get_platform, init_device_mesh,
    parallelize_module)
from hyper_parallel.demo import average_gradients

HIDDEN, HEADS, LENGTH, BATCH, LAYERS = 64, 4, 32, 4, 4


class Attention(nn.Module):
    """Causal attention with a projection for each of query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.value = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, length, hidden)`` to the same."""
        heads = [layer(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
                 for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, length, hidden)`` to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, length, hidden)`` to the same."""
        for block in self.blocks:
            x = block(x)
        return x


def write_trace(out: str) -> None:
    """What each rank does in its group; rank 0 writes OUT.json and OUT.html."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    plan = {f"blocks.*.{name}": ColwiseParallel()
            for name in ("attention.query", "attention.key", "attention.value", "up")}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("attention.out", "down")}
    model = parallelize_module(Transformer(), mesh["tp"], plan)
    # Their gradients are DTensors, which the average needs; those of the norms are plain.
    split = nn.ParameterList(parameter for parameter in model.parameters()
                             if isinstance(parameter, DTensor))
    parts = torch.randn(2, BATCH, LENGTH, HIDDEN)
    x = parts[mesh.get_coordinate()[0]].requires_grad_()
    for _ in range(2):  # the first step also makes groups and fills the cache of plans
        model.zero_grad()
        with CommDebugMode(module=model) as mode:
            model(x).square().mean().backward()
            with torch.no_grad():
                average_gradients(split, mesh["dp"])
    if mesh.rank == 0:
        mode.generate_json_dump(f"{out}.json", noise_level=3)
        mode.generate_html(f"{out}.html")


def main(out: str) -> None:
    """One rank under torchrun."""
    get_platform().init_process_group()
    write_trace(out)
    get_platform().destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

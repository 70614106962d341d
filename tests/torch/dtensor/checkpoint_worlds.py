"""A model that is saved by one number of ranks and trained on by another.

``write`` and ``go_on`` run on every rank of their world. Both compare with the dense model, which
each rank trains by itself from the same seed.
"""
from math import prod

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states

from hyper_parallel import (
    ColwiseParallel, DeviceMesh, DTensor, Replicate, RowwiseParallel, parallelize_module)

Shape = tuple[int, ...]
PLANS = {
    "mlp": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "other way round": {"0": RowwiseParallel(input_layouts=Replicate()), "2": ColwiseParallel()},
    "half": {"2": ColwiseParallel()},
}
STEPS = 2


def dense(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers of sizes that no number of ranks divides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.LayerNorm(5)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def parallel(mesh: DeviceMesh, plan: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same with its layers split along the mesh's last axis."""
    model, _ = dense(seed)
    parallelize_module(model, mesh[mesh.alias_name[-1]], PLANS[plan])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The losses of some steps."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).pow(2).mul(inputs[:, :5]).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """What a checkpoint of both holds."""
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def put_in(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Give both what ``state_of`` gave."""
    states.set_state_dict(model, optimizer, model_state_dict=state["model"],
                          optim_state_dict=state["optimizer"])


def same_losses(got: list[float], wanted: list[float]) -> None:
    """Equal but for the order of sums."""
    assert torch.allclose(torch.tensor(got), torch.tensor(wanted), rtol=1e-12), (got, wanted)


def mesh_of(shape: Shape) -> DeviceMesh:
    """A mesh of the first ranks of the world."""
    return DeviceMesh(torch.arange(prod(shape)).view(shape), ("dp", "tp")[2 - len(shape):])


def write(path: str, shape: Shape) -> None:
    """Train some steps on a mesh and save."""
    model, optimizer = parallel(mesh_of(shape), "mlp", seed=0)
    same_losses(train(model, optimizer, STEPS), train(*dense(0), STEPS))
    dcp.save(state_of(model, optimizer), checkpoint_id=path)


def go_on(path: str, shape: Shape) -> None:
    """Load into other layouts and into the plain model, and train on."""
    wanted = train(*dense(0), STEPS + 3)[STEPS:]
    for plan in PLANS:
        model, optimizer = parallel(mesh_of(shape), plan, seed=9)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        put_in(model, optimizer, state)
        same_losses(train(model, optimizer, 3), wanted)
        split = [p for p in optimizer.state if isinstance(p, DTensor)]
        assert split and all(optimizer.state[p]["exp_avg"].placements == p.placements
                             for p in split)
    plain = dense(9)
    state = state_of(*plain)
    dcp.load(state, checkpoint_id=path)
    put_in(*plain, state)
    same_losses(train(*plain, 3), wanted)

"""A tensor-parallel MLP, traced: ``python -m hyper_parallel.demo``.

This is a user's program: it stands above the library's layers and uses its public names and
PyTorch. It starts its own ranks, two or four. Two ranks form one "tp" axis. Four ranks form a
("dp", "tp") mesh, on which each row of the mesh has a batch of its own and the gradients are
averaged over "dp".

The model is ``fc2(gelu(fc1(x)))`` with ``fc1`` split by columns and ``fc2`` by rows, in float32
on the CPU. Rank 0 prints what ``CommDebugMode`` saw and writes its JSON.
"""

import argparse
import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.run import main as torchrun

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    get_platform,
    init_device_mesh,
    parallelize_module,
)

HIDDEN, INTERMEDIATE, BATCH = 16, 32, 4
PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


class TwoLayerMLP(nn.Module):
    """``hidden -> intermediate -> hidden`` with a gelu between, without biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, intermediate, bias=False)
        self.fc2 = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, hidden)`` to ``(batch, hidden)``."""
        return self.fc2(F.gelu(self.fc1(x)))


def make_mesh() -> DeviceMesh:
    """All ranks on a "tp" axis of two, with a "dp" axis outside it where there are four."""
    ranks = get_platform().get_world_size()
    if ranks == 2:
        return init_device_mesh((2,), ("tp",))
    return init_device_mesh((ranks // 2, 2), ("dp", "tp"))


def average_gradients(model: nn.Module, axis: DeviceMesh) -> None:
    """Gives every parameter the mean of its gradients over a mesh of one axis.

    Each rank's gradient is a summand of an average, ``Partial("avg")``, and is made whole there.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        mean = DTensor.from_local(gradient.to_local(), axis, [Partial("avg")])
        mean = mean.redistribute(placements=[Replicate()])
        parameter.grad = DTensor.from_local(mean.to_local(), gradient.device_mesh,
                                            gradient.placements)


def trace_forward(model: nn.Module, x: torch.Tensor) -> str:
    """The tables of one forward pass at the three noise levels."""
    with CommDebugMode(module=model) as mode:
        model(x)
    return "\n".join(
        f"\nForward pass, noise_level={level}:\n\n"
        f"{mode.generate_comm_debug_tracing_table(noise_level=level)}" for level in range(3))


def trace_step(model: nn.Module, x: torch.Tensor, mesh: DeviceMesh) -> CommDebugMode:
    """What a forward and a backward pass do, the average over "dp" included."""
    with CommDebugMode(module=model) as mode:
        model(x).square().mean().backward()
        if "dp" in mesh.alias_name:
            average_gradients(model, mesh["dp"])
    return mode


def run_rank(json: str) -> None:
    """What each rank does."""
    platform = get_platform()
    platform.init_process_group()
    mesh = make_mesh()
    torch.manual_seed(0)
    model = parallelize_module(TwoLayerMLP(HIDDEN, INTERMEDIATE), mesh["tp"], PLAN)
    # The ranks of a "tp" group take the same batch. As in the middle of a network, whatever
    # computed it wants its gradient.
    batches = torch.randn(mesh.size() // 2, BATCH, HIDDEN)
    x = batches[mesh.rank // 2].requires_grad_()
    tables = trace_forward(model, x)
    step = trace_step(model, x, mesh)
    if mesh.rank == 0:
        print(f"Mesh: {mesh}")
        print(tables)
        print("\nForward and backward pass, noise_level=3:\n")
        print(step.generate_comm_debug_tracing_table(noise_level=3))
        print(f"\nCounts: {step.get_comm_counts()}, in total {step.get_total_counts()}")
        print("\nSharding:")
        for name, placement in step.get_sharding_info().items():
            print(f"  {name}: {placement}")
        step.generate_json_dump(json)
        print(f"\nThe whole trace as JSON: {json}")
    platform.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs as one rank under torchrun, and starts the ranks with torchrun otherwise."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.demo", description=__doc__)
    parser.add_argument("--nproc", type=int, choices=(2, 4), default=2, help="number of ranks")
    parser.add_argument("--json", default="comm_mode_log.json", help="where to write the trace")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        run_rank(options.json)
        return
    try:
        with open(options.json, "a", encoding="utf-8"):
            pass  # a path that cannot be written is better known before the ranks start
    except OSError as error:
        parser.error(f"the trace cannot be written to {options.json!r}: {error.strerror}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun(["--standalone", f"--nproc-per-node={options.nproc}", "-m", "hyper_parallel.demo",
              f"--json={options.json}"])


if __name__ == "__main__":
    main()

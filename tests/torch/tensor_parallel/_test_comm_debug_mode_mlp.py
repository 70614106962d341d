"""What two ranks see of the specification's MLP: fc1 column-wise, gelu, fc2 row-wise."""
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module)
from hyper_parallel.demo import TwoLayerMLP
from tests.traced_mlp import BATCH, HIDDEN, INTERMEDIATE, TracedMLP

NPROC = 2


def make_model() -> nn.Module:
    """The model on the two ranks, with equal weights wherever it is made."""
    torch.manual_seed(0)
    mesh = init_device_mesh((2,), ("tp",))
    return parallelize_module(TwoLayerMLP(HIDDEN, INTERMEDIATE), mesh,
                              {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})


def make_input() -> torch.Tensor:
    """The same batch on each rank."""
    return torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))


MLP = TracedMLP(make_model, make_input, torch.equal, "torch.float32")


def test_comm_debug_mode_captures_collectives() -> None:
    """The forward pass has one all-reduce, and the mode changes no bit of the result."""
    MLP.captures_collectives()


def test_comm_debug_mode_debug_string() -> None:
    """The tables are the specification's, to the character."""
    MLP.debug_string()


def test_comm_debug_mode_tracing_table() -> None:
    """What a level shows, the next one shows too."""
    MLP.tracing_table()


def test_comm_debug_mode_with_module_tracker() -> None:
    """One mode with a module gives all three tables; layouts and JSON are right."""
    MLP.with_module_tracker()


def test_comm_debug_mode_restores_platform() -> None:
    """Each of the platform's methods is the original object again."""
    MLP.restores_platform()


def test_comm_debug_mode_multiple_forwards() -> None:
    """Three forward passes count three times one."""
    MLP.multiple_forwards()

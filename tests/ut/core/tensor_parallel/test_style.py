"""Styles as values: defaults, what they refuse, and styles that users write."""
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard as TorchShard

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel import ParallelStyle
from hyper_parallel.core.tensor_parallel.style import ModulePlan


@pytest.fixture(name="mesh")
def make_mesh() -> DeviceMesh:
    """This process alone."""
    return init_device_mesh((1,), ("tp",))


@pytest.mark.parametrize("style, layer, placements", [
    (ColwiseParallel, nn.Linear(2, 3), {"weight": Shard(0), "bias": Shard(0)}),
    (ColwiseParallel, nn.Linear(2, 3, bias=False), {"weight": Shard(0)}),
    (ColwiseParallel, nn.Embedding(2, 3), {"weight": Shard(1)}),
    (RowwiseParallel, nn.Linear(2, 3), {"weight": Shard(1), "bias": Replicate()}),
    (RowwiseParallel, nn.Linear(2, 3, bias=False), {"weight": Shard(1)}),
    (RowwiseParallel, nn.Embedding(2, 3), {"weight": Shard(0)}),
])
def test_placements(mesh: DeviceMesh, style: Any, layer: nn.Module, placements: dict) -> None:
    """Those of PyTorch's styles; asking changes nothing."""
    assert style().plan_module("layer", layer, mesh).parameters == placements
    assert not any(isinstance(parameter, DTensor) for parameter in layer.parameters())
    parallelize_module(layer, mesh, style())
    assert {name: parameter.placements for name, parameter in layer.named_parameters()} == {
        name: (placement,) for name, placement in placements.items()}


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_arguments(style: Any) -> None:
    """Keywords only, one placement each, as frozen values."""
    assert style(output_layouts=Shard(1)) == style(output_layouts=Shard(1)) != style()
    assert len({style(), style(), style(use_local_output=True)}) == 2
    assert repr(style(input_layouts=Partial())) == (
        f"{style.__name__}(input_layouts=Partial(sum), output_layouts=None, use_local_output=None)")
    assert copy.deepcopy(style()) == pickle.loads(pickle.dumps(style())) == style()
    with pytest.raises(TypeError):
        style(Shard(1))
    for name in ("input_layouts", "output_layouts"):
        for value in (Shard, "Shard(0)", (Shard(0),), 0, TorchShard(0)):
            with pytest.raises(TypeError, match=f"{name} of {style.__name__} is one placement of "
                                                "hyper_parallel, such as"):
                style(**{name: value})
    for value in ("yes", 1, 0, 2.0):
        with pytest.raises(TypeError, match=f"use_local_output of {style.__name__} is True, False "
                                            "or None"):
            style(use_local_output=value)


def test_a_style_of_the_users(mesh: DeviceMesh) -> None:
    """It says what to do; parallelize_module does it, and leaves other parameters alone."""
    class HalfOfTwo(ParallelStyle):
        """Splits one of two parameters, and doubles what comes out."""

        def plan_module(self, path: str, module: Any, device_mesh: DeviceMesh) -> ModulePlan:
            """See the base class."""
            return ModulePlan({"weight": Shard(0)}, None, lambda module, args, output: output * 2)

    layer = nn.LayerNorm(4)
    x = torch.arange(8.0).reshape(2, 4)
    expected = layer(x) * 2
    parallelize_module(layer, mesh, HalfOfTwo())
    assert layer.weight.placements == (Shard(0),) and type(layer.bias) is nn.Parameter
    assert torch.equal(layer(x).full_tensor(), expected)


def test_a_layer_that_returns_something_else(mesh: DeviceMesh) -> None:
    """The forward of a subclass may give what no style can lay out."""
    class Pair(nn.Linear):
        """Returns two tensors."""

        def forward(self, input: torch.Tensor) -> Any:
            return super().forward(input), input

    layer = parallelize_module(nn.Sequential(Pair(2, 2)), mesh, {"0": ColwiseParallel()})
    with pytest.raises(TypeError, match="the forward of ColwiseParallel module '0' must give a "
                                        "DTensor, but gave a tuple"):
        layer(torch.ones(1, 2))


def test_a_style_must_be_able_to_plan() -> None:
    """The base class is abstract."""
    assert ParallelStyle.__abstractmethods__ == {"plan_module"}

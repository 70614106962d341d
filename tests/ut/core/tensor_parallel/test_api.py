"""parallelize_module: which modules a plan names, and what it refuses before any change."""
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import parallel as torch_parallel

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.platform.torch.modules import _Boundary

COLWISE, ROWWISE = ColwiseParallel(), RowwiseParallel()


class Layer(nn.Module):
    """Two linear layers and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Model(nn.Module):
    """An embedding, two blocks and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture(name="mesh")
def make_mesh() -> DeviceMesh:
    """This process alone."""
    return init_device_mesh((1,), ("tp",))


def spread(model: nn.Module) -> list[str]:
    """The names of the parameters that are DTensors."""
    return [name for name, parameter in model.named_parameters(remove_duplicate=False)
            if isinstance(parameter, DTensor)]


def check_refused(error: type[Exception], message: str, model: Any, mesh: Any, plan: Any,
                  **options: Any) -> None:
    """The call raises, and the model is as it was."""
    before = list(model.named_parameters()) if isinstance(model, nn.Module) else []
    with pytest.raises(error) as caught:
        parallelize_module(model, mesh, plan, **options)
    assert message in str(caught.value)
    for name, parameter in before:
        assert model.get_parameter(name) is parameter
        assert type(parameter) is nn.Parameter
    for module in model.modules() if isinstance(model, nn.Module) else []:
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not isinstance(module, _Boundary)


@pytest.mark.parametrize("plan, names", [
    ({"fc1": COLWISE}, ["fc1.weight", "fc1.bias"]),
    ({"fc?": COLWISE}, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]),
    ({"fc[2]": COLWISE}, ["fc2.weight", "fc2.bias"]),
    ({"f*": ROWWISE}, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]),
    ({"fc2": ROWWISE, "fc1": COLWISE}, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]),
    ({}, []),
])
def test_paths_of_one_component(mesh: DeviceMesh, plan: dict, names: list[str]) -> None:
    """Wildcards are those of fnmatch."""
    model = Layer()
    assert parallelize_module(model, mesh, plan) is model
    assert spread(model) == names


def test_a_wildcard_stays_within_its_component(mesh: DeviceMesh) -> None:
    """One star is one component, at any place."""
    model = Model()
    parallelize_module(model, mesh, {"layers.*.fc1": COLWISE, "*.1.fc2": ROWWISE})
    assert spread(model) == ["layers.0.fc1.weight", "layers.0.fc1.bias", "layers.1.fc1.weight",
                             "layers.1.fc1.bias", "layers.1.fc2.weight", "layers.1.fc2.bias"]
    check_refused(ValueError, "no module has the path '*.fc1'", Model(), mesh, {"*.fc1": COLWISE})


def test_a_style_alone_is_for_the_module_itself(mesh: DeviceMesh) -> None:
    """Likewise the empty path, which no wildcard means."""
    for plan in (COLWISE, {"": COLWISE}):
        assert spread(parallelize_module(nn.Linear(2, 3), mesh, plan)) == ["weight", "bias"]
    check_refused(ValueError, "no module has the path '*'; the module has no children, and is "
                              "itself named ''", nn.Linear(2, 3), mesh, {"*": COLWISE})


def test_the_name_of_the_plan_in_pytorch(mesh: DeviceMesh) -> None:
    """A call that is written for PyTorch works with its keywords."""
    model = parallelize_module(module=Layer(), device_mesh=mesh, parallelize_plan={"fc1": COLWISE})
    assert spread(model) == ["fc1.weight", "fc1.bias"]
    assert spread(parallelize_module(Layer(), mesh, plan={"fc2": ROWWISE})) == [
        "fc2.weight", "fc2.bias"]


def test_shared_parameters_stay_shared(mesh: DeviceMesh) -> None:
    """Both places hold one new parameter, and its placement suits both styles."""
    model = parallelize_module(Model(), mesh, {"embed": ROWWISE, "head": COLWISE})
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.placements == (Shard(0),)
    assert spread(model) == ["embed.weight", "head.weight"]
    assert isinstance(model.head, _Boundary) and isinstance(model.embed, _Boundary)


@pytest.mark.parametrize("error, message, plan", [
    (ValueError, "no module has the path 'fc3'; did you mean 'fc2' or 'fc1'?", {"fc3": COLWISE}),
    (ValueError, "no module has the path 'qkv'; the paths are 'fc1', 'act', 'fc2'.",
     {"qkv": COLWISE}),
    (ValueError, "no module has the path 'fc1.weight'; did you mean 'fc1'",
     {"fc1.weight": COLWISE}),
    (ValueError, "no module has the path 'fc9'", {"fc1": COLWISE, "fc9": ROWWISE}),
    (ValueError, "two entries of the plan, 'fc1' and 'fc*', name the same module 'fc1'",
     {"fc1": COLWISE, "fc*": COLWISE}),
    (TypeError, "ColwiseParallel knows Linear and Embedding layers, but 'act' is a GELU",
     {"fc1": COLWISE, "*t": COLWISE}),
    (TypeError, "ColwiseParallel knows Linear and Embedding layers, but '' is a Layer", COLWISE),
    (TypeError, "a plan names modules by path, but has the key 1.", {1: COLWISE}),
    (TypeError, "for 'fc1' it has <class 'hyper_parallel.core.tensor_parallel.style."
                "ColwiseParallel'>; write ColwiseParallel()", {"fc1": ColwiseParallel}),
    (TypeError, "a plan holds styles of hyper_parallel, such as ColwiseParallel(), but for 'fc1' "
                "it has 'colwise'", {"fc1": "colwise"}),
    (TypeError, "a plan holds styles of hyper_parallel", [COLWISE]),
    (TypeError, "a plan holds styles of hyper_parallel", torch_parallel.ColwiseParallel()),
    (TypeError, "needs one plan, as plan or under PyTorch's name parallelize_plan, but got None "
                "and None", None),
])
def test_bad_plans(mesh: DeviceMesh, error: type[Exception], message: str, plan: Any) -> None:
    """Each is refused, though the entries before the bad one are good."""
    check_refused(error, message, Layer(), mesh, plan)


def test_near_names_of_a_deep_model(mesh: DeviceMesh) -> None:
    """Whole paths are compared, and a long list is cut."""
    check_refused(ValueError, "did you mean 'layers.1.fc1' or 'layers.0.fc1'", Model(), mesh,
                  {"layer.*.fc1": COLWISE})
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    check_refused(ValueError, "the paths are '0', '1', '2', '3', '4', '5', '6', '7', ....", many,
                  mesh, {"mlp": COLWISE})


def test_bad_arguments(mesh: DeviceMesh) -> None:
    """No module, no mesh, a mesh of two axes, two plans, no such source."""
    plan = {"fc1": COLWISE}
    check_refused(TypeError, "takes a module, but got a Tensor", torch.ones(2), mesh, COLWISE)
    check_refused(TypeError, "needs a DeviceMesh of hyper_parallel, but got None", Layer(), None,
                  plan)
    both = init_device_mesh((1, 1), ("dp", "tp"))
    check_refused(ValueError, "the mesh has the axes ('dp', 'tp'); pass one, as in mesh['tp']",
                  Layer(), both, plan)
    assert spread(parallelize_module(Layer(), both["tp"], plan)) == ["fc1.weight", "fc1.bias"]
    check_refused(TypeError, "needs one plan", Layer(), mesh, plan, parallelize_plan=plan)
    for source in (1, -1):
        check_refused(ValueError, f"0 to 0, or None, but got {source}", Layer(), mesh, plan,
                      src_data_rank=source)


def test_a_rank_outside_of_the_mesh(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    """It has no part in the model."""
    monkeypatch.setattr(DeviceMesh, "get_coordinate", lambda self: None)
    check_refused(ValueError, "guard the call with `if mesh.get_coordinate() is not None`",
                  Layer(), mesh, {"fc1": COLWISE})


def test_parallel_already(mesh: DeviceMesh) -> None:
    """The second call says so; another part of the model may still follow."""
    model = parallelize_module(Layer(), mesh, {"fc1": COLWISE})
    kept = model.fc1.weight
    for plan in ({"fc1": COLWISE}, {"fc2": ROWWISE, "fc1": ROWWISE}):
        with pytest.raises(RuntimeError, match=r"'fc1' is parallelized already: its weight is "
                                               r"spread as Layout\(tp=Shard\(dim=0\)\)"):
            parallelize_module(model, mesh, plan)
    assert model.fc1.weight is kept and type(model.fc1).__mro__.count(_Boundary) == 1
    assert type(model.fc2.weight) is nn.Parameter
    parallelize_module(model, mesh, {"fc2": ROWWISE})
    tied = parallelize_module(Model(), mesh, {"embed": ROWWISE})
    with pytest.raises(RuntimeError, match="name each module, and all that share a parameter"):
        parallelize_module(tied, mesh, {"head": COLWISE})


def test_a_shared_parameter_in_two_ways(mesh: DeviceMesh) -> None:
    """Rows for the one and columns for the other is no layout."""
    check_refused(ValueError, "'embed.weight' and 'head.weight' are one shared parameter, but the "
                              "plan wants Shard(dim=0) for the one and Shard(dim=1) for the other",
                  Model(), mesh, {"head": ROWWISE, "embed": ROWWISE})
    check_refused(ValueError, "two entries of the plan, 'a' and 'b', name the same module 'b'",
                  nn.ModuleDict({"a": (shared := nn.Linear(2, 2)), "b": shared}), mesh,
                  {"a": COLWISE, "b": COLWISE})


def test_layers_whose_weight_is_not_their_own(mesh: DeviceMesh) -> None:
    """A weight that is computed, and one more parameter."""
    computed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    check_refused(TypeError, "'0', a ParametrizedLinear, has bias of its own", computed, mesh,
                  {"0": COLWISE})
    more = nn.Sequential(nn.Linear(3, 2))
    more[0].scale = nn.Parameter(torch.ones(1))
    check_refused(TypeError, "splits the parameters weight, bias of a linear layer, but '0', a "
                             "Linear, has weight, bias, scale of its own", more, mesh,
                  {"0": ROWWISE})


def test_layers_that_cannot_be_split(mesh: DeviceMesh) -> None:
    """Sizes that are not known yet, and lookups that need whole rows or the whole batch."""
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="'0', a LazyLinear, cannot be split: its sizes are not "
                                         "known before its first forward; run it once before"):
        parallelize_module(lazy, mesh, {"0": COLWISE})
    lazy(torch.ones(1, 3))
    assert spread(parallelize_module(lazy, mesh, {"0": COLWISE})) == ["0.weight", "0.bias"]
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        for style in (COLWISE, ROWWISE):
            check_refused(ValueError, f"cannot be split: it was made with {next(iter(option))}, "
                                      "which looks at whole rows or whole batches",
                          nn.Embedding(4, 2, **option), mesh, style)


def test_one_process_trains(mesh: DeviceMesh) -> None:
    """On a mesh of one rank, without any launcher, the results are bit-equal."""
    torch.manual_seed(0)
    dense = Model()
    model = parallelize_module(copy.deepcopy(dense), mesh, {
        "embed": ROWWISE, "layers.*.fc1": COLWISE, "layers.*.fc2": ROWWISE,
        "head": ColwiseParallel(output_layouts=Replicate())})
    ids = torch.tensor([[0, 1, 4], [4, 2, 2]])
    for twin in (model, dense):
        twin(ids).square().sum().backward()
        torch.optim.AdamW(twin.parameters(), lr=0.1).step()
    assert torch.equal(model(ids), dense(ids))
    for parameter, expected in zip(model.parameters(), dense.parameters()):
        assert torch.equal(parameter.full_tensor(), expected)


def test_a_forward_of_its_own_is_kept(mesh: DeviceMesh) -> None:
    """A module whose forward was replaced on the instance keeps that one, between the layouts."""
    model = Layer()
    native, calls = model.fc1.forward, []

    def forward(x):
        calls.append(type(x).__name__)
        return native(x)

    model.fc1.forward = forward
    parallelize_module(model, mesh, {"fc1": COLWISE})
    model(torch.ones(2, 4))
    assert calls == ["DTensor"]

"""What else may happen to a parallel module, on two ranks."""
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.platform.torch.modules import _Boundary
from tests.torch.tensor_parallel.training import (
    assert_alike, parallel_twins, pass_alike, random, seeded)

NPROC = 2
PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


class MLP(nn.Module):
    """Two layers."""

    def __init__(self, hidden: int = 4, inner: int = 6) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, inner)
        self.fc2 = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def make_mesh() -> DeviceMesh:
    """Both ranks."""
    return init_device_mesh((2,), ("tp",))


def make_twins(make: Callable[[], nn.Module] = MLP) -> tuple[nn.Module, nn.Module]:
    """The parallel MLP and its dense twin."""
    return parallel_twins(make, PLAN, make_mesh())


def assert_same_training(model: nn.Module, dense: nn.Module) -> None:
    """One step of each gives the same result, gradients and parameters."""
    for twin in (model, dense):
        twin.zero_grad()
    pass_alike(model, dense, [random(3, 4)], "after the backward")
    for twin in (model, dense):
        torch.optim.AdamW(twin.parameters(), lr=0.1).step()
    assert_alike(model, dense, "after the step")


def test_state_dict() -> None:
    """The names stay; a dense state dict goes in, and what comes out can be loaded again."""
    model, dense = make_twins()
    assert list(model.state_dict()) == list(dense.state_dict())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    other = seeded(MLP, seed=5)
    model.load_state_dict(other.state_dict())
    assert_same_training(model, other)
    again, _ = make_twins()
    again.load_state_dict(model.state_dict())
    assert_same_training(again, other)
    wrong = dict(other.state_dict(), **{"fc1.weight": torch.zeros(3, 4)})
    with pytest.raises(RuntimeError, match="size mismatch for fc1.weight"):
        model.load_state_dict(wrong)


def test_from_the_meta_device() -> None:
    """A model that no rank ever held whole: spread without values, then given memory and values."""
    with torch.device("meta"):
        model = MLP().double()
    parallelize_module(model, make_mesh(), PLAN, src_data_rank=None)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    assert model.fc1.weight.placements == (Shard(0),)
    model.load_state_dict(seeded(MLP).state_dict())
    assert_same_training(model, seeded(MLP))
    for layer in (model.fc1, model.fc2):
        layer.reset_parameters()
    everywhere = model.fc1.weight.full_tensor().detach()
    assert 0 < everywhere.abs().max() < 0.5 and len(everywhere.unique()) == everywhere.numel()


def test_copies() -> None:
    """A deep copy and a pickled copy train by themselves; the hooks come along."""
    model, dense = make_twins()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
              torch.load(stream, weights_only=False)]
    for other in copies:
        assert_same_training(other, copy.deepcopy(dense))
        assert other.fc1.weight is not model.fc1.weight
        assert other.fc1.weight.placements == (Shard(0),)
        assert isinstance(other.fc1.weight, nn.Parameter)
        assert other.fc2(other.fc1(random(3, 4))).shape == (3, 4)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_alike(model, dense, "after its copies were trained")


def test_casts() -> None:
    """to() changes the dtype of the parts and leaves layouts and names alone."""
    model, dense = make_twins()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for twin in (model, dense):
            twin.to(dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model.fc2.weight.placements == (Shard(1),)
        assert model.fc2.weight.shape == (4, 6)
        assert isinstance(model.fc2.weight, nn.Parameter)
        output = model(random(3, 4).to(dtype))
        assert output.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(output, dense(random(3, 4).to(dtype)), rtol=tolerance,
                                   atol=tolerance)
    assert_same_training(model, dense)


def test_frozen_parameters() -> None:
    """A parameter that needed no gradient needs none, and can be frozen and thawed later."""
    def make() -> nn.Module:
        model = MLP()
        model.fc1.weight.requires_grad_(False)
        return model

    model, dense = make_twins(make)
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    assert_same_training(model, dense)
    assert model.fc1.weight.grad is None
    for twin in (model, dense):
        twin.requires_grad_(False)
        assert not twin(random(3, 4)).requires_grad
        twin.requires_grad_(True)
    assert_same_training(model, dense)


def test_zero_grad_and_accumulation() -> None:
    """Gradients add up until they are zeroed, in both ways."""
    model, dense = make_twins()
    for set_to_none in (True, False):
        for _ in range(2):
            for twin in (model, dense):
                twin(random(3, 4)).square().sum().backward()
        assert_alike(model, dense, "after two backwards")
        for twin in (model, dense):
            twin.zero_grad(set_to_none)
        assert (model.fc1.weight.grad is None) == set_to_none
        assert_alike(model, dense, "after zero_grad")


def test_without_gradients() -> None:
    """eval, no_grad and inference_mode."""
    model, dense = make_twins()
    model.eval()
    with torch.no_grad():
        assert not model(random(3, 4)).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(model(random(3, 4)), dense(random(3, 4)), rtol=1e-12,
                                   atol=1e-12)
    assert_same_training(model, dense)


def test_hooks_see_what_the_caller_sees() -> None:
    """Hooks from before stay, and are given what goes in and comes out, not the inside."""
    seen: list[tuple[str, Any]] = []
    dense = seeded(MLP)
    model = copy.deepcopy(dense)
    model.fc2.register_forward_pre_hook(lambda _, args: seen.append(("in", args[0])))
    model.fc2.register_forward_hook(lambda _, args, output: seen.append(("out", output)))
    parallelize_module(model, make_mesh(), PLAN)
    output = model(random(3, 4))
    (first, given), (second, result) = seen
    assert (first, second) == ("in", "out")
    assert result is output and type(result) is torch.Tensor
    assert isinstance(given, DTensor) and given.placements == (Shard(1),)
    assert_same_training(model, dense)


def test_backward_hooks() -> None:
    """A full backward hook of a parallel layer sees the gradients, each as its tensor lies."""
    mesh = make_mesh()
    model, dense = make_twins()
    seen: dict[nn.Module, list[torch.Tensor]] = {model: [], dense: []}
    for twin, values in seen.items():
        for layer in (twin.fc1, twin.fc2):
            layer.register_full_backward_hook(
                lambda _, inputs, outputs, values=values: values.extend((*inputs, *outputs)))
    for twin in seen:
        twin(random(3, 4).requires_grad_()).square().sum().backward()
    places = [Shard(1), Replicate(), Replicate(), Shard(1)]  # of fc2 in and out, then of fc1
    assert len(seen[model]) == len(seen[dense]) == 4
    for mine, expected, place in zip(seen[model], seen[dense], places):
        torch.testing.assert_close(
            mine.to_local() if isinstance(mine, DTensor) else mine,
            distribute_tensor(expected, mesh, [place]).to_local(), rtol=1e-12, atol=1e-12)
    assert_alike(model, dense, "with backward hooks")


def test_whose_values_count() -> None:
    """Those of the first rank, of another one, or everybody's own."""
    mesh, rank = make_mesh(), dist.get_rank()
    for source in (0, 1):
        model = parallelize_module(seeded(MLP, seed=rank), mesh, PLAN, src_data_rank=source)
        assert_alike(model, seeded(MLP, seed=source), f"from rank {source}")
    own = seeded(MLP, seed=rank)
    model = parallelize_module(copy.deepcopy(own), mesh, PLAN, src_data_rank=None)
    assert_alike(model, own, "from each rank")


def test_shared_module() -> None:
    """A layer under two names is spread and wrapped once, and may be named by either."""
    class Twice(nn.Module):
        """Holds one layer twice."""

        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(4, 4)
            self.other = self.fc1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(F.gelu(self.fc1(x)))

    for entry in ("fc1", "other", "*"):
        model, dense = parallel_twins(
            Twice, {entry: ColwiseParallel(output_layouts=Replicate())}, make_mesh())
        assert model.other is model.fc1
        assert type(model.fc1).__mro__.count(_Boundary) == 1
        assert_same_training(model, dense)


def test_no_rank_alone() -> None:
    """Where the ranks cannot form a group, the module is as it was."""
    mesh = make_mesh()
    model = seeded(MLP)
    before = dict(model.named_parameters())

    def fail(*_: Any) -> None:
        raise RuntimeError("ranks [1] never came")

    native = DeviceMesh.get_group
    DeviceMesh.get_group = fail
    try:
        with pytest.raises(RuntimeError, match="never came"):
            parallelize_module(model, mesh, PLAN)
    finally:
        DeviceMesh.get_group = native
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert not isinstance(model.fc1, _Boundary)
    assert_same_training(parallelize_module(model, mesh, PLAN), seeded(MLP))


def test_plans_in_any_order() -> None:
    """Ranks that list the same entries in another order still agree on what is sent."""
    entries = list(PLAN.items())
    plan = dict(entries if dist.get_rank() == 0 else entries[::-1])
    model = parallelize_module(seeded(MLP), make_mesh(), plan)
    assert_same_training(model, seeded(MLP))


def test_inputs_that_do_not_fit() -> None:
    """A whole tensor where a part is due, a tensor of another mesh, and what is no tensor."""
    model, _ = make_twins()
    with pytest.raises(ValueError, match=r"holds a part of shape \(3, 3\) of a tensor of shape "
                                         r"\(3, 6\), but the local tensor has the shape \(3, 6\)"):
        model.fc2(random(3, 6))
    with pytest.raises(TypeError, match="RowwiseParallel module 'fc2' takes a tensor as its first "
                                        "argument, but got a list"):
        model.fc2([1.0])
    other = init_device_mesh((1, 2), ("dp", "tp"))
    stranger = distribute_tensor(random(3, 4), other, [Replicate(), Replicate()])
    with pytest.raises(ValueError, match="moves between meshes of one root"):
        model.fc1(stranger)
    with pytest.raises(TypeError, match="input"):
        model.fc1()


def test_parameters_keep_what_users_wrote_on_them() -> None:
    """Attributes by which optimizers tell parameters apart."""
    model = seeded(MLP)
    model.fc1.weight.no_decay = True
    parallelize_module(model, make_mesh(), PLAN)
    assert model.fc1.weight.no_decay
    assert not hasattr(model.fc2.weight, "no_decay")

"""The specification's MLP on two MindSpore ranks: training, and what CommDebugMode sees of it."""
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import (
    ColwiseParallel, CommDebugMode, DTensor, RowwiseParallel, init_device_mesh, parallelize_module)
from hyper_parallel.demo_mindspore import TwoLayerMLP
from tests.mindspore.weights import fill
from tests.traced_mlp import ALL_REDUCE, BATCH, HIDDEN, INTERMEDIATE, TracedMLP

NPROC = 2
TIMEOUT = 150
PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


class DenseMLP(nn.Cell):
    """The same with MindSpore's older layers, and with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Dense(HIDDEN, INTERMEDIATE)
        self.gelu = nn.GELU(approximate=False)
        self.fc2 = nn.Dense(INTERMEDIATE, HIDDEN)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc2(self.gelu(self.fc1(x)))


class ReferenceMLP(TwoLayerMLP):
    """The first one for plain tensors, for which mint has no gelu on the CPU."""

    def construct(self, x: Tensor) -> Tensor:
        return self.fc2(ops.gelu(self.fc1(x)))


def make_model(cls: type = TwoLayerMLP) -> nn.Cell:
    """The model on the two ranks."""
    model = cls(HIDDEN, INTERMEDIATE) if cls is TwoLayerMLP else cls()
    return parallelize_module(fill(model), init_device_mesh((2,), ("tp",)), PLAN)


def make_input(seed: int = 1) -> Tensor:
    """The same batch on each rank."""
    values = np.random.default_rng(seed).standard_normal((BATCH, HIDDEN))
    return Tensor(values.astype(np.float32))


def full(parameter: Tensor) -> np.ndarray:
    """The whole of a tensor."""
    return parameter.full_tensor().asnumpy() if isinstance(parameter, DTensor) else \
        parameter.asnumpy()


def close(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal up to the order of float32 sums."""
    return one.shape == other.shape and np.allclose(one, other, rtol=2e-5, atol=2e-6)


def phases_of_collectives(records: list) -> list[str]:
    """In which phase each collective of a JSON trace was."""
    return [phase for record in records for phase in (
        [record["phase"]] if record["type"] == "collective" else
        phases_of_collectives(record.get("children", [])))]


OPTIMIZERS = {
    "SGD": lambda parameters: nn.SGD(parameters, 0.1),
    "SGD with momentum and decay": lambda parameters: nn.SGD(
        parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "Momentum": lambda parameters: nn.Momentum(parameters, 0.1, 0.9),
    "Adam": lambda parameters: nn.Adam(parameters, 0.01),
    "AdamWeightDecay": lambda parameters: nn.AdamWeightDecay(parameters, 0.01, weight_decay=0.1),
}


def step(model: nn.Cell, optimizer: nn.Cell, x: Tensor) -> tuple:
    """Loss, gradient of the input and of each parameter; then the optimizer's step."""
    compute = mindspore.value_and_grad(lambda t: (model(t) ** 2).mean(), 0, optimizer.parameters)
    loss, (of_input, gradients) = compute(x)
    optimizer(gradients)
    return loss, of_input, gradients


def compare_training(dense: nn.Cell, parallel: nn.Cell, make: Callable) -> None:
    """Three steps of both with the same batches."""
    optimizers = make(parallel.trainable_params()), make(dense.trainable_params())
    for number in range(3):
        x = make_input(number)
        loss, of_input, gradients = step(parallel, optimizers[0], x)
        expected, of_x, whole = step(dense, optimizers[1], x)
        assert close(full(loss), full(expected)) and close(full(of_input), full(of_x)), number
        for one, mine in zip(parallel.trainable_params(), gradients):
            assert isinstance(one, DTensor) and mine.placements == one.placements, one.name
        for mine, theirs in zip((*gradients, *parallel.trainable_params()),
                                (*whole, *dense.trainable_params())):
            assert close(full(mine), full(theirs)), number


def test_training_is_that_of_the_dense_model() -> None:
    """Values, gradients of input and parameters, and the parameters after three steps."""
    for name, make in OPTIMIZERS.items():
        print(name)
        compare_training(fill(ReferenceMLP(HIDDEN, INTERMEDIATE)), make_model(), make)
        compare_training(fill(DenseMLP()), make_model(DenseMLP), make)


def test_optimizers_of_whole_tensors_are_refused() -> None:
    """A norm of this rank's part is not that of the parameter."""
    model, x = make_model(), make_input()
    gradients = mindspore.grad(lambda t: (model(t) ** 2).mean(), None, model.trainable_params())(x)
    for make in (lambda parameters: nn.Lamb(parameters, 0.1), nn.AdaFactor,
                 lambda parameters: nn.LARS(nn.SGD(parameters, 0.1))):
        optimizer = make(model.trainable_params())
        before = full(model.fc1.weight)
        with pytest.raises(NotImplementedError, match="takes norms or means of whole parameters"):
            optimizer(gradients)
        assert np.array_equal(full(model.fc1.weight), before)


def test_parameters_stay_parameters() -> None:
    """Names, flags and places in the cell; shapes are global, memory is this rank's part."""
    model = make_model()
    weight = model.fc1.weight
    assert isinstance(weight, mindspore.Parameter) and isinstance(weight, DTensor)
    assert weight.name == "fc1.weight" and weight.requires_grad
    assert weight.shape == (INTERMEDIATE, HIDDEN) and weight.to_local().shape == (16, HIDDEN)
    assert [one.name for one in model.trainable_params()] == ["fc1.weight", "fc2.weight"]
    weight.requires_grad = False
    assert [one.name for one in model.trainable_params()] == ["fc2.weight"]
    assert repr(model).count("Linear") == 2


def test_a_plan_that_cannot_be() -> None:
    """The errors name the module; nothing is changed."""
    model = fill(TwoLayerMLP(HIDDEN, INTERMEDIATE))
    mesh = init_device_mesh((2,), ("tp",))
    for plan, error in (({"fc3": ColwiseParallel()}, ValueError), ({"": ColwiseParallel()},
                                                                    TypeError)):
        try:
            parallelize_module(model, mesh, plan)
        except error as caught:
            assert "fc1" in str(caught) or "TwoLayerMLP" in str(caught), caught
        else:
            raise AssertionError(f"{plan} was accepted")
    assert not any(isinstance(one, DTensor) for one in model.get_parameters())


TRACED = TracedMLP(
    make_model, make_input, lambda one, other: np.array_equal(one.asnumpy(), other.asnumpy()),
    "Float32", frozenset({"differentiable_all_to_all_single"}))


def test_comm_debug_mode_captures_collectives() -> None:
    """The forward pass has one all-reduce, and the mode changes no bit of the result."""
    TRACED.captures_collectives()


def test_comm_debug_mode_debug_string() -> None:
    """The tables are the specification's, to the character."""
    TRACED.debug_string()


def test_comm_debug_mode_tracing_table() -> None:
    """What a level shows, the next one shows too."""
    TRACED.tracing_table()


def test_comm_debug_mode_with_module_tracker() -> None:
    """One mode with a module gives all three tables; layouts and JSON are right."""
    TRACED.with_module_tracker()


def test_comm_debug_mode_restores_platform() -> None:
    """Each of the platform's methods is the original object again."""
    TRACED.restores_platform()
    model = make_model()
    with CommDebugMode(module=model):
        model(make_input())
    hooks = [len(cell._forward_hook) + len(cell._forward_pre_hook)
             for _, cell in model.cells_and_names()]
    assert hooks == [0] * len(hooks)


def test_comm_debug_mode_multiple_forwards() -> None:
    """Three forward passes count three times one."""
    TRACED.multiple_forwards()


def test_comm_debug_mode_of_a_step() -> None:
    """Forward and backward: the second all-reduce is that of fc1's input gradient."""
    model, x = make_model(), make_input()
    with CommDebugMode(module=model) as mode:
        mindspore.grad(lambda t: (model(t) ** 2).mean())(x)
    assert mode.get_comm_counts() == {ALL_REDUCE: 2}
    table = mode.generate_tracing_table(2).split("\n")
    collectives = [index for index, line in enumerate(table) if "Collective(" in line]
    owners = [next(line for line in reversed(table[:index]) if "Op(linear)" in line)
              for index in collectives]
    assert "DTensor[32, 16]" in owners[0] and "DTensor[16, 32]" in owners[1], table
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        mode.generate_json_dump(path, noise_level=3)
        phases = phases_of_collectives(json.loads(path.read_text())["records"])
    assert sorted(phases) == ["backward", "forward"]


def test_a_cell_that_raises_leaves_a_right_tree() -> None:
    """The next collective is not under the cell that failed, and no hook stays."""
    model, x = make_model(), make_input()

    class Failing(nn.Cell):
        """Raises in its construct."""

        def construct(self, x: Tensor) -> Tensor:
            raise ValueError("on purpose")

    class Outer(nn.Cell):
        """Calls it, catches, and goes on."""

        def __init__(self) -> None:
            super().__init__()
            self.failing = Failing()
            self.inner = model

        def construct(self, x: Tensor) -> Tensor:
            try:
                self.failing(x)
            except ValueError:
                pass
            return self.inner(x)

    outer = Outer()
    with CommDebugMode(module=outer) as mode:
        outer(x)
    table = mode.generate_tracing_table(2)
    depth = {line.split("Module(")[1].split(")")[0]: len(line) - len(line.lstrip())
             for line in table.split("\n") if "Module(" in line}
    assert depth["failing"] == depth["inner"] < depth["inner.fc1"], table
    assert mint.isfinite(outer(x)).all()

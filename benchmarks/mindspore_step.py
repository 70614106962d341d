"""MindSpore: the overhead of an operator, and a step of the MLP against one written by hand.

``python -m benchmarks.mindspore_step``, in the environment of ``make environment-mindspore``. It
starts two ranks for the step by itself. The variants take turns within one process; a ratio is
the median of the ratios of neighbouring samples.
"""
import os
import statistics
import sys
import time
from typing import Callable

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import (
    ColwiseParallel, Replicate, RowwiseParallel, Shard, distribute_tensor, get_platform,
    init_device_mesh, parallelize_module)
from hyper_parallel.demo_mindspore import TwoLayerMLP, start_ranks

HIDDEN, INTERMEDIATE, BATCH = 512, 2048, 64


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Time of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def compare(ours: Callable[[], object], plain: Callable[[], object], rounds: int, repeats: int
            ) -> tuple[float, float, float]:
    """Medians of ours and of plain, in microseconds, and of their ratio."""
    seconds(ours, 3)
    seconds(plain, 3)
    samples = [(seconds(ours, repeats), seconds(plain, repeats)) for _ in range(rounds)]
    return (*(statistics.median(one[index] for one in samples) * 1e6 for index in (0, 1)),
            statistics.median(one / other for one, other in samples))


class HandWritten(nn.Cell):
    """The two halves of the MLP that one rank computes, in the manner of Megatron."""

    def __init__(self, fc1: np.ndarray, fc2: np.ndarray, group: object) -> None:
        super().__init__()
        self.fc1 = Parameter(Tensor(fc1), name="fc1")
        self.fc2 = Parameter(Tensor(fc2), name="fc2")
        self._group = group

    def construct(self, x: Tensor) -> Tensor:
        platform = get_platform()
        x = platform.apply_with_gradient(
            lambda value: value,
            lambda grad: platform.differentiable_all_reduce(grad, "sum", self._group), x)
        linear = mint.nn.functional.linear
        part = linear(ops.gelu(linear(x, self.fc1)), self.fc2)
        return platform.differentiable_all_reduce(part, "sum", self._group)


def measure_operators() -> None:
    """The table of operators, in this process alone."""
    array = np.ones((16, 16), np.float32)
    mesh = init_device_mesh((1,), ("tp",))
    plain, spread = Tensor(array), distribute_tensor(Tensor(array), mesh, [Replicate()])
    linear = mint.nn.functional.linear
    cases = {
        "add": lambda x: x + x, "mul": lambda x: x * x, "linear": lambda x: linear(x, x),
        "reshape": lambda x: x.reshape((256,)), "sum": lambda x: x.sum(),
        "softmax": ops.softmax, "relu": ops.relu}
    for name, case in cases.items():
        ours, theirs, ratio = compare(lambda case=case: case(spread), lambda case=case: case(plain),
                                      21, 100)
        print(f"| {name} | {theirs:.1f} | {ours:.1f} | {ours - theirs:.1f} | {ratio:.2f} |",
              flush=True)


def measure_step() -> None:
    """Forward, backward and SGD, both with the same two all-reduces."""
    mesh = init_device_mesh((2,), ("tp",))
    generator = np.random.default_rng(0)
    weights = [generator.standard_normal(shape).astype(np.float32) / 32
               for shape in ((INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))]
    model = TwoLayerMLP(HIDDEN, INTERMEDIATE)
    for parameter, values in zip(model.get_parameters(), weights):
        parameter.set_data(Tensor(values))
    parallelize_module(model, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    parts = [distribute_tensor(Tensor(values), mesh, [Shard(dim)]).to_local().asnumpy()
             for dim, values in enumerate(weights)]
    by_hand = HandWritten(*parts, mesh.get_group())
    x = Tensor(generator.standard_normal((BATCH, HIDDEN)).astype(np.float32))

    def stepper(cell: nn.Cell) -> Callable[[], object]:
        optimizer = nn.SGD(cell.trainable_params(), 1e-4)
        compute = mindspore.value_and_grad(lambda t: (cell(t) ** 2).mean(), 0,
                                           optimizer.parameters)

        def step() -> Tensor:
            loss, (_, gradients) = compute(x)
            optimizer(gradients)
            return loss

        return step

    ours, theirs = stepper(model), stepper(by_hand)
    assert np.allclose(ours().asnumpy(), theirs().asnumpy(), rtol=1e-4)
    result = compare(ours, theirs, 31, 4)
    if mesh.rank == 0:
        print(f"step: {result[0]:.0f} us, by hand {result[1]:.0f} us, ratio {result[2]:.3f}")


def main() -> None:
    """Runs as a rank where a launcher started it, and starts two otherwise."""
    if os.environ.get("MS_ROLE") != "MS_WORKER":
        measure_operators()
        sys.exit(start_ranks([sys.executable, "-m", "benchmarks.mindspore_step"], 2))
    get_platform().init_process_group()
    measure_step()
    get_platform().destroy_process_group()


if __name__ == "__main__":
    main()

"""A parallel model and its dense twin, trained side by side on every rank.

All values are float64 and come from one seed, so each rank knows the dense result and compares
what it holds itself.  What is left is the order of the sums: 1e-12 of the largest value.
"""
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, get_platform, init_device_mesh, parallelize_module
from hyper_parallel.core.dtensor.debug._collective_tracer import COLLECTIVE_METHODS

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def meshes() -> list[DeviceMesh]:
    """Four ranks in a row, and two rows of two of which only the inner axis is used."""
    return [make_mesh(), init_device_mesh((2, 2), ("dp", "tp"))["tp"]]


def make_mesh() -> DeviceMesh:
    """Four ranks in a row."""
    return init_device_mesh((4,), ("tp",))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module in float64, with values that depend on the seed alone."""
    torch.manual_seed(seed)
    return make().double()


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    """Values that are the same on each rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def assert_near(got: torch.Tensor | None, wanted: torch.Tensor | None, what: str) -> None:
    """Equal but for the order of sums: a plain tensor is the whole one, a DTensor this rank's part.

    Only a sum that is still to be made is sent for, so the comparison is quick.
    """
    assert (got is None) == (wanted is None), f"{what}: {got} instead of {wanted}"
    if wanted is None:
        return
    wanted = wanted.detach()
    if isinstance(got, DTensor):
        assert got.shape == wanted.shape, what
        if any(placement.is_partial() for placement in got.placements):
            got = got.full_tensor()
        else:
            bounds = got.layout.local_bounds(wanted.shape)
            wanted = wanted[tuple(slice(start, start + length) for start, length in bounds)]
            got = got.to_local()
    torch.testing.assert_close(got.detach(), wanted, rtol=1e-12, atol=1e-12,
                               msg=lambda text: f"{what}: {text}")


def assert_alike(model: nn.Module, dense: nn.Module, when: str) -> None:
    """All parameters and all gradients agree, and lie alike.

    The names are compared too, shared parameters counting once.
    """
    parameters, expected = dict(model.named_parameters()), dict(dense.named_parameters())
    assert list(parameters) == list(expected)
    for name, parameter in parameters.items():
        assert_near(parameter, expected[name], f"{name} {when}")
        assert_near(parameter.grad, expected[name].grad, f"gradient of {name} {when}")
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            assert parameter.grad.placements == parameter.placements, name


def parallel_twins(make: Callable[[], nn.Module], plan: Any, mesh: DeviceMesh
                   ) -> tuple[nn.Module, nn.Module]:
    """The parallel module and its dense twin."""
    dense = seeded(make)
    return parallelize_module(copy.deepcopy(dense), mesh, plan), dense


def one_pass(model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Forward and backward; the output, the loss, and the gradient of each input."""
    leaves = [value.clone().requires_grad_(value.is_floating_point()) for value in inputs]
    output = model(*leaves)
    loss = (output * output).sum() + output.sum()
    loss.backward()
    return [output, loss, *(leaf.grad for leaf in leaves)]


def pass_alike(model: nn.Module, dense: nn.Module, inputs: list[torch.Tensor], when: str) -> None:
    """One pass of each gives the same results and gradients."""
    results = zip(one_pass(model, inputs), one_pass(dense, inputs), strict=True)
    for index, (result, expected) in enumerate(results):
        assert_near(result, expected, f"result {index} {when}")
    assert_alike(model, dense, when)


def clip_alike(model: nn.Module, dense: nn.Module, options: dict[str, Any], when: str) -> None:
    """Clip the gradients of both twins, which must be too long."""
    norm, expected = (nn.utils.clip_grad_norm_(twin.parameters(), **options)
                      for twin in (model, dense))
    assert_near(norm, expected, f"norm {when}")
    assert expected > options["max_norm"]
    assert_alike(model, dense, f"clipped {when}")


def train(make: Callable[[], nn.Module], plan: Any, mesh: DeviceMesh, inputs: list[torch.Tensor],
          optimizer: str = "sgd", *, steps: int = 2, clip: dict[str, Any] | None = None
          ) -> tuple[nn.Module, nn.Module]:
    """Train both twins and compare all along; returns the parallel and the dense one.

    Args:
        make: makes the module.
        plan: for ``parallelize_module``.
        mesh: mesh of one axis.
        inputs: arguments of each forward; the gradients of the floating ones are compared too.
        optimizer: a key of ``OPTIMIZERS``.
        steps: number of steps.
        clip: arguments of ``clip_grad_norm_``, if the gradients are to be clipped.
    """
    model, dense = parallel_twins(make, plan, mesh)
    assert_alike(model, dense, "at first")
    steppers = [OPTIMIZERS[optimizer](twin.parameters()) for twin in (model, dense)]
    for step in range(steps):
        when = f"in step {step} with {optimizer} on {mesh}"
        pass_alike(model, dense, inputs, when)
        if clip is not None:
            clip_alike(model, dense, clip, when)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        assert_alike(model, dense, f"after the optimizer {when}")
    return model, dense


@contextmanager
def collectives() -> Iterator[Counter]:
    """Counts the collectives that are asked for: calls by ``name``, bytes given by ``(name,)``."""
    cls = type(get_platform())
    originals = {name: cls.__dict__[name] for name in COLLECTIVE_METHODS}
    counts: Counter = Counter()

    def counted(name: str) -> Callable[..., Any]:
        def call(data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            counts[(name,)] += data.numel() * data.element_size()
            return originals[name].__func__(data, *args, **kwargs)

        return call

    for name in originals:
        setattr(cls, name, staticmethod(counted(name)))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(cls, name, original)

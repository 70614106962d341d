"""The entries of PyTorch's operator database, and the inputs on which each is tried."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

# Where an operator takes no float32, the first of these that it takes.
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.float64, torch.bool)

# torch.manual_seed records the stack for every other device, which takes longer than a sample.
seed_cpu = torch.default_generator.manual_seed


@dataclass(frozen=True)
class Sample:
    """One call: an operator, and its arguments flattened.

    ``judged`` maps the result to the part of it whose gradient is defined: a singular vector, for
    example, may come with either sign.
    """

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any
    judged: Callable[[Any], Any]

    def call(self, leaves: list[Any]) -> Any:
        """The operator on ``leaves`` in place of the sample's own."""
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.function(*args, **kwargs)

    def tensors(self) -> list[int]:
        """Which of the leaves are tensors."""
        return [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Entry:
    """An operator under test: its name, and a function that makes its samples."""

    name: str
    samples: Callable[[], list[Sample]]


def sample(function: Callable[..., Any], *args: Any,
           judged: Callable[[Any], Any] = lambda result: result, **kwargs: Any) -> Sample:
    """The sample that calls ``function`` with these arguments."""
    leaves, structure = tree_flatten((args, kwargs))
    return Sample(function, tuple(leaves), structure, judged)


def entries(limit: int) -> list[Entry]:
    """All entries of the database that are not about uninitialised memory.

    ``limit`` samples of each are tried, evenly drawn from those that PyTorch tests it on.
    """
    return list(_entries(limit))


def _entries(limit: int) -> Iterator[Entry]:
    for info in op_db:
        dtype = next((dtype for dtype in DTYPES if dtype in info.dtypes), None)
        if dtype is None or info.has_nondeterministic_output:
            continue
        variant = f" ({info.variant_test_name})" if info.variant_test_name else ""
        yield Entry(f"{info.name}{variant}", _maker(info, dtype, limit))


def _maker(info: Any, dtype: torch.dtype, limit: int) -> Callable[[], list[Sample]]:
    def make() -> list[Sample]:
        seed_cpu(0)
        random.seed(0)
        numpy.random.seed(0)
        differentiable = info.supports_autograd and dtype.is_floating_point
        with mock.patch.object(torch, "manual_seed", seed_cpu):
            found = list(info.sample_inputs("cpu", dtype, requires_grad=differentiable))
        count = min(limit, len(found))
        chosen = [found[index * (len(found) - 1) // max(count - 1, 1)] for index in range(count)]
        return [sample(info.op, one.input, *one.args, judged=one.output_process_fn_grad,
                       **one.kwargs) for one in chosen]
    return make

"""Operators with inputs, for the comparison with the dense operator in every layout.

An entry is a function of tensors and a maker for each of them. Values are distinct and seeded;
floating ones are float64, of which rounding cannot hide a wrong factor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tensor:
    """A dense input: its shape, what values it has, and whether it may be Partial."""

    shape: tuple[int, ...]
    kind: str = "normal"
    high: int = 0
    partial: bool = True
    grad: bool = True

    def make(self, seed: int) -> torch.Tensor:
        """The dense tensor, a leaf."""
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "index":
            return torch.randint(self.high, self.shape, generator=generator)
        if self.kind == "bool":
            return torch.randint(2, self.shape, generator=generator).bool()
        if self.kind == "complex":
            return torch.randn(self.shape, dtype=torch.complex128, generator=generator
                               ).requires_grad_(self.grad)
        if self.kind == "unit":
            value = 0.1 + 0.8 * torch.rand(self.shape, dtype=torch.float64, generator=generator)
        else:
            value = torch.randn(self.shape, dtype=torch.float64, generator=generator)
            if self.kind == "positive":
                value = value.abs() + 0.5
        return value.requires_grad_(self.grad)


def pos(*shape: int) -> Tensor:
    """Positive values, away from zero."""
    return Tensor(shape, "positive")


def unit(*shape: int) -> Tensor:
    """Values between 0.1 and 0.9."""
    return Tensor(shape, "unit")


def ints(high: int, *shape: int) -> Tensor:
    """Whole numbers below ``high``; summands of indices would be no indices."""
    return Tensor(shape, "index", high, partial=False)


def bools(*shape: int) -> Tensor:
    """True and False."""
    return Tensor(shape, "bool", partial=False)


def const(*shape: int) -> Tensor:
    """Values that need no gradient."""
    return Tensor(shape, grad=False)


@dataclass(frozen=True)
class Entry:
    """One operator with the makers of its inputs."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    in_place: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """The dense inputs."""
        return [maker.make(17 + index) for index, maker in enumerate(self.inputs)]


def entry(name: str, function: Callable[..., Any], *inputs: Any, in_place: bool = False) -> Entry:
    """An entry; a plain shape stands for normal values."""
    return Entry(name, function, tuple(
        maker if isinstance(maker, Tensor) else Tensor(maker) for maker in inputs), in_place)


def write(method: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """A function that calls an in-place method and returns the written tensor."""
    def run(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        result = getattr(x, method)(*others, *args, **kwargs)
        assert result is x, f"{method} returned another object"
        return x
    return run


X = (5, 7)
V = (4, 6, 5)

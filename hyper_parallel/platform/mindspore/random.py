"""The random numbers of DTensors on MindSpore.

MindSpore's kernels on the CPU draw from generators of their own that cannot be read or set, so
they can not be brought to agree between ranks.  The library draws on the host instead, from a
generator that ``mindspore.set_seed`` seeds, and takes no generator of a user's own.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Optional, Sequence

import mindspore
import numpy as np
from mindspore import Tensor


class _State:
    """The default generator, and the seed or mark it comes from."""

    def __init__(self) -> None:
        self.users_seed: Optional[int] = None
        self.mark = 0
        self.generator = np.random.default_rng()
        self.mark = self.new_seed()

    def new_seed(self) -> int:
        """A number from 0 to 2**62."""
        return int(self.generator.integers(2 ** 62))

    def look(self) -> None:
        """Start anew where the user set another seed since."""
        seed = mindspore.get_seed()
        if seed is not None and seed != self.users_seed:
            self.users_seed = self.mark = seed
            self.generator = np.random.default_rng(seed)


_state = _State()


def initial_seed(generator: Any = None) -> int:
    """The seed that the user set last, or the mark of an agreed state."""
    del generator
    _state.look()
    return _state.mark


def draw_seed(generator: Any = None) -> int:
    """The next number of the default generator."""
    del generator
    _state.look()
    return _state.new_seed()


def agreed_seed() -> np.ndarray:
    """What the first rank sends, from which all ranks go on."""
    return np.array([draw_seed()], dtype=np.int64)


def go_on_from(seed: np.ndarray, mark: int) -> None:
    """Draw what the first rank will draw; the state is known by ``mark``."""
    _state.generator = np.random.default_rng(int(seed[0]))
    _state.mark = mark


@contextmanager
def seeded(seed: int, generator: Any = None) -> Iterator[None]:
    """Run with a generator of that seed, then go on with the one before."""
    del generator
    before = _state.generator
    _state.generator = np.random.default_rng(seed)
    try:
        yield
    finally:
        _state.generator = before


def keep_mask(shape: Sequence[int], p: float, dtype: Any) -> Tensor:
    """For dropout: 0 with probability ``p``, else what keeps the mean."""
    kept = _state.generator.random(tuple(shape), dtype=np.float32) >= p
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    return Tensor((kept * np.float32(scale)).astype(np.float32)).astype(dtype)


def uniform(shape: Sequence[int], dtype: Any) -> Tensor:
    """Numbers of [0, 1), drawn as double."""
    return Tensor(_state.generator.random(tuple(shape))).astype(dtype)


def normal(shape: Sequence[int], dtype: Any) -> Tensor:
    """Numbers of the standard normal distribution, drawn as double."""
    return Tensor(_state.generator.standard_normal(tuple(shape))).astype(dtype)


def integers(shape: Sequence[int], low: int, high: int, dtype: Any) -> Tensor:
    """Whole numbers from ``low`` on and below ``high``."""
    return Tensor(_state.generator.integers(low, high, tuple(shape))).astype(dtype)

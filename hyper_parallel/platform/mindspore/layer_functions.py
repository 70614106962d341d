"""Products, norms, lookups and losses on local tensors; see ``functions.py``."""
from __future__ import annotations

from typing import Any, Optional, Sequence

from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import history, random
from hyper_parallel.platform.mindspore.functions import all_dims

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


# ---- products ----

def matmul(input: Tensor, other: Tensor) -> Tensor:
    """The matrix product."""
    return mint.matmul(input, other)


def linear(input: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """An affine map."""
    return mint.nn.functional.linear(input, weight, bias)


# ---- norms, lookups, losses ----

def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Exponentials that add up to 1."""
    return ops.softmax(input, dim)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of the softmax."""
    return ops.log_softmax(input, dim)


def native_layer_norm(input: Tensor, normalized_shape: Sequence[int],
                      weight: Optional[Tensor] = None, bias: Optional[Tensor] = None,
                      eps: float = 1e-7) -> tuple[Tensor, Tensor, Tensor]:
    """Mean 0 and variance 1 over the last dims, then an affine map; the mean; the variance.

    Of single operators, since the gradient of MindSpore's own fails on the CPU.
    """
    dims = tuple(range(input.ndim - len(tuple(normalized_shape)), input.ndim))
    mean = mint.mean(input, dims, True)
    apart = input - mean
    variance = mint.mean(apart * apart, dims, True)
    result = apart * mint.rsqrt(variance + eps)
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias, mean, variance


def rms_norm_with_factor(input: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Divided by the root of the mean square, then scaled; and the factor."""
    dims = tuple(range(input.ndim - weight.ndim, input.ndim))
    factor = mint.rsqrt(mint.mean(input * input, dims, True) + eps)
    return input * factor * weight, factor


def linalg_vector_norm(input: Tensor, ord: float = 2.0, dim: Any = None, keepdim: bool = False,
                       dtype: Any = None) -> Tensor:
    """The vector norm of a finite order above 0."""
    input = input if dtype is None else input.astype(dtype)
    powers = input * input if ord == 2 else mint.pow(mint.abs(input), ord)
    total = mint.sum(powers, all_dims(input, dim), keepdim)
    return mint.sqrt(total) if ord == 2 else mint.pow(total, 1 / ord)


def embedding(input: Tensor, weight: Tensor, padding_idx: Optional[int] = None) -> Tensor:
    """Rows of a table; the row of ``padding_idx`` gets no gradient."""
    if padding_idx is not None:
        padding = mint.arange(weight.shape[0]).reshape((-1, 1)) == padding_idx
        weight = mint.where(padding, history.detach(weight), weight)
    return ops.gather(weight, input, 0)


def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Elements set to zero at random, the others scaled."""
    if not training or p == 0:
        return history.alias(input)
    return input * random.keep_mask(tuple(input.shape), p, input.dtype)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return values
    return mint.sum(values) if reduction == "sum" else mint.mean(values)


def mse_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The squared difference."""
    apart = input - target
    return _reduced(apart * apart, reduction)


def l1_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The absolute difference."""
    return _reduced(mint.abs(input - target), reduction)


def named_reduction(number: Any) -> Any:
    """``"none"``, ``"mean"`` or ``"sum"`` for MindSpore's number of it."""
    return _REDUCTIONS.get(number, number) if isinstance(number, int) else number

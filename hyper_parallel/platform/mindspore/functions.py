"""The library's operators on local tensors, made of what MindSpore has on every device.

Each function has the name and the parameters that the sharding rules know.  Where ``mint`` has no
kernel on the CPU, the same function of ``ops`` or an expression of other operators takes its place.
"""
from __future__ import annotations

from typing import Any, Optional, Sequence

import mindspore
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import history, random

def all_dims(input: Tensor, dim: Any) -> Any:
    """``dim``, or all of them for None."""
    return tuple(range(input.ndim)) if dim is None else dim


# ---- reductions ----

def sum_(input: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum."""
    return mint.sum(input, dim, keepdim, dtype=dtype)


def mean(input: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The mean."""
    return mint.mean(input, dim, keepdim, dtype=dtype)


def prod_(input: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The product."""
    input = input if dtype is None else input.astype(dtype)
    return ops.ReduceProd(keep_dims=keepdim)(input, all_dims(input, dim))


def amax(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The largest elements."""
    return ops.ReduceMax(keep_dims=keepdim)(input, all_dims(input, dim))


def amin(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The smallest elements."""
    return ops.ReduceMin(keep_dims=keepdim)(input, all_dims(input, dim))


def max_(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest element; along a dim with its index."""
    return mint.max(input) if dim is None else mint.max(input, dim, keepdim)


def min_(input: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """The smallest element; along a dim with its index."""
    return mint.min(input) if dim is None else mint.min(input, dim, keepdim)


def argmax(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Where the largest element is."""
    return ops.argmax(input, dim, keepdim).astype(mindspore.int64)


def argmin(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Where the smallest element is."""
    return argmax(-input, dim, keepdim)


def any_(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether some element is true."""
    return ops.ReduceAny(keep_dims=keepdim)(input.bool(), all_dims(input, dim))


def all_(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether all elements are true."""
    return ops.ReduceAll(keep_dims=keepdim)(input.bool(), all_dims(input, dim))


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """The logarithm of the sum of exponentials."""
    peak = history.detach(amax(input, dim, True))
    total = mint.log(mint.sum(mint.exp(input - peak), dim, True)) + peak
    return total if keepdim else total.squeeze(dim)


# ---- views and joins ----

def reshape(input: Tensor, *shape: Any) -> Tensor:
    """The same elements in another shape."""
    return input.reshape(*shape)


def permute(input: Tensor, dims: Any) -> Tensor:
    """The dims in another order."""
    dims = (dims,) if isinstance(dims, int) else dims
    return ops.transpose(input, tuple(dim % input.ndim for dim in dims))


def transpose(input: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dims exchanged."""
    return mint.transpose(input, dim0, dim1)


def t(input: Tensor) -> Tensor:
    """A matrix turned over."""
    return input.t()


def unsqueeze(input: Tensor, dim: int) -> Tensor:
    """A new dim of size 1."""
    return mint.unsqueeze(input, dim)


def squeeze(input: Tensor, dim: Any = None) -> Tensor:
    """Without dims of size 1."""
    return input.squeeze() if dim is None else input.squeeze(dim)


def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Some dims joined to one."""
    return mint.flatten(input, start_dim, end_dim)


def expand(input: Tensor, size: Sequence[int]) -> Tensor:
    """Dims of size 1 stretched."""
    return input.broadcast_to(tuple(size))


def tile(input: Tensor, dims: Sequence[int]) -> Tensor:
    """The tensor repeated."""
    return ops.tile(input, tuple(dims))


def split(input: Tensor, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of a length, or of several."""
    return mint.split(input, split_size, dim)


def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """A number of pieces."""
    return mint.chunk(input, chunks, dim)


def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A part of a dim."""
    return mint.narrow(input, dim, start, length)


def select(input: Tensor, dim: int, index: int) -> Tensor:
    """One entry of a dim."""
    return mint.select(input, dim, index)


def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """The entries of a dim."""
    return input.unbind(dim)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along a dim."""
    return mint.cat(tuple(tensors), dim)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along a new dim."""
    return mint.cat(tuple(mint.unsqueeze(one, dim) for one in tensors), dim)


def getitem(input: Tensor, index: Any) -> Tensor:
    """A part by index."""
    return Tensor.__getitem__(input, index)


def setitem_(input: Tensor, index: Any, value: Any) -> Tensor:
    """Assignment by index, in place."""
    Tensor.__setitem__(input, index, value)
    return input


def clone(input: Tensor) -> Tensor:
    """A copy in the same graph."""
    return history.apply_with_gradient(history.copied, lambda grad: grad, input)


def contiguous(input: Tensor) -> Tensor:
    """Contiguous memory."""
    return Tensor.contiguous(input)


def alias(input: Tensor) -> Tensor:
    """The tensor as it is."""
    return history.alias(input)


def detach(input: Tensor) -> Tensor:
    """The tensor without its history."""
    return history.detach(input)


def gather(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Entries of a dim, by an index for each line."""
    return ops.gather_elements(input, dim, index)


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Entries of a dim, by one index."""
    return ops.gather(input, index, dim)


def cumsum(input: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Sums along a dim up to each place."""
    return ops.cumsum(input, dim, dtype)


def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, **order: Any
         ) -> tuple[Tensor, Tensor]:
    """The largest or smallest entries of a dim, and where they are."""
    values, places = ops.topk(input, k, dim, largest, order.get("sorted", True))
    return values, places.astype(mindspore.int64)


def sort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False
         ) -> tuple[Tensor, Tensor]:
    """The entries of a dim in order, and where they were."""
    del stable  # the kernel is
    values, places = ops.sort(input, dim, descending)
    return values, places.astype(mindspore.int64)


def tril(input: Tensor, diagonal: int = 0) -> Tensor:
    """The lower triangle."""
    return ops.tril(input, diagonal)


def triu(input: Tensor, diagonal: int = 0) -> Tensor:
    """The upper triangle."""
    return ops.triu(input, diagonal)


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """A 1 at the place of each index."""
    count = int(input.max()) + 1 if num_classes == -1 else num_classes
    return (input.expand_dims(-1) == mint.arange(count)).astype(mindspore.int64)


def pad_(input: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Entries of one value added at both ends of the last dims."""
    return ops.pad(input, tuple(pad), "constant", value or 0)


# ---- pointwise functions with arguments of their own ----

def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """The Gaussian error linear unit."""
    return ops.gelu(input, approximate)


def elu(input: Tensor, alpha: float = 1.0) -> Tensor:
    """The exponential linear unit."""
    return ops.elu(input, alpha)


def leaky_relu(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """The identity above 0, a slope below."""
    return mint.where(input > 0, input, input * negative_slope)


def zeros_like(input: Tensor, dtype: Any = None) -> Tensor:
    """Zeros of the same shape."""
    return ops.zeros_like(input, dtype=dtype)


def ones_like(input: Tensor, dtype: Any = None) -> Tensor:
    """Ones of the same shape."""
    return ops.ones_like(input, dtype=dtype)


def full_like(input: Tensor, fill_value: Any, dtype: Any = None) -> Tensor:
    """One number everywhere, of the same shape."""
    return ops.full_like(input, fill_value, dtype=dtype)


def rand_like(input: Tensor, dtype: Any = None) -> Tensor:
    """Numbers of [0, 1), of the same shape."""
    return random.uniform(input.shape, dtype or input.dtype)


def randn_like(input: Tensor, dtype: Any = None) -> Tensor:
    """Normal numbers of the same shape."""
    return random.normal(input.shape, dtype or input.dtype)


def randint_like(input: Tensor, low: int, high: int, dtype: Any = None) -> Tensor:
    """Whole numbers from ``low`` on and below ``high``, of the same shape."""
    return random.integers(input.shape, low, high, dtype or input.dtype)


def bernoulli(input: Tensor, p: Any = None) -> Tensor:
    """1 with the probability that stands in ``input``, or with ``p``, else 0."""
    chance = input if p is None else p
    return (random.uniform(input.shape, mindspore.float64) < chance).astype(input.dtype)


def div(input: Any, other: Any, rounding_mode: Optional[str] = None) -> Tensor:
    """The quotient."""
    return mint.div(input, other, rounding_mode=rounding_mode)


def add(input: Any, other: Any, alpha: Any = 1) -> Tensor:
    """The sum of two."""
    return input + other if alpha == 1 else input + alpha * other


def sub(input: Any, other: Any, alpha: Any = 1) -> Tensor:
    """The difference of two."""
    return input - other if alpha == 1 else input - alpha * other


def where(condition: Tensor, input: Any, other: Any) -> Tensor:
    """Elements of one or the other."""
    return ops.where(condition, input, other)


def masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    """A number at the places of a mask."""
    # The kernel wants the tensor's own dtype.
    value = value if isinstance(value, Tensor) else Tensor(value, input.dtype)
    return ops.masked_fill(input, mask, value.astype(input.dtype))


def to(input: Tensor, dtype: Any) -> Tensor:
    """Another dtype."""
    return input.astype(dtype)


def type_as(input: Tensor, other: Tensor) -> Tensor:
    """The dtype of another tensor."""
    return input.astype(other.dtype)


def _written(input: Tensor, value: Any) -> Tensor:
    """``input`` itself, which MindSpore's own does not return, with the values of another."""
    input.copy_(value)
    return input


def copy_(input: Tensor, src: Tensor) -> Tensor:
    """The values of another tensor, in place."""
    return _written(input, history.copied(src) if isinstance(src, Tensor) else src)


def add_(input: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    """A sum in place, which MindSpore's own is not on the CPU."""
    return _written(input, add(input, other, alpha))


def sub_(input: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    """A difference in place."""
    return _written(input, sub(input, other, alpha))


def mul_(input: Tensor, other: Any) -> Tensor:
    """A product in place."""
    return _written(input, input * other)


def div_(input: Tensor, other: Any) -> Tensor:
    """A quotient in place."""
    return _written(input, input / other)


def zero_(input: Tensor) -> Tensor:
    """Zeros in place."""
    return _written(input, input * 0)


def fill_(input: Tensor, value: Any) -> Tensor:
    """A number everywhere, in place."""
    return _written(input, input * 0 + value)


# ---- values for Python ----

def item(input: Tensor) -> Any:
    """The one value."""
    return Tensor.item(input)


def tolist(input: Tensor) -> Any:
    """All values."""
    return Tensor.tolist(input)


def numpy(input: Tensor) -> Any:
    """All values, copied."""
    return Tensor.asnumpy(input).copy()

"""Reductions over a sharded dim that are no sums: what is sent is as small as the result.

Each is made of reductions that a collective can finish: a maximum or a sum over the ranks.  Ties,
nan, empty shards and gradients come out as those of the operator on the whole tensor.
"""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.tensor_redistribution import redistribute
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.platform import get_platform

platform = get_platform()

_INFINITY = float("inf")


def extremum(x: DTensor, dims: Sequence[int], keep: bool, op: str, of_nan: str = "all"
             ) -> DTensor:
    """The largest (``op="max"``) or smallest (``"min"``) elements; ties share the gradient.

    ``of_nan`` says who gets the gradient of a result of nan: ``"all"`` elements get nan, those that
    are ``"nan"`` share it, or ``"none"`` gets any.
    """
    x = _without_summands(x)
    best = _best(x, dims, op)
    if platform.needs_gradient(x):
        fixed = x.detach()
        hits = fixed == best
        hits = (hits | fixed.isnan() if of_nan == "nan" else hits).to(x.dtype)
        count = _whole(hits.sum(dims, True))
        if of_nan == "none":
            count = platform.masked_fill(count, count == 0, 1)
        best = _value_of_elements(x, best, hits / count)
    return best if keep else best.squeeze(tuple(dims))


def extremum_with_index(x: DTensor, dim: int, keep: bool, op: str) -> tuple[DTensor, DTensor]:
    """The largest or smallest elements along ``dim`` and where the first of them is."""
    x = _without_summands(x)
    best = _best(x, (dim,), op)
    index, own = _first_index(x, best, (dim,))
    if platform.needs_gradient(x):
        best = _value_of_elements(x, best, own.to(x.dtype))
    return (best, index) if keep else (best.squeeze(dim), index.squeeze(dim))


def index_of_extremum(x: DTensor, dims: Sequence[int], keep: bool, op: str) -> DTensor:
    """Where the first of the largest or smallest elements is, counted over ``dims`` row by row."""
    x = _without_summands(x.detach())
    index, _ = _first_index(x, _best(x, dims, op), dims)
    return index if keep else index.squeeze(tuple(dims))


def log_sum_exp(x: DTensor, dims: Sequence[int], keep: bool) -> DTensor:
    """The logarithm of the sum of exponentials, safe from overflow."""
    wide = _float_at_least(x)
    peak = extremum(wide.detach(), dims, True, "max")
    peak = platform.masked_fill(peak, peak.abs() == _INFINITY, 0)
    total = (wide - peak).exp().sum(dims, True).log() + peak
    total = total.to(x.dtype) if x.is_floating_point() else total
    return total if keep else total.squeeze(tuple(dims))


def product(x: DTensor, dims: Sequence[int], keep: bool, dtype: Any) -> DTensor:
    """The product of the elements."""
    x = _without_summands(x)
    part = platform.undress(x)
    for dim in dims:
        part = part.prod(dim, True, dtype=dtype)
    total = _finish(part, _reduced_spec(x, dims, "product"), _axes(x.layout, dims))
    return total if keep else total.squeeze(tuple(dims))


def mean_without_nan(x: DTensor, dims: Sequence[int], keep: bool, dtype: Any) -> DTensor:
    """The mean of the elements that are numbers."""
    x = _without_summands(x)
    known = _whole(x.isnan().logical_not().sum(dims, keep))
    return x.nansum(dims, keep, dtype=dtype) / known


def variance(x: DTensor, dims: Sequence[int], keep: bool, correction: float
             ) -> tuple[DTensor, DTensor]:
    """The variance and the mean."""
    mean = _whole(x.mean(dims, True))
    apart = x - mean
    square = (apart * apart.conj()).real if x.is_complex() else apart * apart
    count = prod(x.shape[dim] for dim in dims)
    result = _whole(square.sum(dims, True)) / max(count - correction, 0)
    return (result, mean) if keep else (result.squeeze(tuple(dims)), mean.squeeze(tuple(dims)))


def root(x: DTensor, power: float = 0.5) -> DTensor:
    """A root that is 0 with a gradient of 0 at 0, or at infinity where ``power`` is negative."""
    zero = x.detach() == (0 if power > 0 else _INFINITY)
    return platform.masked_fill(platform.masked_fill(x, zero, 1) ** power, zero, 0)


def norm(x: DTensor, dims: Sequence[int], keep: bool, order: float) -> DTensor:
    """The vector norm of any order."""
    size = x.abs()
    if order in (_INFINITY, -_INFINITY):
        return extremum(size, dims, keep, "max" if order > 0 else "min", "none")
    if order == 0:
        size = _without_summands(size)
        counted = (size.detach() != 0).to(size.dtype)
        count = _whole(counted.sum(dims, True))
        if platform.needs_gradient(size):
            count = _value_of_elements(size, count, counted * 0)
        return count if keep else count.squeeze(tuple(dims))
    zero = None
    if order == 1:
        return size.sum(dims, keep)
    if order < 1:
        zero = x.detach() == 0
        size = platform.masked_fill(size, zero, 1)
    powers = size * size if order == 2 else size ** order
    if zero is not None:
        powers = platform.masked_fill(powers, zero, 0 if order > 0 else _INFINITY)
    return root(_whole(powers.sum(dims, keep)), 1.0 / order)


def _without_summands(x: DTensor) -> DTensor:
    return _whole(x) if any(placement.is_partial() for placement in x.placements) else x


def _whole(x: DTensor) -> DTensor:
    """``x`` with what is Partial summed."""
    return x.redistribute(placements=[
        Replicate() if placement.is_partial() else placement for placement in x.placements])


def _float_at_least(x: DTensor) -> DTensor:
    """Half types as float32, in which the kernels sum them too."""
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def _axes(layout: Layout, dims: Sequence[int]) -> list[int]:
    return [axis for dim in dims for axis in layout.axes_of(dim)]


def _reduced_spec(x: DTensor, dims: Sequence[int], op: str) -> TensorSpec:
    """Spec of what each rank makes of its part: the dims have size 1, the axes are Partial."""
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    layout = x.layout.replaced(dict.fromkeys(_axes(x.layout, dims), Partial(op)))
    return TensorSpec(layout, shape)


def _finish(part: Any, spec: TensorSpec, axes: Sequence[int]) -> DTensor:
    target = spec.layout.replaced(dict.fromkeys(axes, Replicate()))
    return platform.dress(redistribute(part, spec, target), DTensor, TensorSpec(target, spec.shape))


def _reduce_parts(x: DTensor, local: Any, dims: Sequence[int], op: str) -> DTensor:
    """The extremum over all ranks of ``local``, which lies like ``x``; the dims keep size 1."""
    spec = _reduced_spec(x, dims, op)
    if any(local.shape[dim] == 0 for dim in dims):
        lowest, highest = platform.extreme_values(local)
        part = local.new_full(spec.local_shape, lowest if op == "max" else highest)
    else:
        part = (local.amax if op == "max" else local.amin)(tuple(dims), True)
    return _finish(part, spec, _axes(x.layout, dims))


def _best(x: DTensor, dims: Sequence[int], op: str) -> DTensor:
    return _reduce_parts(x, platform.undress(x.detach()), dims, op)


def _value_of_elements(x: DTensor, value: DTensor, share: DTensor) -> DTensor:
    """``value``, whose gradient goes to the elements of ``x`` by their share in it.

    The gradient of a replicated value is whole on every rank, so none is sent.
    """
    known, factor = platform.undress(value), platform.undress(share)
    local = platform.apply_with_gradient(
        lambda _: known, lambda grad: grad * factor, platform.undress(x))
    return platform.dress(local, DTensor, value._spec)


def _first_index(x: DTensor, best: DTensor, dims: Sequence[int]) -> tuple[DTensor, DTensor]:
    """The index of the first best element, and the mask of that element."""
    x = x.detach()
    hits = (x == best) | x.isnan()  # nan is above and below everything
    local = platform.undress(hits)
    places = platform.tensor_from_numpy(_places(x, dims)).to(local.device)
    ours = platform.masked_fill(places, ~local, prod(x.shape[dim] for dim in dims))
    index = _reduce_parts(x, ours, dims, "min")
    own = platform.dress(places == platform.undress(index), DTensor, hits._spec)
    return index, own & hits


def _places(x: DTensor, dims: Sequence[int]) -> np.ndarray:
    """Where this rank's elements are among all, counted over ``dims`` row by row."""
    bounds = x.layout.local_bounds(x.shape)
    places = np.zeros((1,) * len(x.shape), dtype=np.int64)
    count = 1
    for dim in reversed(dims):
        start, length = bounds[dim]
        places = places + (np.arange(start, start + length) * count).reshape(
            [-1 if other == dim else 1 for other in range(len(x.shape))])
        count *= x.shape[dim]
    return places


def like_pair(function: Callable[..., Any], pair: tuple[Any, Any], dim: Optional[int]) -> Any:
    """The pair in the named tuple that ``function`` returns."""
    sample = platform.tensor_from_numpy(np.zeros(1, dtype=np.float32))
    return type(function(sample) if dim is None else function(sample, dim=0))(pair)

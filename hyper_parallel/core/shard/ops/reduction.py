"""Reductions: over a sharded dim a sum stays Partial; see over_shards.py for the others."""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import rule_for
from hyper_parallel.core.shard._rule import (
    Call, Decomposition, Dims, Rule, named_dims, positive_dims)
from hyper_parallel.core.shard.ops import over_shards


def _dims_and_keep(call: Call, position: int = 1) -> tuple[Any, bool]:
    """The ``dim`` and ``keepdim`` arguments, also by their numpy names."""
    dim = call.argument(position, "dim", call.kwargs.get("axis"))
    keep = call.argument(position + 1, "keepdim", call.kwargs.get("keepdims", False))
    return dim, bool(keep)


def _result_dims(operand: Dims, reduced: Sequence[int], keep: bool) -> Dims:
    return tuple(() if dim in reduced else names for dim, names in enumerate(operand)
                 if keep or dim not in reduced)


def _reduction(call: Call, dims: Sequence[int], keep: bool, results: int = 1, **options: Any
               ) -> Rule:
    operand, sizes = named_dims(call.shapes[0])
    if options.pop("need_whole", False):
        options["whole"] = frozenset(f"d{dim}" for dim in dims)
    return Rule((operand,), (_result_dims(operand, dims, keep),) * results, sizes, **options)


def _named(dims: Sequence[int], op: str) -> dict[str, str]:
    return {f"d{dim}": op for dim in dims}


@rule_for("sum nansum")
def _sum(call: Call) -> Rule:
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    return _reduction(call, dims, keep, reduced=_named(dims, "sum"),
                      terms=((0,),) if call.name == "sum" else ())


@rule_for("mean")
def _mean(call: Call) -> Rule:
    """The mean of a shard is no summand of the mean; its sum over the global count is."""
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    count = prod(call.shapes[0][d] for d in dims)

    def localize(operands: Sequence[TensorSpec], _: Sequence[TensorSpec]) -> Optional[Callable]:
        if not any(operands[0].layout.axes_of(d) for d in dims):
            return None

        def mean_of_shard(x: Any, *_: Any, dtype: Any = None, **__: Any) -> Any:
            if not (x.is_floating_point() or x.is_complex() or dtype is not None):
                return x.mean()  # which says that integers have none
            return (x.sum(dims, keep, dtype=dtype) if dims else x.sum(dtype=dtype)) / count

        return mean_of_shard

    return _reduction(call, dims, keep, reduced=_named(dims, "sum"), terms=((0,),),
                      localize=localize)


def _sharded(call: Call, dims: Sequence[int]) -> bool:
    """Whether the reduction spans shards; where there are no elements the kernel has to say so."""
    return any(call.specs[0].layout.axes_of(dim) for dim in dims) and \
        all(call.shapes[0][dim] for dim in dims)


def _finished(call: Call, function: Callable[..., Any]) -> Any:
    """A reduction that ``function`` computes where it spans shards, nothing left to finish."""
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    if not _sharded(call, dims):
        return _reduction(call, dims, keep, need_whole=True)
    dtype = call.kwargs.get("dtype")
    return _of_tensor(lambda x: function(x, dims, keep, dtype))


@rule_for("prod")
def _of_factors(call: Call) -> Any:
    """Finished at once: no gradient of one rank's factor is a summand of the product's."""
    return _finished(call, over_shards.product)


@rule_for("any all count_nonzero")
def _associative(call: Call) -> Rule:
    """What is true of some or of all elements."""
    op = {"any": "max", "all": "min", "count_nonzero": "sum"}[call.name]
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    return _reduction(call, dims, keep, reduced=_named(dims, op))


@rule_for("amax amin")
def _extremes(call: Call) -> Any:
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    if not _sharded(call, dims):
        return _reduction(call, dims, keep, need_whole=True)
    return _of_tensor(lambda x: over_shards.extremum(x, dims, keep, call.name[1:]))


@rule_for("max min")
def _extremum(call: Call) -> Any:
    if len(call.specs) == 2:
        return None
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    if not _sharded(call, dims):
        return _reduction(call, dims, keep, 1 if dim is None else 2, need_whole=True)
    if dim is None:
        return _of_tensor(lambda x: over_shards.extremum(x, dims, False, call.name, "nan"))
    func, op = call.func, call.name
    return _of_tensor(lambda x: over_shards.like_pair(
        func, over_shards.extremum_with_index(x, *dims, keep, op), 0))


@rule_for("aminmax")
def _both_extremes(call: Call) -> Any:
    dim, keep = call.kwargs.get("dim"), bool(call.kwargs.get("keepdim", False))
    dims = positive_dims(dim, len(call.shapes[0]))
    if not _sharded(call, dims):
        return _reduction(call, dims, keep, 2, need_whole=True)
    func = call.func
    return _of_tensor(lambda x: over_shards.like_pair(func, (
        over_shards.extremum(x, dims, keep, "min"), over_shards.extremum(x, dims, keep, "max")),
        dim))


@rule_for("argmax argmin")
def _index_of_extremum(call: Call) -> Any:
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    if _sharded(call, dims):
        return _of_tensor(lambda x: over_shards.index_of_extremum(x, dims, keep, call.name[3:]))
    return None if dim is None and keep else _reduction(call, dims, keep, need_whole=True)


@rule_for("logsumexp special_logsumexp")
def _log_sum_exp(call: Call) -> Any:
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    if not _sharded(call, dims):
        return _reduction(call, dims, keep, need_whole=True)
    return _of_tensor(lambda x: over_shards.log_sum_exp(x, dims, keep))


@rule_for("var std var_mean std_mean")
def _variance(call: Call) -> Any:
    """``(unbiased)``, ``(dim, unbiased, keepdim)`` or ``(dim, *, correction, keepdim)``."""
    dim, unbiased = call.argument(1, "dim", call.kwargs.get("axis")), call.argument(2, "unbiased")
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    keep = bool(call.argument(3, "keepdim", call.kwargs.get("keepdims", False)))
    correction = call.kwargs.get("correction")
    if correction is None:
        correction = 0 if unbiased is False else 1
    dims = positive_dims(dim, len(call.shapes[0]))
    pair = call.name.endswith("_mean")
    if not _sharded(call, dims):
        return _reduction(call, dims, keep, 2 if pair else 1, need_whole=True,
                          localize=_quiet_when_empty(dims, keep, pair))
    deviation = call.name.startswith("std")

    def moments(x: Any) -> Any:
        spread, mean = over_shards.variance(x, dims, keep, correction)
        spread = over_shards.root(spread) if deviation else spread
        return (spread, mean) if pair else spread

    return _of_tensor(moments)


def _of_tensor(function: Callable[[Any], Any]) -> Decomposition:
    """A function of the operator's tensor alone: its other arguments were read from the call."""
    def reduce(*args: Any, **kwargs: Any) -> Any:
        return function(args[0] if args else kwargs.get("input", kwargs.get("x")))

    return Decomposition(reduce)


def _quiet_when_empty(dims: Sequence[int], keep: bool, pair: bool) -> Callable:
    """A rank without elements must not warn that they have no degrees of freedom."""
    def localize(operands: Sequence[TensorSpec], _: Sequence[TensorSpec]) -> Optional[Callable]:
        if prod(operands[0].local_shape) or not prod(operands[0].shape):
            return None

        def nothing(x: Any, *_: Any, **__: Any) -> Any:
            empty = x.abs().sum(dims, keep)
            return (empty, empty.clone()) if pair else empty

        return nothing

    return localize


@rule_for("nanmean")
def _mean_without_nan(call: Call) -> Any:
    return _finished(call, over_shards.mean_without_nan)


@rule_for("median nanmedian mode kthvalue")
def _whole_reduction(call: Call) -> Optional[Rule]:
    """The reduced dims are made whole, the others may stay sharded."""
    dim, keep = _dims_and_keep(call, 2 if call.name == "kthvalue" else 1)
    if dim is None and call.name in ("mode", "kthvalue"):
        dim = -1
    dims = positive_dims(dim, len(call.shapes[0]))
    pair = call.name in ("mode", "kthvalue") or \
        (call.name in ("median", "nanmedian") and dim is not None)
    return _reduction(call, dims, keep, 2 if pair else 1, need_whole=True)


@rule_for("linalg_vector_norm norm")
def _vector_norm(call: Call) -> Any:
    """Over sharded dims a number is sent and not the tensor."""
    order = call.argument(1, "ord" if call.name == "linalg_vector_norm" else "p", 2)
    if order in ("fro", None):
        order = 2
    if isinstance(order, str):
        return None  # a norm of matrices
    dims = positive_dims(call.argument(2, "dim"), len(call.shapes[0]))
    keep = bool(call.argument(3, "keepdim", False))
    if not _sharded(call, dims):
        return _reduction(call, dims, keep, need_whole=True)
    dtype = call.kwargs.get("dtype")
    return _of_tensor(lambda x: over_shards.norm(
        x if dtype is None else x.to(dtype), dims, keep, order))


@rule_for("quantile svd_lowrank pca_lowrank")
def _needs_all(_: Call) -> None:
    """Runs on gathered tensors; those with random numbers in them not part by part."""

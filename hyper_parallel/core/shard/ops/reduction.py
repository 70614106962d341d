"""Reductions: over a sharded dim a sum stays Partial, the others need the dim whole."""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import rule_for
from hyper_parallel.core.shard._rule import (
    Call, Decomposition, Dims, Rule, named_dims, positive_dims)
from hyper_parallel.core.placement_types import Replicate


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


@rule_for("amax amin prod any all count_nonzero logsumexp var std argmax argmin norm aminmax "
          "median nanmedian mode kthvalue var_mean std_mean nanmean quantile")
def _whole_reduction(call: Call) -> Optional[Rule]:
    """The reduced dims are made whole, the others may stay sharded."""
    position = {"norm": 2, "kthvalue": 2, "quantile": 2}.get(call.name, 1)
    if len(call.specs) != 1:
        return None
    if call.name in ("var", "std", "var_mean", "std_mean") and \
            isinstance(call.argument(1, "dim"), bool):
        return None
    dim, keep = _dims_and_keep(call, position)
    if call.name in ("aminmax", "norm", "quantile"):
        return None
    if call.name in ("var", "std", "var_mean", "std_mean"):
        keep = bool(call.kwargs.get("keepdim", call.args[3] if len(call.args) > 3 else False))
    dims = positive_dims(dim, len(call.shapes[0]))
    if call.name in ("argmax", "argmin") and dim is None and keep:
        return None
    pair = call.name in ("var_mean", "std_mean", "mode", "kthvalue") or \
        (call.name in ("median", "nanmedian") and dim is not None)
    variance = call.name in ("var", "std", "var_mean", "std_mean")
    return _reduction(call, dims, keep, 2 if pair else 1, need_whole=True,
                      localize=_quiet_when_empty(dims, keep, pair) if variance else None)


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


@rule_for("max min")
def _extremum(call: Call) -> Optional[Rule]:
    if len(call.specs) == 2:
        return None
    dim, keep = _dims_and_keep(call)
    dims = positive_dims(dim, len(call.shapes[0]))
    return _reduction(call, dims, keep, 1 if dim is None else 2, need_whole=True)


@rule_for("linalg_vector_norm")
def _vector_norm(call: Call) -> Optional[Any]:
    """Over sharded dims the sum of powers is Partial, so a number is sent and not the tensor."""
    order = call.argument(1, "ord", 2)
    dims = positive_dims(call.argument(2, "dim"), len(call.shapes[0]))
    spec = call.specs[0]
    sharded = any(spec.layout.axes_of(dim) for dim in dims)
    if sharded and 0 < order < float("inf"):
        return Decomposition(norm_of_shards)
    if spec.layout.is_replicated() or not sharded:
        keep = bool(call.argument(3, "keepdim", False))
        return _reduction(call, dims, keep, need_whole=True)
    return None


def norm_of_shards(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *,
                   dtype: Any = None) -> Any:
    """The vector norm as the root of a sum of powers."""
    if dtype is not None:
        x = x.to(dtype)
    dims = positive_dims(dim, len(x.shape))
    total = (x.abs() ** ord).sum(dims, keepdim) if dims else x.abs() ** ord
    whole = [Replicate() if placement.is_partial() else placement
             for placement in total.placements]
    return total.redistribute(placements=whole) ** (1.0 / ord)

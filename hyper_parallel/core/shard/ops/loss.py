"""Losses: the mean over a sharded batch is the sum over the ranks by the global count."""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import rule_for
from hyper_parallel.core.shard._rule import Call, Decomposition, Rule, rule_from_notation
from hyper_parallel.core.shard.ops.pointwise import pointwise

_SIMPLE = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits soft_margin_loss
"""


@rule_for(_SIMPLE)
def _elementwise_loss(call: Call) -> Optional[Rule]:
    """Losses that are a function of each element, then a reduction over all of them."""
    reduction = _reduction_of(call)
    if reduction is None:
        return None
    if reduction == "none":
        return pointwise(call)
    result = pointwise(call)
    count = prod(result.result_shape(0))
    names = [factors[0] for factors in result.results[0]]

    def localize(operands: Sequence[TensorSpec], _: Sequence[TensorSpec]) -> Optional[Callable]:
        if reduction == "sum" or all(spec.layout.is_replicated() for spec in operands):
            return None
        func = call.func

        def mean_of_shards(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **{**kwargs, "reduction": "sum"}) / count

        return mean_of_shards

    if any(not spec.shape and len(names) for spec in call.specs):
        return None
    return Rule(result.operands, ((),), result.sizes, reduced=dict.fromkeys(names, "sum"),
                localize=localize)


def _reduction_of(call: Call) -> Optional[str]:
    """The reduction, None where it is given by position or in the deprecated way."""
    tensors = [path for path in call.paths if isinstance(path[0], int)]
    if len(call.args) > len(tensors) or "size_average" in call.kwargs or "reduce" in call.kwargs:
        if call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None or \
                any(value is not None for value in call.args[len(tensors):]):
            return None
    return call.kwargs.get("reduction", "mean")


@rule_for("cross_entropy nll_loss", by_dtype=True)
def _cross_entropy(call: Call) -> Any:
    """Classes are whole, rows may be sharded; the mean is over the rows that count."""
    if len(call.args) > 2 and any(value is not None for value in call.args[3:]):
        return None
    if call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None:
        return None
    reduction = call.kwargs.get("reduction", "mean")
    order = [call.operand(0, "input"), call.operand(1, "target"), call.operand(2, "weight")]
    shape, target = call.shapes[order[0]], call.shapes[order[1]]
    if len(shape) < 2:
        return None
    inner = " ".join(f"s{index}" for index in range(len(shape) - 2))
    rows = f"n {inner}".strip()
    classes = f"n c {inner}".strip()
    by_index = len(target) == len(shape) - 1
    rule = rule_from_notation(
        f"{classes}, {rows if by_index else classes}, c -> "
        + (rows if reduction == "none" else ""), call.shapes, order, whole="c",
        reduced={} if reduction == "none" else dict.fromkeys(rows.split(), "sum"))
    if reduction != "mean":
        return rule
    if all(spec.layout.is_replicated() for spec in call.specs):
        return rule
    return Decomposition(_mean_over_rows(call.func, by_index, prod(shape) // max(shape[1], 1)))


def _mean_over_rows(func: Callable, by_index: bool, rows: int) -> Callable:
    def mean(input: Any, target: Any, weight: Any = None, ignore_index: int = -100,
             reduction: str = "mean", **kwargs: Any) -> Any:
        del reduction
        total = func(input, target, weight, ignore_index=ignore_index, reduction="sum", **kwargs)
        if not by_index:
            return total / rows
        counted = target != ignore_index
        if weight is None:
            return total / counted.sum()
        picked = weight[target.masked_fill(counted.logical_not(), 0).reshape(-1)]
        return total / (picked * counted.reshape(-1)).sum()

    return mean

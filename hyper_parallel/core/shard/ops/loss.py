"""Losses: the mean over a sharded batch is the sum over the ranks by the global count."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import rule_for
from hyper_parallel.core.shard._rule import Call, Decomposition, Rule, rule_from_notation
from hyper_parallel.core.shard.ops.pointwise import pointwise
from hyper_parallel.platform import get_platform

platform = get_platform()

_SIMPLE = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits soft_margin_loss
"""

# Their mean may be one by the weights, which are not in the same place in all of them.
_WEIGHTED_MEAN = ("mse_loss", "l1_loss", "huber_loss")


@rule_for(_SIMPLE)
def _elementwise_loss(call: Call) -> Any:
    """Losses that are a function of each element, then a reduction over all of them."""
    body = platform.decomposed(call.func)
    if body is not None and call.name in _WEIGHTED_MEAN and call.kwargs.get("weight") is not None:
        return Decomposition(body)
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
    """Rows may be sharded, the mean is over those that count; so may classes, see below."""
    if call.argument(3, "size_average") is not None or call.argument(5, "reduce") is not None:
        return None
    order = [call.operand(0, "input"), call.operand(1, "target"), call.operand(2, "weight")]
    shape, target = call.shapes[order[0]], call.shapes[order[1]]
    dim = 1 if len(shape) > 1 else 0
    by_index = len(target) == len(shape) - 1
    by_probability = call.name == "cross_entropy" and len(target) == len(shape) and \
        call.argument(1, "target").is_floating_point()
    if call.specs[order[0]].layout.axes_of(dim) and (by_index or by_probability):
        return Decomposition(_LossOverClasses(
            call.name == "cross_entropy", call.argument(4, "ignore_index", -100),
            call.argument(6, "reduction", "mean"), call.argument(7, "label_smoothing", 0.0)))
    if len(call.args) > 3 or len(shape) < 2:
        return None
    reduction = call.kwargs.get("reduction", "mean")
    inner = " ".join(f"s{index}" for index in range(len(shape) - 2))
    rows = f"n {inner}".strip()
    classes = f"n c {inner}".strip()
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
        return total / _row_weights(target, weight, ignore_index).sum()

    return mean


def _row_weights(target: Any, weight: Any, ignore_index: int) -> Any:
    """What each row counts in the mean: nothing where it is ignored, else its class' weight."""
    counted = target != ignore_index
    if weight is None:
        return counted
    classes = platform.masked_fill(target, counted.logical_not(), 0)
    return weight[classes.reshape(-1)].reshape(target.shape) * counted


@dataclass(frozen=True)
class _LossOverClasses:
    """The loss where the classes are spread over ranks, so that no rank sees a whole row.

    A maximum and two sums over the ranks for each row are all that it needs of the others' logits.
    """

    from_logits: bool
    ignore_index: int
    reduction: str
    smoothing: float

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(("input", "target", "weight"), args)), **kwargs}
        return self._loss(given["input"], given["target"], given.get("weight"))

    def _loss(self, input: Any, target: Any, weight: Any) -> Any:
        if self.reduction not in ("none", "sum", "mean"):
            raise ValueError(f"{self.reduction!r} is not a valid value for reduction; it is "
                             "'mean', 'sum' or 'none'.")
        if not self.from_logits:
            return self._of_scores(input, None, target, weight)
        dim = 1 if len(input.shape) > 1 else 0
        # Half types are summed in float32, as the kernel does within.
        logits = input.float() if input.itemsize < 4 else input
        shifted = logits - logits.detach().amax(dim, True)
        norm = shifted.exp().sum(dim).log()
        return self._of_scores(shifted, norm, target, weight).to(input.dtype)

    def _of_scores(self, score: Any, norm: Any, target: Any, weight: Any) -> Any:
        """The loss where ``score - norm``, or ``score`` alone, is the log-probability.

        ``norm`` has no classes. The two meet only after the classes of ``score`` are summed, so
        that the gradient of ``norm`` is whole on every rank.
        """
        dim = 1 if len(score.shape) > 1 else 0
        if target.is_floating_point():
            rows = self._by_probability(score, norm, target, _along_classes(weight, score, dim))
            counts = None
        else:
            counts = _row_weights(target, weight, self.ignore_index)
            rows = self._by_index(score, norm, target, counts)
            if self.smoothing:
                even = self._of_all_classes(score, norm, _along_classes(weight, score, dim))
                rows = rows * (1 - self.smoothing) + even * (self.smoothing / score.shape[dim])
            # Not by a product: where every row is ignored the gradient of the mean is infinite.
            rows = platform.masked_fill(rows, target == self.ignore_index, 0)
        if self.reduction == "none":
            return rows
        total = rows.sum()
        if self.reduction == "mean":
            total = total / (max(prod(rows.shape), 1) if counts is None else counts.sum())
        return total

    def _by_probability(self, score: Any, norm: Any, target: Any, by_class: Any) -> Any:
        dim = 1 if len(score.shape) > 1 else 0
        share = target
        if self.smoothing:
            share = target * (1 - self.smoothing) + self.smoothing / score.shape[dim]
        share = share if by_class is None else share * by_class
        return norm * share.sum(dim) - (score * share).sum(dim)

    def _by_index(self, score: Any, norm: Any, target: Any, weights: Any) -> Any:
        dim = 1 if len(score.shape) > 1 else 0
        known = platform.masked_fill(target, target == self.ignore_index, 0)
        picked = score.gather(dim, known.unsqueeze(dim)).squeeze(dim)
        return (-picked if norm is None else norm - picked) * weights

    @staticmethod
    def _of_all_classes(score: Any, norm: Any, by_class: Any) -> Any:
        """The sum of every class' loss, by which smoothing spreads the target."""
        dim = 1 if len(score.shape) > 1 else 0
        if by_class is None:
            return norm * score.shape[dim] - score.sum(dim)
        return norm * by_class.sum() - (score * by_class).sum(dim)


def _along_classes(weight: Any, score: Any, dim: int) -> Any:
    """The weights of the classes, to be multiplied with ``score``."""
    return None if weight is None else weight.reshape(-1, *(1,) * (len(score.shape) - dim - 1))

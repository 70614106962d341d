"""Softmax and the norms: the dims they normalise over are made whole."""
from __future__ import annotations

from typing import Optional

from hyper_parallel.core.shard._registry import rule_for
from hyper_parallel.core.shard._rule import Call, Rule, named_dims, positive_dim, rule_from_notation


@rule_for("softmax log_softmax softmin special_softmax special_log_softmax _safe_softmax")
def _softmax(call: Call) -> Rule:
    operand, sizes = named_dims(call.shapes[0])
    dim = call.argument(1, "dim")
    whole = sizes if dim is None else (f"d{positive_dim(dim, len(operand))}",)
    return Rule((operand,), (operand,), sizes, whole=frozenset(whole))


@rule_for("layer_norm rms_norm")
def _norm(call: Call) -> Optional[Rule]:
    shape = call.argument(1, "normalized_shape")
    count = 1 if isinstance(shape, int) else len(shape)
    names = " ".join(f"d{index}" for index in range(count))
    order = [call.operand(0, "input"), call.operand(2, "weight"), call.operand(3, "bias")]
    return rule_from_notation(f"... {names}, {names}, {names} -> ... {names}", call.shapes, order,
                              whole=names)


@rule_for("native_layer_norm")
def _norm_with_moments(call: Call) -> Optional[Rule]:
    """As above; mean and variance keep the dims that they were taken over, with size 1."""
    rule = _norm(call)
    shape = call.shapes[0]
    kept = len(shape) - len(call.argument(1, "normalized_shape"))
    moments = (*rule.results[0][:kept], *((),) * (len(shape) - kept))
    return Rule(rule.operands, (rule.results[0], moments, moments), rule.sizes, whole=rule.whole)

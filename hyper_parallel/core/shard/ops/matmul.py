"""Products that sum over a shared dim: sharding that dim makes the result Partial."""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import add_rule, rule_for
from hyper_parallel.core.shard._rule import Call, Rule, rule_from_notation
from hyper_parallel.platform import get_platform

_Tensor = get_platform().Tensor


@rule_for("linear")
def _linear(call: Call) -> Optional[Rule]:
    order = [call.operand(0, "input"), call.operand(1, "weight"), call.operand(2, "bias")]
    if len(call.shapes[order[1]]) != 2:
        return None
    terms = [(order[0], order[1])] + [(order[2],)] * (order[2] is not None)
    return rule_from_notation("... i, o i, o -> ... o", call.shapes, order,
                              reduced={"i": "sum"}, terms=tuple(terms))


@rule_for("matmul mm bmm mv dot inner_product")
def _matmul(call: Call) -> Rule:
    left = "i" if len(call.shapes[0]) == 1 else "... m i"
    right = "i" if len(call.shapes[1]) == 1 else "... i n"
    result = " ".join(name for name in ("...", "m", "n") if name in (left + " " + right).split())
    return rule_from_notation(f"{left}, {right} -> {result}", call.shapes, reduced={"i": "sum"},
                              terms=((0, 1),))


def _with_addend(dims: str, left: str, right: str):
    """The rule of ``addend + left @ right``; the addend may be broadcast."""

    def maker(call: Call) -> Rule:
        names = dims.split()
        kept = len(call.shapes[0])
        addend = " ".join(names[len(names) - kept:])
        return rule_from_notation(f"{addend}, {left}, {right} -> {dims}", call.shapes,
                                  reduced={"i": "sum"}, terms=((0,), (1, 2)))

    return maker


add_rule("addmm", _with_addend("m n", "m i", "i n"))
add_rule("addmv", _with_addend("m", "m i", "i"))
add_rule("baddbmm", _with_addend("b m n", "b m i", "b i n"))
add_rule("outer ger", lambda call: rule_from_notation("m, n -> m n", call.shapes,
                                                      terms=((0, 1),)))


@rule_for("einsum")
def _einsum(call: Call) -> Optional[Rule]:
    """The equation is the rule; a letter twice in one operand is a diagonal and stays whole."""
    equation = call.args[0]
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if any("..." in text and not text.startswith("...") for text in operands) or \
            len(operands) != len(call.shapes):
        return None
    letters = [letter for text in operands for letter in text.replace("...", "")]
    if not arrow:
        ellipsis = "..." if "..." in left else ""
        right = ellipsis + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    if "..." in right and not right.startswith("..."):
        return None
    if any(len(set(text.replace("...", ""))) < len(text.replace("...", "")) for text in operands):
        return None
    notation = ", ".join(map(_spaced, operands)) + " -> " + _spaced(right)
    reduced = {letter: "sum" for letter in letters if letter not in right}
    return rule_from_notation(notation, call.shapes, reduced=reduced,
                              terms=(tuple(range(len(operands))),))


def _spaced(text: str) -> str:
    head = ["..."] if text.startswith("...") else []
    return " ".join(head + list(text.replace("...", "")))


@rule_for("scaled_dot_product_attention")
def _attention(call: Call) -> Optional[Rule]:
    """Batch and heads are free, queries too unless a causal mask ties them to their place."""
    shapes = call.shapes
    order = [call.operand(0, "query"), call.operand(1, "key"), call.operand(2, "value"),
             call.operand(3, "attn_mask")]
    query, key = shapes[order[0]], shapes[order[1]]
    if len(query) < 3:
        return None
    causal = bool(call.argument(5, "is_causal", False))
    dropout = float(call.argument(4, "dropout_p", 0.0)) > 0
    whole = {"s", "e", "v"} | ({"l"} if causal else set())
    heads = ("h", "h")
    if call.kwargs.get("enable_gqa") and query[-3] != key[-3]:
        heads = ("(h g)", "h")
    return rule_from_notation(
        f"... {heads[0]} l e, ... {heads[1]} s e, ... {heads[1]} s v, "
        f"{_mask_dims(shapes, order[3], heads[0])} -> ... {heads[0]} l v",
        shapes, order, whole=whole, random=dropout, localize=_linked_when_empty)


def _linked_when_empty(operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
                       ) -> Optional[Callable]:
    """A rank without queries or keys must still reach every operand in the backward pass.

    The kernels forget the mask when there is nothing to mask, and this rank would then miss the
    collective of the mask's gradient.
    """
    if all(prod(spec.local_shape) for spec in operands):
        return None
    shape = results[0].local_shape

    def nothing(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values())
                   if isinstance(value, _Tensor) and value.is_floating_point()]
        return tensors[0].new_zeros(shape) + sum(tensor.sum() for tensor in tensors)

    return nothing


def _mask_dims(shapes, index: Optional[int], heads: str) -> str:
    """Dims of the mask, which is aligned at the right and may lack the outer ones."""
    ndim = 2 if index is None else len(shapes[index])
    return {1: "s", 2: "l s", 3: f"{heads} l s"}.get(ndim, f"... {heads} l s")

"""Products that sum over a shared dim: sharding that dim makes the result Partial."""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import add_rule, rule_for
from hyper_parallel.core.shard._rule import (
    Call, Decomposition, Rule, positive_dim, rule_from_notation)
from hyper_parallel.core.shard.ops._empty import linked_zeros, product_of
from hyper_parallel.core.shard.ops.pointwise import pointwise
from hyper_parallel.platform import get_platform

platform = get_platform()


@rule_for("linear")
def _linear(call: Call) -> Optional[Rule]:
    order = [call.operand(0, "input"), call.operand(1, "weight"), call.operand(2, "bias")]
    if len(call.shapes[order[1]]) != 2:
        return None
    terms = [(order[0], order[1])] + [(order[2],)] * (order[2] is not None)
    return rule_from_notation("... i, o i, o -> ... o", call.shapes, order,
                              reduced={"i": "sum"}, terms=tuple(terms))


@rule_for("matmul mm bmm mv dot vdot")
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
        summed = {name: "sum" for name in ("b", "i") if name not in names}
        return rule_from_notation(f"{addend}, {left}, {right} -> {dims}", call.shapes,
                                  reduced=summed, terms=((0,), (1, 2)))

    return maker


add_rule("addmm", _with_addend("m n", "m i", "i n"))
add_rule("addmv", _with_addend("m", "m i", "i"))
add_rule("baddbmm", _with_addend("b m n", "b m i", "b i n"))
add_rule("addbmm", _with_addend("m n", "b m i", "b i n"))
add_rule("addr", _with_addend("m n", "m", "n"))
add_rule("outer ger", lambda call: rule_from_notation("m, n -> m n", call.shapes,
                                                      terms=((0, 1),)))


@rule_for("inner")
def _inner(call: Call) -> Rule:
    left, right = call.shapes
    if not left or not right:
        return pointwise(call, terms=((0, 1),))
    rows, columns = (" ".join(f"{name}{dim}" for dim in range(len(shape) - 1))
                     for name, shape in (("m", left), ("n", right)))
    return rule_from_notation(f"{rows} i, {columns} i -> {rows} {columns}", call.shapes,
                              reduced={"i": "sum"}, terms=((0, 1),))


@rule_for("tensordot")
def _tensordot(call: Call) -> Optional[Any]:
    """``dims``: how many of the last and first dims, or which of either, are summed over."""
    body = platform.decomposed(call.func)
    if body is not None:
        return Decomposition(body)  # which brings the dims into the form of two lists
    left, right = call.shapes
    pairs = [(positive_dim(first, len(left)), positive_dim(second, len(right)))
             for first, second in zip(call.args[2], call.args[3])]
    names = [[f"m{dim}" for dim in range(len(left))], [f"n{dim}" for dim in range(len(right))]]
    for count, (first, second) in enumerate(pairs):
        if left[first] != right[second]:
            return None
        names[0][first] = names[1][second] = f"i{count}"
    kept = [name for name in (*names[0], *names[1]) if not name.startswith("i")]
    return rule_from_notation(
        f"{' '.join(names[0])}, {' '.join(names[1])} -> {' '.join(kept)}", call.shapes,
        reduced={f"i{count}": "sum" for count in range(len(pairs))}, terms=((0, 1),))


@rule_for("bilinear")
def _bilinear(call: Call) -> Rule:
    order = [call.operand(position, name) for position, name in
             enumerate(("input1", "input2", "weight", "bias"))]
    terms = [tuple(order[:3])] + [(order[3],)] * (order[3] is not None)

    def localize(operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
                 ) -> Optional[Callable]:
        if all(prod(spec.local_shape) for spec in operands):
            return None
        zeros = linked_zeros(results[0].local_shape)

        def without_features(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
            result = zeros(input1, input2, weight)
            return result if bias is None else result + bias

        return without_features

    return rule_from_notation("... i, ... j, o i j, o -> ... o", call.shapes, order,
                              reduced={"i": "sum", "j": "sum"}, terms=tuple(terms),
                              localize=localize)


@rule_for("linalg_vecdot")
def _vecdot(call: Call) -> Rule:
    ndim = max(len(shape) for shape in call.shapes)
    name = f"...{ndim - 1 - positive_dim(call.argument(2, 'dim', -1), ndim)}"
    rule = pointwise(call)
    kept = tuple(names for names in rule.results[0] if names != (name,))
    return Rule(rule.operands, (kept,), rule.sizes, reduced={name: "sum"}, terms=((0, 1),))


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

    def localize(specs: Sequence[TensorSpec], _: Sequence[TensorSpec]) -> Optional[Callable]:
        # Letters at the right of any dots, counted from the right as these dims are.
        shared = [(spec, index - len(text)) for spec, text in zip(specs, operands)
                  for index, letter in enumerate(text)
                  if letter in reduced and letters.count(letter) == 2]
        single = len(operands) == 2 and any(
            spec.local_shape[dim] == 1 and spec.shape[dim] > 1 for spec, dim in shared)
        return _as_product(call.func) if single else None

    return rule_from_notation(notation, call.shapes, reduced=reduced, localize=localize,
                              terms=(tuple(range(len(operands))),))


def _as_product(func: Callable) -> Callable:
    """Einsum where this rank has one element of the summed dim.

    The kernel then multiplies, which autocast leaves alone, but on the ranks with several elements
    and on the whole tensor it is a product of matrices.
    """
    def run(equation: str, *operands: Any) -> Any:
        result = func(equation, *operands)
        first = operands[0][0] if isinstance(operands[0], (tuple, list)) else operands[0]
        return result.to(product_of(first.detach().new_zeros((1, 1))).dtype)

    return run


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
    return linked_zeros(results[0].local_shape, sample=product_of)


def _mask_dims(shapes, index: Optional[int], heads: str) -> str:
    """Dims of the mask, which is aligned at the right and may lack the outer ones."""
    ndim = 2 if index is None else len(shapes[index])
    return {1: "s", 2: "l s", 3: f"{heads} l s"}.get(ndim, f"... {heads} l s")

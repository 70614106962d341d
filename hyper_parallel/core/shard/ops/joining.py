"""Joining tensors: ``cat`` and ``stack``, and all that is made of them."""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.shard._registry import add_rule, rule_for
from hyper_parallel.core.shard._rule import Call, Decomposition, Rule, named_dims, positive_dim
from hyper_parallel.platform import get_platform

platform = get_platform()


@rule_for("cat concat concatenate")
def _cat(call: Call) -> Optional[Rule]:
    """All operands share the other dims; the joined one is whole.

    Beside tensors of several dims, one of shape (0,) stands for no tensor at all, as in the caches
    that decoders begin with.
    """
    ndim = max(map(len, call.shapes))
    joined = [shape for shape in call.shapes if len(shape) == ndim]
    if any(len(shape) != ndim and tuple(shape) != (0,) for shape in call.shapes):
        return None
    dim = positive_dim(call.argument(1, "dim", call.kwargs.get("axis", 0)), ndim)
    operand, sizes = named_dims(joined[0])
    sizes["nothing"] = 0
    result = (*joined[0][:dim], sum(shape[dim] for shape in joined), *joined[0][dim + 1:])
    return Rule(tuple(operand if len(shape) == ndim else (("nothing",),) for shape in call.shapes),
                (operand,), sizes, whole=frozenset((f"d{dim}", "nothing")),
                terms=tuple((index,) for index, shape in enumerate(call.shapes)
                            if len(shape) == ndim), moves=True, result_shapes=(result,))


@rule_for("stack")
def _stack(call: Call) -> Rule:
    operand, sizes = named_dims(call.shapes[0])
    dim = positive_dim(call.argument(1, "dim", 0), len(operand) + 1)
    sizes["stacked"] = len(call.shapes)
    return Rule((operand,) * len(call.shapes), ((*operand[:dim], ("stacked",), *operand[dim:]),),
                sizes, terms=tuple((index,) for index in range(len(call.shapes))), moves=True)


def _with_dims(x: Any, ndim: int) -> Any:
    """As ``atleast_1d``, ``atleast_2d`` and ``atleast_3d``: where the new dims stand differs."""
    given = len(x.shape)
    if given >= ndim:
        return x
    if not given:
        return x.reshape((1,) * ndim)
    if given == 1:
        x = x.unsqueeze(0)
    return x.unsqueeze(-1) if ndim == 3 else x


def _horizontally(tensors: Sequence[Any]) -> Any:
    tensors = [_with_dims(x, 1) for x in tensors]
    return platform.concat(tensors, 0 if len(tensors[0].shape) == 1 else 1)


def _columns(tensors: Sequence[Any]) -> Any:
    return platform.concat([x if len(x.shape) > 1 else x.reshape(prod(x.shape), 1)
                            for x in tensors], 1)


def _broadcast(*tensors: Any) -> tuple:
    """All tensors expanded to the one shape that they broadcast to."""
    tensors = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    ndim = max(len(x.shape) for x in tensors)
    padded = [(1,) * (ndim - len(x.shape)) + tuple(x.shape) for x in tensors]
    shape = [next((size for size in sizes if size != 1), 1) for sizes in zip(*padded)]
    return tuple(x.expand(shape) for x in tensors)


def _atleast(ndim: int) -> Callable:
    def run(*tensors: Any) -> Any:
        if len(tensors) == 1 and not isinstance(tensors[0], (tuple, list)):
            x = tensors[0]
            # Not the tensor itself: a view, as the operator gives.
            return _with_dims(x, ndim) if len(x.shape) < ndim else x.view(x.shape)
        several = tensors[0] if isinstance(tensors[0], (tuple, list)) else tensors
        return tuple(run(x) for x in several)

    return run


def _composed(function: Callable) -> Callable[[Call], Decomposition]:
    return lambda call: Decomposition(function)


add_rule("hstack", _composed(_horizontally))
add_rule("vstack row_stack", _composed(
    lambda tensors: platform.concat([_with_dims(x, 2) for x in tensors], 0)))
add_rule("dstack", _composed(
    lambda tensors: platform.concat([_with_dims(x, 3) for x in tensors], 2)))
add_rule("column_stack", _composed(_columns))
add_rule("broadcast_tensors", _composed(_broadcast))
for _ndim in (1, 2, 3):
    add_rule(f"atleast_{_ndim}d", _composed(_atleast(_ndim)))

"""Operators over lists of tensors, as optimizers use them: element i of every list together."""
from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.core.shard._registry import add_rule, rule_for
from hyper_parallel.core.shard._rule import Call, Decomposition
from hyper_parallel.platform import get_platform

platform = get_platform()

_POINTWISE = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp
    expm1 floor frac lerp lgamma log log10 log1p log2 maximum max minimum min mul neg pow
    reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero
"""
# Their last argument is keyword-only in the form for a single tensor.
_VALUE_BY_KEYWORD = ("addcdiv", "addcmul")


def _listwise(call: Call) -> Decomposition:
    """Run the list operator on local tensors where each element lies alike in all lists."""
    if _alike(call):
        return Decomposition(_on_local_tensors(call.func, call.name.endswith("_")))
    name = call.name.removeprefix("_foreach_")
    return Decomposition(lambda *args, **kwargs: _one_by_one(name, args, kwargs))


def _fused(call: Call) -> Decomposition:
    if not _alike(call):
        raise ValueError(
            f"{call.name!r} needs each parameter, its gradient and its state in one layout without "
            "Partial; redistribute the gradients, or use the optimizer with fused=False.")
    return Decomposition(_on_local_tensors(call.func, True))


def _alike(call: Call) -> bool:
    """Whether the tensors of each element have one layout and single numbers are whole."""
    layouts: dict[int, set] = {}
    for path, spec in zip(call.paths, call.specs):
        if len(path) < 2 or not spec.shape:
            if not spec.layout.is_replicated():
                return False
        else:
            layouts.setdefault(path[1], set()).add((spec.layout, spec.shape))
    return all(len(found) == 1 and not _is_partial(next(iter(found))[0])
               for found in layouts.values())


def _is_partial(layout: Any) -> bool:
    return any(isinstance(placement, Partial) for placement in layout.placements)


def _on_local_tensors(func: Callable, in_place: bool) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        results = platform.run_undressed(func, args, kwargs)
        if not in_place:
            for value, like in zip(results, args[0]):
                if isinstance(like, DTensor):
                    platform.dress(value, DTensor, like._spec)
        return results

    return run


def _one_by_one(name: str, args: Sequence[Any], kwargs: dict) -> Optional[list]:
    """Each element by the operator for one tensor."""
    results = []
    for index, tensor in enumerate(args[0]):
        rest = [value[index] if isinstance(value, (tuple, list)) else value for value in args[1:]]
        more = {key: value[index] if isinstance(value, (tuple, list)) else value
                for key, value in kwargs.items()}
        if name.rstrip("_") in _VALUE_BY_KEYWORD and len(rest) > 2:
            more["value"] = rest.pop()
        results.append(getattr(tensor, name)(*rest, **more))
    return None if name.endswith("_") else results


for _name in _POINTWISE.split():
    add_rule((f"_foreach_{_name}", f"_foreach_{_name}_"), _listwise, number_blind=True)
add_rule("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_", _fused, number_blind=True)


@rule_for("_foreach_norm")
def _norms(call: Call) -> Decomposition:
    """Norms of many tensors with one all-reduce for all that are sharded alike."""
    if _alike(call) and all(spec.layout.is_replicated() for spec in call.specs):
        return Decomposition(_replicated_norms(call.func))
    return Decomposition(_norms_of_shards)


def _replicated_norms(func: Callable) -> Callable:
    def run(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list:
        results = platform.run_undressed(func, (tensors, *args), kwargs)
        for value, like in zip(results, tensors):
            if isinstance(like, DTensor):
                platform.dress(value, DTensor, type(like._spec)(like.layout, ()))
        return results

    return run


def _norms_of_shards(tensors: Sequence[Any], ord: Any = 2, dtype: Any = None) -> list:
    if not 0 < ord < float("inf"):
        return [tensor.norm(ord) for tensor in tensors]
    sums = [(tensor if dtype is None else tensor.to(dtype)).abs().pow(ord).sum()
            for tensor in tensors]
    alike: dict[Any, list[int]] = {}
    for index, total in enumerate(sums):
        alike.setdefault(total.layout if isinstance(total, DTensor) else None, []).append(index)
    for layout, members in alike.items():
        if layout is not None and _is_partial(layout):
            joined = platform.concat([sums[index].reshape((1,)) for index in members], 0)
            joined = joined.redistribute(placements=[Replicate()] * layout.device_mesh.ndim)
            for place, index in enumerate(members):
                sums[index] = joined[place]
    return [total ** (1.0 / ord) for total in sums]

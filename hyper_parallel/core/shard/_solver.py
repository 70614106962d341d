"""The solver: for every mesh axis, which factor stays sharded, or that the value stays Partial.

It knows nothing of operators.  For each axis it lists the choices a rule allows - keep a factor
that some operand already shards there, let Partial through, or replicate - and takes the one
that moves the fewest bytes.  It never shards what nobody sharded, and never makes a Shard of a
Partial unless an operand beside it is sharded there.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from typing import Iterator, Optional, Sequence

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard._rule import Dims, Rule

_REPLICATE = Replicate()


@dataclass(frozen=True)
class Choice:
    """What happens on one axis: the placement of each operand and of each result."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: Optional[str] = None


@dataclass(frozen=True)
class Solution:
    """Layouts that the operands must have and that the results will have.

    ``varying`` holds for each operand the axes on which it is replicated and the results are
    not: there its local gradient is only this rank's contribution.
    """

    operands: tuple[Layout, ...]
    results: tuple[Optional[TensorSpec], ...]
    varying: tuple[tuple[int, ...], ...]


def solve(rule: Rule, specs: Sequence[TensorSpec], mesh: DeviceMesh, in_place: bool = False
          ) -> Optional[Solution]:
    """Choose the layouts of one call.

    Args:
        rule: the operator's rule, bound to the shapes of the call.
        specs: layout and global shape of each operand.
        mesh: the mesh that all of them are on.
        in_place: operand 0 is written to, so it keeps its layout and result 0 has the same
            pieces.

    Returns:
        The solution, or None when ``in_place`` and the operator cannot keep operand 0 as it is.
    """
    fixed = specs[0].layout if in_place else None
    choices = []
    for axis, size in enumerate(mesh.mesh_shape):
        allowed = [
            choice for choice in _choices(rule, specs, axis)
            if fixed is None or (choice.operands[0] == fixed.placements[axis]
                                 and choice.results[0] == _renamed(rule, choice.operands[0]))]
        if not allowed:
            return None
        costs = [(_axis_cost(choice, specs, axis, size, rule), index)
                 for index, choice in enumerate(allowed)]
        choices.append([allowed[index] for _, index in sorted(costs)])
    chosen = _first_that_divides(rule, choices, mesh)
    if chosen is None:
        return None
    solution = _layouts(rule, specs, mesh, chosen)
    if fixed is not None and solution.operands[0] is not fixed:
        return None
    return solution


def _renamed(rule: Rule, placement: Placement) -> Optional[Placement]:
    """Placement of result 0 when it holds the pieces of operand 0, its dims maybe in new places."""
    if type(placement) is not Shard or not rule.operands[0][placement.dim]:
        return placement
    dim = _place_of(rule.operands[0][placement.dim][0], rule.results[0])
    return None if dim is None else Shard(dim)


def _choices(rule: Rule, specs: Sequence[TensorSpec], axis: int) -> Iterator[Choice]:
    """The choices on ``axis``; replicating everything is the last one."""
    current = [spec.layout.placements[axis] for spec in specs]
    seen = set()
    for index, placement in enumerate(current):
        if type(placement) is Shard:
            factors = rule.operands[index][placement.dim]
            if factors and factors[0] not in seen:
                seen.add(factors[0])
                choice = _shard_choice(rule, factors[0], current)
                if choice is not None:
                    yield choice
    ops = {placement.reduce_op for index, placement in enumerate(current)
           if type(placement) is Partial and index not in rule.unread}
    for op in ops:
        if rule.terms and (rule.moves or op in ("sum", "avg")):
            yield from _partial_choices(rule, Partial(op), current)
    yield Choice(_with_unread(rule, [_REPLICATE] * len(current), current),
                 (_REPLICATE,) * len(rule.results))


def _with_unread(rule: Rule, placements: Sequence[Placement], current: Sequence[Placement]
                 ) -> tuple[Placement, ...]:
    return tuple(current[index] if index in rule.unread else placement
                 for index, placement in enumerate(placements))


def _shard_choice(rule: Rule, factor: str, current: Sequence[Placement]) -> Optional[Choice]:
    """Shard ``factor`` in every tensor that has it, or None where that cannot be."""
    if factor in rule.whole:
        return None
    reduce_op = rule.reduced.get(factor)
    results = []
    for dims in rule.results:
        dim = _place_of(factor, dims or ())
        if dim == _HIDDEN or (dim is None and reduce_op is None):
            return None
        results.append(Partial(reduce_op) if dim is None else Shard(dim))
    placements: list[Placement] = []
    for dims in rule.operands:
        dim = _place_of(factor, dims)
        if dim == _HIDDEN:
            return None
        placements.append(_REPLICATE if dim is None else Shard(dim))
    if any(type(placement) is Partial for placement in results):
        # A term without the factor must not be counted once a rank.
        for term in rule.terms:
            if not any(type(placements[index]) is Shard for index in term):
                placements[_summand(term, current)] = Partial(reduce_op)
    return Choice(_with_unread(rule, placements, current), tuple(results), factor)


_HIDDEN = -1


def _place_of(factor: str, dims: Dims) -> Optional[int]:
    """The dim that has ``factor`` as its major part, None if none has it, or ``_HIDDEN``."""
    for dim, factors in enumerate(dims):
        if factor in factors:
            return dim if factors[0] == factor else _HIDDEN
    return None


def _summand(term: Sequence[int], current: Sequence[Placement]) -> int:
    """The operand of a term that is made Partial: one that is so already, else the first."""
    return next((index for index in term if type(current[index]) is Partial), term[0])


def _partial_choices(rule: Rule, partial: Partial, current: Sequence[Placement]
                     ) -> Iterator[Choice]:
    """Let Partial through: in each term one operand carries it."""
    carriers = []
    for term in rule.terms:
        ready = [index for index in term if current[index] == partial]
        carriers.append(ready or [_summand(term, current)])
    for selected in itertools.product(*carriers):
        placements = [partial if index in selected else _REPLICATE
                      for index in range(len(current))]
        yield Choice(_with_unread(rule, placements, current), (partial,) * len(rule.results))


def _axis_cost(choice: Choice, specs: Sequence[TensorSpec], axis: int, size: int, rule: Rule
               ) -> float:
    """Elements that a rank sends to reach ``choice`` on this axis alone.

    A choice that moves data only to leave a Partial also pays for the reduction to come.
    """
    if size == 1:
        return 0.0
    total = 0.0
    for index, (spec, wanted) in enumerate(zip(specs, choice.operands)):
        placement = spec.layout.placements[axis]
        if placement == wanted or index in rule.unread:
            continue
        others = prod(n for other, n in enumerate(spec.layout.device_mesh.mesh_shape)
                      if other != axis and type(spec.layout.placements[other]) is Shard)
        total += _wire(placement, wanted, size) * prod(spec.shape) / others
    if total:
        total += sum(_wire(result, _REPLICATE, size) * prod(rule.result_shape(index))
                     for index, result in enumerate(choice.results) if type(result) is Partial)
    return total


def _wire(before: Placement, after: Placement, size: int) -> float:
    """Elements a rank sends for each element that a rank would hold if the axis were whole."""
    share = (size - 1) / size
    if type(before) is Partial:
        return share if type(after) is Shard else 2 * share
    if type(before) is Shard:
        return {Replicate: share, Shard: share / size, Partial: 0.0}[type(after)]
    return 0.0


def _first_that_divides(rule: Rule, choices: Sequence[Sequence[Choice]], mesh: DeviceMesh
                        ) -> Optional[list[Choice]]:
    """The cheapest combination in which compound dims can be cut evenly."""
    for ranks in sorted(itertools.product(*(range(len(allowed)) for allowed in choices)), key=sum):
        chosen = [allowed[rank] for allowed, rank in zip(choices, ranks)]
        if all(_divides(rule, factor, chosen, mesh)
               for factor in {choice.factor for choice in chosen if choice.factor}):
            return chosen
    return None


def _divides(rule: Rule, factor: str, chosen: Sequence[Choice], mesh: DeviceMesh) -> bool:
    """Whether the major part of a compound dim is cut evenly, as its minor parts require."""
    compound = any(len(factors) > 1 and factors[0] == factor
                   for dims in (*rule.operands, *rule.results) for factors in dims or ())
    pieces = prod(size for size, choice in zip(mesh.mesh_shape, chosen)
                  if choice.factor == factor)
    return not compound or rule.sizes[factor] % pieces == 0


def _layouts(rule: Rule, specs: Sequence[TensorSpec], mesh: DeviceMesh, chosen: Sequence[Choice]
             ) -> Solution:
    orders = _factor_orders(rule, specs, chosen)
    operands = tuple(
        spec.layout if index in rule.unread else
        _layout(mesh, [choice.operands[index] for choice in chosen], rule.operands[index], orders)
        for index, spec in enumerate(specs))
    results = tuple(
        None if dims is None else TensorSpec(
            _layout(mesh, [choice.results[index] for choice in chosen], dims, orders),
            rule.result_shape(index))
        for index, dims in enumerate(rule.results))
    differs = [any(type(placement) is not Replicate for placement in choice.results)
               and size > 1 for choice, size in zip(chosen, mesh.mesh_shape)]
    varying = tuple(
        () if index in rule.unread else
        tuple(axis for axis, placement in enumerate(layout.placements)
              if differs[axis] and type(placement) is Replicate)
        for index, layout in enumerate(operands))
    return Solution(operands, results, varying)


def _factor_orders(rule: Rule, specs: Sequence[TensorSpec], chosen: Sequence[Choice]
                   ) -> dict[str, tuple[int, ...]]:
    """The order in which axes split a factor: that of the largest operand split by just these."""
    axes: dict[str, list[int]] = {}
    for axis, choice in enumerate(chosen):
        if choice.factor is not None:
            axes.setdefault(choice.factor, []).append(axis)
    orders = {}
    by_size = sorted(range(len(specs)), key=lambda index: -prod(specs[index].shape))
    for factor, members in axes.items():
        orders[factor] = tuple(members)
        for index in by_size:
            dim = _place_of(factor, rule.operands[index])
            if dim is not None and sorted(specs[index].layout.axes_of(dim)) == members:
                orders[factor] = specs[index].layout.axes_of(dim)
                break
    return orders


def _layout(mesh: DeviceMesh, placements: Sequence[Placement], dims: Dims,
            orders: dict[str, tuple[int, ...]]) -> Layout:
    order = {dim: orders[factors[0]] for dim, factors in enumerate(dims)
             if factors and len(orders.get(factors[0], ())) > 1
             and Shard(dim) in placements}
    return Layout(mesh, placements, order)

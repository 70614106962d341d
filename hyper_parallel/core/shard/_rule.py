"""Rules: how the dims of an operator's operands and results belong together.

Every tensor dim carries *factors*.  A factor that several operands and results share may be
sharded in all of them together; one that no result has is reduced, and sharding it makes the
result Partial; one that the kernel must see whole is never sharded.  In the notation of
``einops`` (and of Shardy's sharding rules):

    linear      "... i, o i, o -> ... o"        i is reduced
    softmax     "... d -> ... d"                d whole
    view        "b (h d) -> b h d"              d is the minor part of a dim

``...`` stands for any dims, aligned at the right as broadcasting does.  ``(h d)`` is one dim
made of two factors, the first the major one; only the major one can be sharded there.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Callable, Mapping, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.platform.platform import DeclaredArguments

# For one tensor: for each dim the names of its factors, major first; () for a dim of size 1
# that the operator broadcasts.
Dims = tuple[tuple[str, ...], ...]

LocalFunction = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """What the solver needs to know of one call.

    Attributes:
        operands: dims of each tensor argument, in the order in which they stand in the call.
        results: dims of each result.
        sizes: global size of each factor.
        reduced: factors that no result has, with the reduce op that makes the value whole.
        whole: factors that must not be sharded.
        terms: groups of operands: the operator is a sum of terms, each linear in each of its
            operands.  Empty for an operator that is not linear in any.
        moves: the operator only moves data, so that any reduction may come after it.
        unread: operands of which only shape and dtype matter; they are never moved.
        result_shapes: global shapes of results whose size is not the product of their factors.
        localize: given the specs of the moved operands and of the results, gives the function
            that runs on local tensors in place of the operator.
        random: the operator draws random numbers.
    """

    operands: tuple[Dims, ...]
    results: tuple[Optional[Dims], ...]
    sizes: Mapping[str, int]
    reduced: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    terms: tuple[tuple[int, ...], ...] = ()
    moves: bool = False
    unread: frozenset[int] = frozenset()
    result_shapes: Optional[tuple[Optional[tuple[int, ...]], ...]] = None
    localize: Optional[Callable[[Sequence[TensorSpec], Sequence[TensorSpec]], LocalFunction]] = None
    random: bool = False

    def result_shape(self, index: int) -> tuple[int, ...]:
        """Global shape of result ``index``."""
        if self.result_shapes is not None and self.result_shapes[index] is not None:
            return self.result_shapes[index]
        shape = []
        for factors in self.results[index]:
            size = 1
            for name in factors:
                size *= self.sizes[name]
            shape.append(size)
        return tuple(shape)


@dataclass(frozen=True)
class Decomposition:
    """In place of a rule: a function that computes the operator from others, on DTensors."""

    function: Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """One call of an operator, as a rule maker sees it.

    Attributes:
        name: the operator's name.
        func: the function called.
        args, kwargs: the arguments as given.
        specs: layout and global shape of each tensor argument, in order, nested lists included;
            a plain tensor is replicated.
        paths: where each of them stands: an index or a keyword, and the index within a list.
        declared: what a user's operator declares of its arguments.
    """

    name: str
    func: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    specs: Sequence[TensorSpec]
    paths: Sequence[tuple]
    declared: Optional[DeclaredArguments] = None

    def in_declared_order(self) -> list[int]:
        """The tensors as the operator declares them, in whatever order keywords stand."""
        names = self.declared.names if self.declared else ()
        return sorted(range(len(self.paths)), key=lambda index: (
            names.index(self.paths[index][0]) if self.paths[index][0] in names
            else self.paths[index][0] if isinstance(self.paths[index][0], int) else len(names),
            index))

    def written(self) -> list[int]:
        """The tensors that the operator declares to write to, in its order."""
        names = self.declared.names if self.declared else ()
        places = {place for name in (self.declared.written if self.declared else ())
                  for place in (name, names.index(name))}
        return [index for index in self.in_declared_order() if self.paths[index][0] in places]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position`` or called ``name``."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def arguments_from(self, position: int, name: str) -> Any:
        """The rest of the positional arguments, which may be one sequence: ``x.view(2, 3)``."""
        rest = self.args[position:] or (self.kwargs[name],)
        return rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest

    def operand(self, position: int, name: str) -> Optional[int]:
        """Index among the tensors of the argument at ``position`` or called ``name``."""
        for index, path in enumerate(self.paths):
            if path in ((position,), (name,)):
                return index
        return None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of the tensor arguments."""
        return [spec.shape for spec in self.specs]


def check_sizes(call: Call, rule: Rule) -> None:
    """Whether tensors that share a factor agree in its size.

    The kernels need not find out: on one rank the parts may fit, by chance, and on another not. A
    factor that is whole lies in every part alike, so there they do.

    Raises:
        ValueError: a dim is not as long as its factors say.
    """
    for index, (dims, spec) in enumerate(zip(rule.operands, call.specs)):
        if index in rule.unread:
            continue
        for dim, (factors, size) in enumerate(zip(dims, spec.shape)):
            if factors and rule.whole.isdisjoint(factors) and \
                    prod(rule.sizes[name] for name in factors) != size:
                sizes = " and ".join(f"{name} of size {rule.sizes[name]}" for name in factors)
                place = "".join(f"[{part!r}]" for part in call.paths[index][1:])
                raise ValueError(
                    f"dim {dim} of argument {call.paths[index][0]}{place} of {call.name!r} has the "
                    f"size {size}, but by the rule it is {sizes}, as in another argument; pass "
                    "tensors whose sizes agree, or correct the rule with register_rule.")


def positive_dim(dim: int, ndim: int) -> int:
    """``dim`` counted from the front.

    Raises:
        IndexError: as the frameworks do, when there is no such dim.
    """
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims: it has dims "
                         f"{-max(ndim, 1)} to {max(ndim, 1) - 1}.")
    return dim % max(ndim, 1)


def positive_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Sorted dims counted from the front; None or an empty list means all of them."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return tuple(range(ndim))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(sorted({positive_dim(dim, ndim) for dim in dims})) if ndim else ()


def named_dims(shape: Sequence[int], prefix: str = "d") -> tuple[Dims, dict[str, int]]:
    """One factor of its own for each dim, and their sizes."""
    names = [f"{prefix}{dim}" for dim in range(len(shape))]
    return tuple((name,) for name in names), dict(zip(names, shape))


@lru_cache(maxsize=None)
def _parse(notation: str) -> tuple[tuple[tuple, ...], tuple[tuple, ...]]:
    left, arrow, right = notation.partition("->")
    if not arrow:
        raise ValueError(f"a rule reads 'operands -> results', but got {notation!r}.")
    return tuple(
        tuple(tuple(_tokens(part)) for part in side.split(",")) for side in (left, right))


def factor_names(notation: str) -> set[str]:
    """The factors that a notation names.

    Raises:
        ValueError: it cannot be read.
    """
    return {name for side in _parse(notation) for tokens in side for one in tokens for name in one}


def _tokens(text: str) -> list[tuple[str, ...]]:
    rest = re.sub(r"\([^()]*\)|\.\.\.|\w+|\s", "", text)
    if rest:
        raise ValueError("the dims of an operand are names, '...', or names in parentheses, with "
                         f"spaces between them, but {text.strip()!r} has {rest!r} in it.")
    found = re.findall(r"\(([^()]*)\)|(\.\.\.|\w+)", text)
    return [tuple(compound.split()) if compound else (single,) for compound, single in found]


def _free_dims(tokens: Sequence[tuple[str, ...]], count: int) -> Dims:
    """``tokens`` with ``...`` replaced by ``count`` factors, numbered from the right."""
    expanded: list[tuple[str, ...]] = []
    for token in tokens:
        if token == ("...",):
            expanded += [(f"...{k}",) for k in range(count - 1, -1, -1)]
        else:
            expanded.append(token)
    return tuple(expanded)


def _expand(tokens: Sequence[tuple[str, ...]], shape: Sequence[int], notation: str) -> Dims:
    """The factors of an operand's dims."""
    expanded = _free_dims(tokens, len(shape) - (len(tokens) - 1))
    if len(expanded) != len(shape):
        raise ValueError(f"an operand of the shape {tuple(shape)} does not fit {notation!r}, which "
                         f"gives it {len(expanded)} dims.")
    return expanded


def rule_from_notation(notation: str, shapes: Sequence[Optional[Sequence[int]]],
                       order: Optional[Sequence[Optional[int]]] = None,
                       known: Optional[Mapping[str, int]] = None, **options: Any) -> Rule:
    """Bind a notation to the shapes of a call.

    Args:
        notation: ``"operands -> results"``; operands that the call does not have are left out.
        shapes: global shape of each tensor argument of the call.
        order: for each operand of the notation its index in ``shapes``, or None when absent;
            by default they come in order.
        known: sizes of factors that the shapes do not tell.
        options: the other fields of the rule; ``whole`` may be a str of names.

    Raises:
        ValueError: a shape does not fit the notation.
    """
    operands, results = _parse(notation)
    given = _given(operands, len(shapes), order)
    dims = {index: _expand(tokens, shapes[index], notation) for index, tokens in given.items()}
    sizes = _factor_sizes(dims, shapes, notation, known or {})
    whole = _names(options.pop("whole", ()))
    for index, shape in enumerate(shapes):
        if index not in dims:
            dims[index], more = named_dims(shape, f"other{index}_")
            sizes.update(more)
            whole.update(more)
    if "result_shapes" not in options:
        _check_known(results, sizes, notation)
    free = max((len(dims[index]) - len(tokens) + 1 for index, tokens in given.items()
                if ("...",) in tokens), default=0)
    return Rule(tuple(_stretched(dims[index], shape, sizes) for index, shape in enumerate(shapes)),
                tuple(_free_dims(tokens, free) for tokens in results), sizes,
                whole=frozenset(whole), **options)


def _check_known(results: Sequence[tuple], sizes: Mapping[str, int], notation: str) -> None:
    unknown = {name for tokens in results for one in tokens for name in one} - {"...", *sizes}
    if unknown:
        raise ValueError(f"no argument tells the size of {', '.join(sorted(unknown))}, which "
                         f"results of {notation!r} have; name a dim of an operand so.")


def _given(operands: Sequence[tuple], count: int, order: Optional[Sequence[Optional[int]]]
           ) -> dict[int, tuple]:
    """The operands of the notation that the call has, by their index among its tensors."""
    if order is None:
        order = [index if index < count else None for index in range(len(operands))]
    return {index: tokens for tokens, index in zip(operands, order) if index is not None}


def _stretched(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> Dims:
    """A dim of size 1 has no factor where it is stretched to what another operand has there."""
    return tuple(() if len(factors) == 1 and size == 1 != sizes[factors[0]] else factors
                 for factors, size in zip(dims, shape))


def _factor_sizes(dims: Mapping[int, Dims], shapes: Sequence[Sequence[int]], notation: str,
                  known: Mapping[str, int]) -> dict[str, int]:
    """Size of each factor: of the dims that are one factor, then of the rest of compound dims."""
    sizes = dict(known)
    for index, expanded in dims.items():
        for factors, size in zip(expanded, shapes[index]):
            if len(factors) == 1:
                sizes[factors[0]] = size if size != 1 else sizes.get(factors[0], 1)
    for index, expanded in dims.items():
        for factors, size in zip(expanded, shapes[index]):
            _solve_compound(factors, size, sizes, notation)
    return sizes


def _names(whole: Any) -> set[str]:
    return set(whole.split()) if isinstance(whole, str) else set(whole)


def _solve_compound(factors: tuple[str, ...], size: int, sizes: dict[str, int], notation: str
                    ) -> None:
    """Work out the one unknown factor of a dim made of several."""
    if len(factors) < 2:
        return
    unknown = [name for name in factors if name not in sizes]
    known = 1
    for name in factors:
        known *= sizes.get(name, 1)
    if len(unknown) > 1 or size % known:
        raise ValueError(f"a dim of size {size} cannot be split into {' '.join(factors)} of "
                         f"{notation!r}.")
    for name in unknown:
        sizes[name] = size // known

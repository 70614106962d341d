"""Picking elements out of a tensor, and assigning to them."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import rule_for
from hyper_parallel.core.shard._rule import (
    Call, Dims, Rule, named_dims, positive_dim, rule_from_notation)
from hyper_parallel.platform import get_platform

platform = get_platform()
_Tensor = platform.Tensor


@rule_for("embedding")
def _embedding(call: Call) -> Optional[Rule]:
    """A lookup. With the vocabulary sharded every rank looks up what it has: the sum is whole."""
    order = [call.operand(0, "input"), call.operand(1, "weight")]
    padding = call.argument(2, "padding_idx")
    special = [name for position, name in ((3, "max_norm"), (5, "scale_grad_by_freq"),
                                           (6, "sparse")) if call.argument(position, name)]
    vocabulary = call.shapes[order[1]][0]
    if special:
        if not all(spec.layout.is_replicated() for spec in call.specs):
            raise ValueError(
                f"embedding with {special[0]} looks at whole rows or whole batches, so it takes "
                f"replicated tensors only, but got {[spec.layout for spec in call.specs]}; leave "
                f"{special[0]} out, or redistribute.")
        return rule_from_notation("..., v e -> ... e", call.shapes, order, whole="v e")
    if padding is not None and padding < 0:
        padding += vocabulary

    def localize(operands: Sequence[TensorSpec], _: Sequence[TensorSpec]) -> Optional[Callable]:
        weight = operands[order[1]]
        if not weight.layout.axes_of(0):
            return None
        start, length = weight.layout.local_bounds(weight.shape)[0]
        func = call.func
        stop = start + length
        own_padding = padding - start if padding is not None and \
            start <= padding < stop else None

        def lookup(input: Any, weight: Any, *_: Any, **__: Any) -> Any:
            own, elsewhere = _own_entries(input, start, stop, vocabulary)
            if not length:
                return weight.new_zeros((*input.shape, weight.shape[1])) + weight.sum()
            with _told_globally(input, vocabulary):
                found = func(own, weight, own_padding)
            return platform.masked_fill(found, elsewhere.unsqueeze(-1), 0)

        return lookup

    return rule_from_notation("..., v e -> ... e", call.shapes, order, reduced={"v": "sum"},
                              terms=((order[1],),), localize=localize)


def _own_entries(index: Any, start: int, stop: int, size: int) -> tuple[Any, Any]:
    """``index`` counted within this rank's part of a dim, and which entries others have.

    Those of others become 0. An entry that nobody has is left for the kernel to refuse; a rank
    without a part has no kernel to do so.
    """
    known = _known(index, size)
    if start == stop:
        _refuse_unknown(index, size)
    elsewhere = ((index < start) | (index >= stop)) & known
    return platform.masked_fill(index - start, elsewhere, 0), elsewhere


def _known(index: Any, size: int) -> Any:
    return (index >= 0) & (index < size)


def _refuse_unknown(index: Any, size: int) -> None:
    if not _known(index, size).all():
        raise IndexError(f"index out of range: a dim of size {size} was asked for an entry that it "
                         f"does not have, from {int(index.min())} to {int(index.max())}.")


@contextmanager
def _told_globally(index: Any, size: int) -> Iterator[None]:
    """The kernel inside would speak of entries within this rank's part of a dim of ``size``."""
    try:
        yield
    except (IndexError, RuntimeError):
        _refuse_unknown(index, size)
        raise


@rule_for("getitem")
def _getitem(call: Call) -> Optional[Rule]:
    """Indexing. A dim that is taken as it is stays sharded; a dim that is cut is whole."""
    cut = _basic_index(call.args[1], call.shapes[0])
    if cut is None:
        return _picked_by_tensors(call)
    operand, result, shape, sizes, whole = cut
    return Rule((operand,), (result,), sizes, whole=whole, terms=((0,),), moves=True,
                result_shapes=(shape,))


def _picked_by_tensors(call: Call) -> Optional[Rule]:
    """Indexing by tensors of places: the dims they index are whole, theirs may be sharded.

    None for masks, whose result has as many elements as they have true ones, and for lists.
    """
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(entry is Ellipsis or entry == slice(None) if not isinstance(entry, _Tensor)
               else "int" in str(entry.dtype) and "uint8" not in str(entry.dtype)
               for entry in index):
        return None
    shape = call.shapes[0]
    taken = sum(entry is not Ellipsis for entry in index)
    if taken > len(shape):
        raise IndexError(f"too many indices for a tensor of {len(shape)} dims: {taken}.")
    index = _without_ellipsis(index, len(shape) - taken)
    operand, sizes = named_dims(shape)
    picks = rule_from_notation(", ".join(["..."] * (len(call.shapes) - 1)) + " -> ...",
                               call.shapes[1:])
    sizes.update(picks.sizes)
    places = [dim for dim, entry in enumerate(index) if isinstance(entry, _Tensor)]
    kept = [names for dim, names in enumerate(operand) if dim not in places]
    adjacent = places == list(range(places[0], places[-1] + 1))
    start = places[0] if adjacent else 0
    return Rule((operand, *picks.operands), ((*kept[:start], *picks.results[0], *kept[start:]),),
                sizes, whole=frozenset(f"d{dim}" for dim in places), terms=((0,),), moves=True)


def _without_ellipsis(index: Sequence[Any], rest: int) -> list[Any]:
    """One entry for each dim."""
    full: list[Any] = []
    for entry in index:
        full += [slice(None)] * rest if entry is Ellipsis else [entry]
    return full + [slice(None)] * rest if not any(entry is Ellipsis for entry in index) else full


@rule_for("setitem")
def _setitem(call: Call) -> Optional[Rule]:
    """Assignment by index, in place where no sharded dim is cut."""
    cut = _basic_index(call.args[1], call.shapes[0])
    value = call.operand(2, "value")
    if cut is None or len(call.specs) > 1 + (value is not None):
        return None
    operand, result, shape, sizes, whole = cut
    operands = [operand]
    if value is not None:
        given = call.shapes[value]
        if len(given) > len(shape):
            return None
        kept = len(shape) - len(given)
        operands.append(tuple(() if size == 1 else result[dim + kept]
                              for dim, size in enumerate(given)))
    terms = ((0,), (1,)) if value is not None else ()
    return Rule(tuple(operands), (operand,), sizes, whole=whole, terms=terms)


def _basic_index(index: Any, shape: Sequence[int]
                 ) -> Optional[tuple[Dims, Dims, tuple[int, ...], dict[str, int], frozenset[str]]]:
    """Dims before and after, shape after, sizes and whole factors; None for other indices."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(entry is None or entry is Ellipsis or isinstance(entry, slice)
               or (isinstance(entry, int) and not isinstance(entry, bool)) for entry in index):
        return None
    operand, sizes = named_dims(shape)
    taken = sum(isinstance(entry, (int, slice)) for entry in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    whole, result, result_shape, dim = set(), [], [], 0
    for entry in index:
        if entry is None:
            result.append(())
            result_shape.append(1)
        elif entry is Ellipsis:
            for _ in range(len(shape) - taken):
                result.append(operand[dim])
                result_shape.append(shape[dim])
                dim += 1
        elif dim >= len(shape):
            raise IndexError(f"too many indices for a tensor of {len(shape)} dims: {index}.")
        else:
            if isinstance(entry, slice):
                length = len(range(*entry.indices(shape[dim])))
                result.append(operand[dim])
                result_shape.append(length)
            if not isinstance(entry, slice) or length != shape[dim]:
                whole.add(f"d{dim}")
            dim += 1
    return operand, tuple(result), tuple(result_shape), sizes, frozenset(whole)


@rule_for("topk sort argsort cumsum cumprod cummax cummin logcumsumexp")
def _along(call: Call) -> Optional[Rule]:
    """Operators along one dim, which has to be whole."""
    shape = call.shapes[0]
    position = 2 if call.name == "topk" else 1
    if call.name in ("sort", "argsort") and call.args[1:] and isinstance(call.args[1], bool):
        return None
    default = None if call.name.startswith(("cum", "logcum")) else -1
    dim = positive_dim(call.argument(position, "dim", default), len(shape))
    operand, sizes = named_dims(shape)
    results = 2 if call.name in ("topk", "sort", "cummax", "cummin") else 1
    result_shape = tuple(shape)
    if call.name == "topk":
        result_shape = (*shape[:dim], call.argument(1, "k"), *shape[dim + 1:])
        if not shape:
            result_shape = ()
    return Rule((operand,), (operand,) * results, sizes, whole=frozenset((f"d{dim}",)),
                result_shapes=(result_shape,) * results)


@rule_for("gather")
def _gather(call: Call) -> Optional[Rule]:
    """Other dims may be sharded where index and input agree in size there.

    With the dim itself sharded every rank picks what it has, and the sum is whole.
    """
    if call.operand(2, "index") != 1 or len(call.shapes[0]) != len(call.shapes[1]):
        return None
    shape, index = call.shapes
    if not shape:
        return None
    dim = positive_dim(call.argument(1, "dim"), len(shape))
    names = [(f"d{d}",) if d != dim and shape[d] == index[d] else (f"in{d}",)
             for d in range(len(shape))]
    picked = [name if name[0].startswith("d") else (f"out{d}",) for d, name in enumerate(names)]
    sizes = {name[0]: size for name, size in zip(names, shape)}
    sizes.update({name[0]: size for name, size in zip(picked, index)})
    whole = frozenset(name for name in sizes if not name.startswith("d") and name != f"in{dim}")

    def localize(operands: Sequence[TensorSpec], _: Sequence[TensorSpec]) -> Optional[Callable]:
        if not operands[0].layout.axes_of(dim):
            return None
        start, length = operands[0].layout.local_bounds(shape)[dim]
        size = shape[dim]

        def pick(input: Any, dim: int, index: Any, **_: Any) -> Any:
            own, elsewhere = _own_entries(index, start, start + length, size)
            if not length:
                return input.new_zeros(index.shape) + input.sum()
            with _told_globally(index, size):
                found = input.gather(dim, own)
            return platform.masked_fill(found, elsewhere, 0)

        return pick

    return Rule((tuple(names), tuple(picked)), (tuple(picked),), sizes, whole=whole,
                reduced={f"in{dim}": "sum"}, terms=((0,),), localize=localize)

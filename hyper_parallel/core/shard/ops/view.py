"""Views: the same elements under other dims."""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import add_rule, rule_for
from hyper_parallel.core.shard.ops._equal_parts import can_be_shared_out, equal_parts
from hyper_parallel.core.shard._rule import (
    Call, Decomposition, Dims, Rule, named_dims, positive_dim)


def _moved(call: Call, dims: Sequence[int]) -> Rule:
    """The operand's dims in another order."""
    operand, sizes = named_dims(call.shapes[0])
    return Rule((operand,), (tuple(operand[dim] for dim in dims),), sizes, terms=((0,),),
                moves=True)


@rule_for("transpose swapaxes swapdims")
def _transpose(call: Call) -> Rule:
    ndim = len(call.shapes[0])
    dims = list(range(ndim))
    if ndim:
        first = positive_dim(call.argument(1, "dim0", call.kwargs.get("axis0")), ndim)
        second = positive_dim(call.argument(2, "dim1", call.kwargs.get("axis1")), ndim)
        dims[first], dims[second] = dims[second], dims[first]
    return _moved(call, dims)


@rule_for("t T mT H mH adjoint")
def _reversed(call: Call) -> Rule:
    ndim = len(call.shapes[0])
    if call.name in ("mT", "mH", "adjoint"):
        return _moved(call, (*range(ndim - 2), ndim - 1, ndim - 2))
    return _moved(call, tuple(reversed(range(ndim))))


@rule_for("permute")
def _permute(call: Call) -> Rule:
    ndim = len(call.shapes[0])
    return _moved(call, [positive_dim(dim, ndim) for dim in call.arguments_from(1, "dims")])


@rule_for("movedim moveaxis")
def _movedim(call: Call) -> Rule:
    ndim = len(call.shapes[0])
    source, target = call.argument(1, "source"), call.argument(2, "destination")
    if isinstance(source, int):
        source, target = (source,), (target,)
    placed = {positive_dim(to, ndim): positive_dim(dim, ndim) for dim, to in zip(source, target)}
    rest = iter(dim for dim in range(ndim) if dim not in placed.values())
    return _moved(call, [placed[dim] if dim in placed else next(rest) for dim in range(ndim)])


@rule_for("unsqueeze")
def _unsqueeze(call: Call) -> Rule:
    operand, sizes = named_dims(call.shapes[0])
    dim = positive_dim(call.argument(1, "dim"), len(operand) + 1)
    return Rule((operand,), ((*operand[:dim], (), *operand[dim:]),), sizes, terms=((0,),),
                moves=True)


@rule_for("squeeze")
def _squeeze(call: Call) -> Rule:
    """The dims to drop are chosen by global size: a local size of 1 says nothing."""
    shape = call.shapes[0]
    operand, sizes = named_dims(shape)
    dim = call.argument(1, "dim")
    asked = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    drop = tuple(d for d in {positive_dim(d, len(shape)) for d in asked} if shape and shape[d] == 1)
    kept = tuple(names for d, names in enumerate(operand) if d not in drop)

    def localize(_: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> Callable:
        local_shape = results[0].local_shape
        if call.name == "squeeze_":
            return lambda x, *_, **__: x.squeeze_(drop) if drop else x
        return lambda x, *_, **__: x.squeeze(drop) if drop else x.view(local_shape)

    whole = frozenset(f"d{d}" for d in drop)
    return Rule((operand,), (kept,), sizes, whole=whole, terms=((0,),), moves=True,
                localize=localize)


def _regrouped(call: Call, shape: Sequence[int]) -> Rule:
    """A reshape: dims are split into factors that old and new dims share.

    Both shapes are cut where either has a boundary; where the cuts do not nest, the dims
    between two common boundaries become one factor that stays whole.
    """
    old = call.shapes[0]
    operand, result, sizes, whole = _shared_factors(old, shape)

    def localize(_: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> Callable:
        local_shape = results[0].local_shape
        if call.name == "reshape":
            return lambda x, *_, **__: x.reshape(local_shape)
        if call.name in ("flatten", "reshape_as", "ravel", "unflatten"):
            return lambda x, *_, **__: x.reshape(local_shape)
        return lambda x, *_, **__: x.view(local_shape)

    unread = frozenset(range(1, len(call.specs)))
    operands = (operand, *(tuple(() for _ in other) for other in call.shapes[1:]))
    return Rule(operands, (result,), sizes, whole=whole, terms=((0,),), moves=True,
                unread=unread, localize=localize, result_shapes=(tuple(shape),))


def _shared_factors(old: Sequence[int], new: Sequence[int]
                    ) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    if 0 in old or 0 in new:
        return _unrelated(old, new)
    cuts = sorted({*_boundaries(old), *_boundaries(new)}, reverse=True)
    sizes, whole, names = {}, set(), {}
    for index, (high, low) in enumerate(zip(cuts, cuts[1:])):
        if high % low:
            return _unrelated(old, new)
        names[high] = f"f{index}"
        sizes[f"f{index}"] = high // low
    return _factored(old, names, cuts), _factored(new, names, cuts), sizes, frozenset(whole)


def _boundaries(shape: Sequence[int]) -> list[int]:
    """Numbers of elements to the right of each dim boundary, from all of them to 1."""
    return [prod(shape[dim:]) for dim in range(len(shape) + 1)]


def _factored(shape: Sequence[int], names: dict[int, str], cuts: Sequence[int]) -> Dims:
    dims = []
    for dim in range(len(shape)):
        high, low = prod(shape[dim:]), prod(shape[dim + 1:])
        dims.append(tuple(names[cut] for cut in cuts if low < cut <= high))
    return tuple(dims)


def _unrelated(old: Sequence[int], new: Sequence[int]
               ) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    operand, sizes = named_dims(old, "old")
    result, more = named_dims(new, "new")
    sizes.update(more)
    return operand, result, sizes, frozenset(sizes)


@rule_for("view reshape _unsafe_view")
def _view(call: Call) -> Optional[Rule]:
    shape = call.arguments_from(1, "shape" if "shape" in call.kwargs else "size")
    if not all(isinstance(size, int) for size in shape):
        return None  # view(dtype)
    return _regrouped(call, _without_minus_one(shape, prod(call.shapes[0])))


def _without_minus_one(shape: Sequence[int], count: int) -> tuple[int, ...]:
    known = prod(size for size in shape if size != -1)
    return tuple(count // max(known, 1) if size == -1 else size for size in shape)


@rule_for("view_as reshape_as")
def _view_as(call: Call) -> Rule:
    return _regrouped(call, call.shapes[1])


@rule_for("flatten ravel")
def _flatten(call: Call) -> Rule:
    shape = tuple(call.shapes[0])
    if not shape:
        return _regrouped(call, (1,))
    start = positive_dim(call.argument(1, "start_dim", 0), len(shape))
    end = positive_dim(call.argument(2, "end_dim", -1), len(shape))
    return _regrouped(call, (*shape[:start], prod(shape[start:end + 1]), *shape[end + 1:]))


@rule_for("unflatten")
def _unflatten(call: Call) -> Rule:
    shape = tuple(call.shapes[0])
    dim = positive_dim(call.argument(1, "dim"), len(shape))
    sizes = call.argument(2, "sizes")
    if not isinstance(sizes, (tuple, list)):
        sizes = call.args[2:]
    return _regrouped(call, (*shape[:dim], *_without_minus_one(sizes, shape[dim]),
                             *shape[dim + 1:]))


@rule_for("expand expand_as broadcast_to")
def _expand(call: Call) -> Rule:
    """New dims and stretched ones are copies, so they are whole on every rank."""
    old = call.shapes[0]
    if call.name == "expand_as":
        shape = tuple(call.shapes[1])
    else:
        shape = tuple(call.arguments_from(1, "size"))
    shape = tuple(shape)
    new = len(shape) - len(old)
    shape = tuple(old[dim - new] if size == -1 else size for dim, size in enumerate(shape))
    if new < 0 or any(size not in (1, wanted) for size, wanted in zip(old, shape[new:])):
        raise ValueError(f"a tensor of the shape {tuple(old)} does not expand to {shape}: only "
                         "dims of size 1 grow, and new dims come first.")
    operand, sizes = named_dims(old)
    operand = tuple(() if old[dim] == 1 != shape[dim + new] else names
                    for dim, names in enumerate(operand))
    result = tuple(operand[dim - new] if dim >= new and operand[dim - new] else (f"new{dim}",)
                   for dim in range(len(shape)))
    sizes.update({f"new{dim}": size for dim, size in enumerate(shape)})
    unread = frozenset(range(1, len(call.specs)))
    operands = (operand, *(tuple(() for _ in other) for other in call.shapes[1:]))

    def localize(_: Sequence[TensorSpec], results: Sequence[TensorSpec]) -> Callable:
        local_shape = results[0].local_shape
        return lambda x, *_, **__: x.expand(local_shape)

    return Rule(operands, (result,), sizes, terms=((0,),), moves=True, unread=unread,
                localize=localize, result_shapes=(shape,))


def _composed(function: Callable) -> Callable[[Call], Decomposition]:
    return lambda call: Decomposition(function)


def _split_at(dim: int) -> Callable:
    """``hsplit`` and the like; a vector is split along its only dim."""
    def run(x: Any, sections: Any) -> Any:
        return x.tensor_split(sections, 0 if len(x.shape) == 1 else dim)

    return run


add_rule("fliplr", _composed(lambda x: x.flip(1)))
add_rule("flipud", _composed(lambda x: x.flip(0)))
add_rule("hsplit", _composed(_split_at(1)))
add_rule("vsplit", _composed(_split_at(0)))
add_rule("dsplit", _composed(_split_at(2)))


@rule_for("split split_with_sizes chunk tensor_split unbind select narrow unsafe_chunk "
          "unsafe_split flip roll")
def _along_whole_dims(call: Call) -> Optional[Any]:
    """Operators that cut or turn one dim, which therefore has to be whole."""
    shape = tuple(call.shapes[0])
    operand, sizes = named_dims(shape)
    if len(call.specs) > 1:
        return None
    position = {"select": 1, "narrow": 1, "unbind": 1}.get(call.name, 2)
    if call.name in ("flip", "roll"):
        return _turned(call)
    dim = positive_dim(call.argument(position, "dim", 0), len(shape))
    options: dict[str, Any] = {"whole": frozenset((f"d{dim}",)), "terms": ((0,),), "moves": True}
    rest = (*operand[:dim], *operand[dim + 1:])
    if call.name == "select":
        return Rule((operand,), (rest,), sizes, **options)
    if call.name == "unbind":
        return Rule((operand,), (rest,) * shape[dim], sizes, **options)
    lengths = _lengths(call, shape[dim])
    return None if lengths is None else _cut(call, dim, lengths, options)


def _cut(call: Call, dim: int, lengths: Sequence[int], options: dict[str, Any]) -> Any:
    """Pieces of some lengths along a dim."""
    shape = tuple(call.shapes[0])
    operand, sizes = named_dims(shape)
    if "split" in call.name and "tensor" not in call.name and sum(lengths) != shape[dim]:
        raise ValueError(f"the pieces {list(lengths)} that {call.name!r} shall give do not add up "
                         f"to the size {shape[dim]} of dim {dim}.")
    if call.name != "narrow" and can_be_shared_out(call.specs[0], dim, lengths):
        return Decomposition(lambda x, *_, **__: equal_parts(x, dim, len(lengths)))
    pieces = tuple((*shape[:dim], length, *shape[dim + 1:]) for length in lengths)
    return Rule((operand,), (operand,) * len(pieces), sizes, result_shapes=pieces, **options)


def _lengths(call: Call, size: int) -> Optional[list[int]]:
    """Lengths of the pieces that a cut along a dim of ``size`` gives."""
    if call.name == "narrow":
        length = call.argument(3, "length")
        return [length] if isinstance(length, int) else None
    if call.name == "tensor_split":
        return _lengths_of_sections(call.argument(1, "tensor_indices_or_sections", call.kwargs.get(
            "indices", call.kwargs.get("sections", call.kwargs.get("indices_or_sections")))), size)
    if "chunk" in call.name:
        count = call.argument(1, "chunks")
        step = -(-size // count) or 1
        return [min(step, size - start) for start in range(0, size, step)] or [0]
    sizes = call.argument(1, "split_size", call.kwargs.get("split_size_or_sections",
                                                           call.kwargs.get("split_sizes")))
    if isinstance(sizes, int):
        return [min(sizes, size - start) for start in range(0, size, sizes)] or [0]
    return list(sizes)


def _lengths_of_sections(sections: Any, size: int) -> Optional[list[int]]:
    """``tensor_split``: a number of nearly even pieces, or the places where to cut."""
    if isinstance(sections, int):
        return [size // sections + (index < size % sections) for index in range(sections)]
    if not isinstance(sections, (tuple, list)):
        return None
    pieces = [range(size)[start:stop] for start, stop in zip((None, *sections), (*sections, None))]
    return [len(piece) for piece in pieces]


def _turned(call: Call) -> Optional[Rule]:
    """flip and roll over some dims."""
    operand, sizes = named_dims(call.shapes[0])
    if call.name == "flip":
        dims = call.arguments_from(1, "dims")
    else:
        dims = call.argument(2, "dims")
        if dims is None or dims == ():
            dims = range(len(operand))
    dims = (dims,) if isinstance(dims, int) else dims
    whole = frozenset(f"d{positive_dim(dim, len(operand))}" for dim in dims)
    return Rule((operand,), (operand,), sizes, whole=whole, terms=((0,),), moves=True)


@rule_for("to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc "
          "to_mkldnn")
def _to_other_memory(call: Call) -> None:
    raise ValueError(
        f"{call.name!r} gives a tensor without dense dims, which cannot be spread over a mesh; "
        "call it on x.full_tensor() or, for this rank's part, on x.to_local(); x has the layout "
        f"{call.specs[0].layout!r}.")

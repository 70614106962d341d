"""Writing and reading at places that another tensor names, along one dim.

The dim is whole.  Along the others each line is treated by itself, so they may be sharded where
all operands have the same size there.
"""
from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.shard._registry import rule_for
from hyper_parallel.core.shard._rule import (
    Call, Decomposition, Dims, Rule, named_dims, positive_dim, rule_from_notation)


def _lines(shapes: Sequence[Sequence[int]], dim: int, result: int, **options: Any) -> Rule:
    """Operands that share all dims but ``dim``; the result has the dims of operand ``result``."""
    ndim = len(shapes[0])
    shared = [d != dim and len({shape[d] for shape in shapes}) == 1 for d in range(ndim)]
    operands: list[Dims] = []
    sizes: dict[str, int] = {}
    for index, shape in enumerate(shapes):
        names = [f"d{d}" if shared[d] else f"own{index}_{d}" for d in range(ndim)]
        sizes.update(zip(names, shape))
        operands.append(tuple((name,) for name in names))
    whole = frozenset(name for name in sizes if not name.startswith("d"))
    return Rule(tuple(operands), (operands[result],), sizes, whole=whole, **options)


@rule_for("take_along_dim")
def _take_along_dim(call: Call) -> Optional[Rule]:
    dim = call.argument(2, "dim")
    if dim is None or call.operand(1, "indices") != 1 or not _of_one_ndim(call.shapes):
        return None
    dim = positive_dim(dim, len(call.shapes[0]))
    shapes = [[size for d, size in enumerate(shape) if d != dim] for shape in call.shapes]
    return _lines(call.shapes, dim, 1) if shapes[0] == shapes[1] else None


@rule_for("scatter scatter_add scatter_reduce")
def _scatter(call: Call) -> Optional[Rule]:
    """``x.scatter(dim, index, src)``; ``src`` may be a number."""
    if call.operand(2, "index") != 1 or len(call.shapes) > 3 or not _of_one_ndim(call.shapes):
        return None
    dim = positive_dim(call.argument(1, "dim"), len(call.shapes[0]))
    return _lines(call.shapes, dim, 0)


def _of_one_ndim(shapes: Sequence[Sequence[int]]) -> bool:
    return len({len(shape) for shape in shapes}) == 1 and len(shapes[0]) > 0


@rule_for("index_select")
def _index_select(call: Call) -> Optional[Rule]:
    shape = call.shapes[0]
    if not shape or call.operand(2, "index") != 1:
        return None
    dim = positive_dim(call.argument(1, "dim"), len(shape))
    operand, sizes = named_dims(shape)
    sizes["picked"] = call.shapes[1][0] if call.shapes[1] else 1
    result = (*operand[:dim], ("picked",), *operand[dim + 1:])
    index = (("picked",),) if call.shapes[1] else ()
    return Rule((operand, index), (result,), sizes, whole=frozenset((f"d{dim}",)), terms=((0,),),
                moves=True)


@rule_for("index_add index_copy index_fill index_reduce")
def _index_write(call: Call) -> Optional[Rule]:
    """``x.index_add(dim, index, source)``: whole slices are written at the places of an index."""
    shape = call.shapes[0]
    if not shape or call.operand(2, "index") != 1 or len(call.shapes[1]) > 1:
        return None
    dim = positive_dim(call.argument(1, "dim"), len(shape))
    operand, sizes = named_dims(shape)
    sizes["written"] = call.shapes[1][0] if call.shapes[1] else 1
    index = (("written",),) if call.shapes[1] else ()
    operands = [operand, index]
    if len(call.shapes) == 3:
        source = call.shapes[2]
        if len(source) == len(shape):
            operands.append((*operand[:dim], ("written",), *operand[dim + 1:]))
        elif source:
            return None
        else:
            operands.append(())
    return Rule(tuple(operands), (operand,), sizes, whole=frozenset((f"d{dim}", "written")))


@rule_for("select_scatter slice_scatter")
def _slice_write(call: Call) -> Optional[Rule]:
    """A copy of the first tensor with a slice of it replaced by the second."""
    if len(call.shapes) != 2:
        return None
    shape = call.shapes[0]
    dim = positive_dim(call.argument(2, "dim", 0), len(shape))
    operand, sizes = named_dims(shape)
    source = (*operand[:dim], *operand[dim + 1:])
    if call.name == "slice_scatter":
        source = (*operand[:dim], ("written",), *operand[dim + 1:])
        sizes["written"] = call.shapes[1][dim]
    return Rule((operand, source), (operand,), sizes, whole=frozenset((f"d{dim}", "written")),
                terms=((0,), (1,)))


@rule_for("one_hot")
def _one_hot(call: Call) -> Any:
    """Without a number of classes it is the largest index plus one, which all ranks must know."""
    count = call.argument(1, "num_classes", -1)
    if count == -1:
        func: Callable = call.func
        return Decomposition(lambda x, *_, **__: func(x, int(x.max()) + 1))
    rule = rule_from_notation("... -> ...", call.shapes)
    return Rule(rule.operands, ((*rule.results[0], ("classes",)),),
                {**rule.sizes, "classes": count}, whole=frozenset(("classes",)))


@rule_for("searchsorted")
def _searchsorted(call: Call) -> Optional[Rule]:
    if len(call.shapes) != 2 or call.operand(1, "input") != 1:
        return None
    if len(call.shapes[0]) == 1:
        return rule_from_notation("k, ... -> ...", call.shapes, whole="k")
    return rule_from_notation("... k, ... v -> ... v", call.shapes, whole="k")

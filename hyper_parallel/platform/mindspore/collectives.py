"""Collectives without gradients.

The functions here take plain tensors of any strides, never modify an input and return a fresh
tensor. MindSpore on the CPU has an all-reduce and an all-gather of some dtypes; the others are
made from these. A failed collective cannot be recovered from, so nothing is tried: what a dtype or
a device cannot do is known beforehand.
"""
from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import mindspore
import numpy as np
from mindspore import Tensor, mint
from mindspore.mint import distributed as dist
from mindspore.ops import ReduceOp

from hyper_parallel.platform import checks
from hyper_parallel.platform.mindspore.groups import Group
from hyper_parallel.platform.mindspore.history import copied

ON_CPU = mindspore.get_context("device_target") == "CPU"

_COMPLEX = frozenset({mindspore.complex64, mindspore.complex128})
_FLOATING = frozenset({mindspore.float16, mindspore.bfloat16, mindspore.float32,
                       mindspore.float64})
# What the CPU's collectives take as it is. A dtype that is not gathered is sent as bytes, one that
# is not reduced is gathered.
_GATHERED = frozenset({
    mindspore.float16, mindspore.bfloat16, mindspore.float32, mindspore.float64, mindspore.int8,
    mindspore.int32, mindspore.int64, mindspore.uint8})
_REDUCED = frozenset({mindspore.float16, mindspore.bfloat16, mindspore.float32, mindspore.int32,
                      mindspore.int64})
_NATIVE = {"sum": ReduceOp.SUM, "avg": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN,
           "product": ReduceOp.PROD}
_NUMPY = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum,
          "product": np.multiply}
# The sum of bools is "or", the product "and".
_NUMPY_BOOL = {**_NUMPY, "sum": np.logical_or, "product": np.logical_and}


def check_reduction(op: str, dtype: Any) -> None:
    """Raise unless ``op`` is a reduction that tensors of ``dtype`` have."""
    checks.check_reduction(op, dtype, dtype in _COMPLEX, dtype in _FLOATING)


def _sent(function: Callable, *args: Any, group: Group) -> None:
    """Call one of MindSpore's collectives; its error says little."""
    try:
        function(*args, group=str(group))
    except RuntimeError as error:
        raise RuntimeError(
            f"a collective of the ranks {checks.shown(group.ranks)} ended without a result: each "
            f"of them has to take part in it, in the same order and with equal shapes, within the "
            f"time that MindSpore waits (init_process_group(timeout=...) sets it). Start the "
            f"program anew: what is sent after this cannot be relied on. It said: {error}"
        ) from error


def comparable(tensor: Tensor) -> Tensor:
    """``tensor``, or as float32 what neither numpy nor the kernels that compare know."""
    return tensor.astype(mindspore.float32) if tensor.dtype == mindspore.bfloat16 else tensor


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A numpy copy; bfloat16, which numpy does not have, as float32."""
    return np.array(comparable(tensor).asnumpy())


def _nothing_to_send(data: Tensor) -> bool:
    """Whether all ranks hold no element, of which the frameworks' kernels make errors."""
    return 0 in data._shape


def all_gather(data: Tensor, group: Group) -> list[Tensor]:
    """Every rank's ``data``, in the order of the group."""
    shape, size = tuple(data._shape), group.size()
    if _nothing_to_send(data):
        return [copied(data) for _ in range(size)]
    if ON_CPU and data.dtype not in _GATHERED:
        array = to_numpy(data)
        sent = Tensor.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return [Tensor(piece.asnumpy().view(array.dtype).reshape(shape))
                for piece in all_gather(sent, group)]
    pieces = [mint.empty(shape or (1,), dtype=data.dtype) for _ in range(size)]
    _sent(dist.all_gather, pieces, copied(data.reshape(shape or (1,))), group=group)
    return pieces if shape else [piece.reshape(()) for piece in pieces]


def all_gather_concat(data: Tensor, dim: int, group: Group) -> Tensor:
    """Every rank's ``data``, joined along ``dim``."""
    return mint.cat(tuple(all_gather(data, group)), dim)


def all_reduce(data: Tensor, op: str, group: Group) -> Tensor:
    """The combination of every rank's ``data``."""
    if _nothing_to_send(data):
        return copied(data)
    if ON_CPU and data.dtype not in _REDUCED:
        arrays = [to_numpy(piece) for piece in all_gather(data, group)]
        combine = (_NUMPY_BOOL if data.dtype == mindspore.bool_ else _NUMPY)[op]
        total = arrays[0]
        for array in arrays[1:]:
            total = combine(total, array)
        if op == "avg":
            total = total / group.size()
        return Tensor(total.astype(arrays[0].dtype))
    result = copied(data)
    _sent(dist.all_reduce, result, _NATIVE[op], group=group)
    return (result / group.size()).astype(data.dtype) if op == "avg" else result


def reduce_scatter(data: Tensor, dim: int, op: str, group: Group) -> Tensor:
    """The own piece along ``dim`` of the combination of every rank's ``data``."""
    size = group.size()
    length = data._shape[dim] // size
    if ON_CPU or op == "avg":
        whole = all_reduce(data, op, group)
        return copied(mint.narrow(whole, dim, group.rank() * length, length))
    stacked = data if dim == 0 else mint.cat(mint.chunk(data, size, dim), 0)
    shape = list(data._shape)
    shape[dim] = length
    piece = mint.empty(tuple(shape), dtype=data.dtype)
    _sent(dist.reduce_scatter_tensor, piece, stacked.contiguous(), _NATIVE[op], group=group)
    return piece


def all_to_all(data: Tensor, group: Group) -> Tensor:
    """The equal pieces of dim 0 that the ranks have for this one, joined along dim 0."""
    length = data._shape[0] // group.size()
    if ON_CPU:
        start = group.rank() * length
        return mint.cat(tuple(mint.narrow(each, 0, start, length)
                              for each in all_gather(data, group)), 0)
    output = mint.empty(tuple(data._shape), dtype=data.dtype)
    _sent(dist.all_to_all_single, output, data.contiguous(), group=group)
    return output


def exchange(data: Tensor, input_splits: Sequence[int], output_splits: Sequence[int],
             group: Group) -> Tensor:
    """As :func:`all_to_all` for pieces that may differ in length.

    Each rank gets all that all the others send and picks its own: what it is to get is not known
    elsewhere, so the pieces are padded to the longest of all ranks.
    """
    if not ON_CPU:
        output = mint.empty((sum(output_splits), *data._shape[1:]), dtype=data.dtype)
        _sent(dist.all_to_all_single, output, data.contiguous(), list(output_splits),
              list(input_splits), group=group)
        return output
    own = group.rank()
    sent = Tensor(np.array(input_splits, np.int64))
    table = np.stack([to_numpy(row) for row in all_gather(sent, group)])
    if list(table[:, own]) != list(output_splits):
        raise ValueError(f"output_splits {list(output_splits)} must be what the ranks send to this "
                         f"one, which is {table[:, own].tolist()}")
    longest = int(table.sum(axis=1).max())
    padding = data.new_zeros((longest - data._shape[0], *data._shape[1:]))
    everything = all_gather(mint.cat((data, padding), 0), group)
    starts = table.cumsum(axis=1) - table
    return mint.cat(tuple(mint.narrow(each, 0, int(starts[rank, own]), int(table[rank, own]))
                          for rank, each in enumerate(everything)), 0)


def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """Overwrite ``tensor`` with that of the position ``source`` in the group."""
    if _nothing_to_send(tensor):
        return
    if ON_CPU and tensor.dtype not in _REDUCED:
        tensor.copy_(all_gather(tensor, group)[source])
        return
    # What is sent is overwritten, and that does not work through a view.
    sent = copied(tensor if tensor._shape else tensor.reshape((1,)))
    _sent(dist.broadcast, sent, group.ranks[source], group=group)
    tensor.copy_(sent if tensor._shape else sent.reshape(()))


def scatter(output: Tensor, pieces: Optional[Sequence[Tensor]], source: int, group: Group) -> None:
    """Fill ``output`` with the own piece of those that the position ``source`` holds."""
    shape = tuple(output._shape)
    if pieces is None:
        stacked = mint.empty((group.size(), *shape), dtype=output.dtype)
    else:
        stacked = mint.cat(tuple(piece.reshape((1, *shape)) for piece in pieces), 0)
    broadcast(stacked, source, group)
    output.copy_(copied(mint.narrow(stacked, 0, group.rank(), 1)).reshape(shape))

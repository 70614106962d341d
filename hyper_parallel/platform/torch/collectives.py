"""Collectives without gradients, and the autograd node that gives them one.

The functions here take plain tensors of any strides and any dtype, never modify an input and
return a fresh tensor. Each issues exactly one collective.

A backend knows some dtypes only. A collective that merely moves data sends the others as bytes;
one that computes does it in a wider dtype, which gives the same result.
"""
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from hyper_parallel.platform import checks

# Releases before 2.13 know the one-tensor forms by their older names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Gradients = Callable[[Tensor], tuple[Optional[Tensor], Optional[Tensor]]]

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: no backend's own average is needed
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
# Backends add bools as bytes: twice True would be the byte 2, and 256 times True would be False.
_BOOL_REDUCTIONS = {**_REDUCTIONS, "sum": dist.ReduceOp.MAX, "product": dist.ReduceOp.MIN}

_MOVABLE = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128})
_REDUCED_AS_THEY_ARE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32,
          torch.uint32: torch.int64, torch.complex32: torch.complex64}


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise unless ``op`` is a reduction that tensors of ``dtype`` have."""
    if op != "sum":
        checks.check_reduction(op, dtype, dtype.is_complex, dtype.is_floating_point)


def _packed(data: Tensor) -> Tensor:
    """``data`` as memory that can be sent: contiguous, nothing pending (conjugation, sign)."""
    return data.contiguous().resolve_conj().resolve_neg()


def _wire(packed: Tensor) -> Tensor:
    """A flat view of ``packed`` in a dtype that every backend moves."""
    flat = packed.view(-1)
    return flat if flat.dtype in _MOVABLE else flat.view(torch.uint8)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point and dtype.itemsize == 1:  # the float8 family
        return torch.float32
    return _WIDER.get(dtype, dtype)


def _reduced(total: Tensor, op: str, size: int, dtype: torch.dtype) -> Tensor:
    if op == "avg":
        total = total.div_(size)
    return released(total) if total.dtype is dtype else total.to(dtype)


def released(received: Tensor) -> Tensor:
    """Memory that a backend wrote, as a tensor that the backend does not know.

    A thread of the backend may hold its own for a moment longer. As the result of an autograd
    node that would keep a whole graph alive, and let it die on that thread, which aborts a process
    that is about to end. Nor is it a view, so that a result may be modified in place.
    """
    return received.data


def _reduce_op(op: str, dtype: torch.dtype) -> Any:
    return (_BOOL_REDUCTIONS if dtype is torch.bool else _REDUCTIONS)[op]


def all_reduce(data: Tensor, op: str, group: dist.ProcessGroup, size: int) -> Tensor:
    """The combination of every rank's ``data``."""
    dtype = data.dtype
    if op == "product" and dtype.is_complex:  # backends multiply real numbers only
        return _all_gather(data, group, size).prod(dim=0)
    if dtype in _REDUCED_AS_THEY_ARE:  # the common case, which is worth its own short way
        total = data.clone(memory_format=torch.contiguous_format)
    else:
        total = _packed(data.to(_computed_in(dtype), memory_format=torch.contiguous_format,
                                copy=True))
    dist.all_reduce(total, _reduce_op(op, dtype), group)
    return _reduced(total, op, size, dtype)


def all_reduce_async(data: Tensor, op: str, group: dist.ProcessGroup) -> Any:
    """Combine every rank's ``data`` in place; gives the handle to wait for."""
    return dist.all_reduce(data, _reduce_op(op, data.dtype), group, async_op=True)


def reduce_scatter(data: Tensor, dim: int, op: str, group: dist.ProcessGroup,
                   size: int) -> Tensor:
    """The own piece along ``dim`` of the sum or average of every rank's ``data``."""
    dtype = data.dtype
    stacked = _packed(data if dim == 0 else torch.cat(data.chunk(size, dim)))
    stacked = stacked.to(_computed_in(dtype))
    shape = list(data.shape)
    shape[dim] //= size
    piece = stacked.new_empty(shape)
    _reduce_scatter_single(piece.view(-1), stacked.view(-1), _reduce_op(op, dtype), group)
    return _reduced(piece, op, size, dtype)


def _all_gather(data: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """Every rank's ``data``, stacked along a new dim 0."""
    packed = _packed(data)
    stacked = packed.new_empty((size, *packed.shape))
    _all_gather_single(_wire(stacked), _wire(packed), group)
    return stacked


def all_gather_concat(data: Tensor, dim: int, group: dist.ProcessGroup, size: int) -> Tensor:
    """Every rank's ``data``, joined along ``dim``."""
    stacked = _all_gather(data, group, size)
    before = data.shape[:dim]
    if before.numel() == 1:  # the stacked pieces lie in memory as the joined ones do
        return released(stacked.view(*before, size * data.shape[dim], *data.shape[dim + 1:]))
    return torch.cat(stacked.unbind(), dim)


def _exchange(data: Tensor, input_splits: Optional[Sequence[int]],
              output_splits: Optional[Sequence[int]], group: dist.ProcessGroup,
              asynchronous: bool) -> tuple[Tensor, Any]:
    packed = _packed(data)
    rows = packed.shape[0] if output_splits is None else sum(output_splits)
    output = packed.new_empty((rows, *packed.shape[1:]))
    row = packed.shape[1:].numel()
    if packed.dtype not in _MOVABLE:
        row *= packed.dtype.itemsize
    work = dist.all_to_all_single(
        _wire(output), _wire(packed),
        None if output_splits is None else [length * row for length in output_splits],
        None if input_splits is None else [length * row for length in input_splits],
        group, async_op=asynchronous)
    return output, work


def all_to_all(data: Tensor, input_splits: Optional[Sequence[int]],
               output_splits: Optional[Sequence[int]], group: dist.ProcessGroup) -> Tensor:
    """The pieces of dim 0 that the ranks have for this one, joined along dim 0.

    Splits are lengths in rows of dim 0; None splits evenly.
    """
    return released(_exchange(data, input_splits, output_splits, group, False)[0])


def all_to_all_async(data: Tensor, input_splits: Optional[Sequence[int]],
                     output_splits: Optional[Sequence[int]],
                     group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """As :func:`all_to_all`, with the handle to wait for before the tensor may be read."""
    return _exchange(data, input_splits, output_splits, group, True)


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite ``tensor`` with that of the position ``source`` in the group."""
    with torch.no_grad():
        packed = _packed(tensor)
        dist.broadcast(_wire(packed), group=group, group_src=source)
        if packed is not tensor:
            tensor.copy_(packed)


def scatter(output: Tensor, pieces: Optional[Sequence[Tensor]], source: int,
            group: dist.ProcessGroup) -> None:
    """Fill ``output`` with the own piece of those that the position ``source`` holds."""
    with torch.no_grad():
        packed = _packed(output)
        sent = None if pieces is None else [_wire(_packed(piece)) for piece in pieces]
        dist.scatter(_wire(packed), sent, group=group, group_src=source)
        if packed is not output:
            output.copy_(packed)


def alias(tensor: Tensor) -> Tensor:
    """A plain tensor that shares everything with ``tensor``, gradient included.

    Called on the base class, since a subclass may have a view of its own.
    """
    return Tensor.view_as(tensor, tensor)


class _WithGradient(torch.autograd.Function):
    """One node whose value and gradient are given as functions."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[Tensor], Tensor],
                backward: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        """The value."""
        ctx.gradient = backward
        ctx.set_materialize_grads(False)
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> tuple[None, None, Optional[Tensor]]:
        """The gradient of the tensor; the two functions have none."""
        return None, None, None if grad is None else ctx.gradient(grad)


# The apply of the C base class: that of Function looks for what this node does not have, such as
# default arguments and functorch's transforms, and takes longer than all the rest.
_new_node = super(torch.autograd.Function, _WithGradient).apply


def apply_with_gradient(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor],
                        tensor: Tensor) -> Tensor:
    """``forward(tensor)`` as one node; see ``Platform.apply_with_gradient``."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _new_node(forward, backward, tensor)
    value = forward(tensor)
    return alias(tensor) if value is tensor else value


class _Between(torch.autograd.Function):
    """One node whose value is given, and whose gradient goes to either of two tensors."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, value: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """The value."""
        del near, far
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        """The gradients of the two tensors; the others have none."""
        return None, None, *((None, None) if grad is None else ctx.gradients(grad))


_new_node_between = super(torch.autograd.Function, _Between).apply


def value_between(value: Tensor, near: Tensor, far: Tensor, gradients: Gradients) -> Tensor:
    """``value`` with a gradient for one of two tensors; see ``Platform.value_between``."""
    return _new_node_between(gradients, value, near, far)

"""Where tensors come from and who waits for their gradients; the node with a given gradient.

MindSpore differentiates a function (``mindspore.grad``): while it runs, operators are recorded on
what needs a gradient, and there is no history outside of it.
"""
from __future__ import annotations

import threading
from typing import Any, Callable

from mindspore import Parameter, Tensor, mint
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor

_records = _pynative_executor.requires_grad


def records_gradients() -> bool:
    """Whether what is computed now is recorded for a backward pass, if there will be one."""
    return _records() if in_backward() else _pynative_executor.enable_grad()


def needs_gradient(tensor: Tensor) -> bool:
    """Whether what is computed from ``tensor`` now will be differentiated."""
    return tensor._requires_grad and _records()


def is_leaf(tensor: Tensor) -> bool:
    """Whether ``tensor`` was not computed from what is differentiated."""
    return tensor._is_leaf


def is_trained(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a leaf that needs a gradient."""
    return tensor._requires_grad and tensor._is_leaf


def is_watched(tensor: Tensor) -> bool:
    """Whether somebody waits for the gradient of this very tensor."""
    return bool(tensor._retains_grad or tensor.hooks())


def value_version(tensor: Tensor) -> Any:
    """Differs whenever the values may.

    A leaf outlives the call of ``mindspore.grad`` in which something was computed from it, and
    nothing tells one call from the next, so for a leaf it is never the same.
    """
    if tensor._is_leaf:
        return object()
    # Assignment by index does not count as a version, but changes the node.
    return tensor._version, tensor._grad_node._unique_id()


def keep_with_graph(result: Tensor, tensor: Tensor) -> None:
    """Nothing is kept: views of leaves are made for each use, see :func:`value_version`."""
    del result, tensor


def alias(tensor: Tensor) -> Tensor:
    """A plain tensor that shares everything with ``tensor``, gradient included."""
    result = Tensor._make_subclass(Tensor, tensor)
    if isinstance(tensor, Parameter):
        result.param_info = tensor.param_info  # by which gradients find the parameter
    return result


def detach(tensor: Tensor) -> Tensor:
    """A plain alias of ``tensor`` without its history."""
    return Tensor._make_subclass(Tensor, Tensor.data.__get__(tensor))


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor of any strides and dtype.

    By a join, since ``copy_`` takes a view that begins where its memory does for all of it.
    """
    return mint.cat((tensor,), 0) if tensor._shape else mint.cat((tensor.reshape((1,)),), 0
                                                                 ).reshape(())


def as_leaf(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` itself: what needs a gradient is said when it is asked for."""
    del like
    return tensor


class _Node:
    """One application of a node, and what it was told about itself."""

    origin: object = None


class _Running(threading.local):
    """The nodes whose gradients run on a thread, the innermost last; how many backward passes."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self.passes = 0


_running = _Running()


class _WithGradient(_Function):
    """One node whose value and gradient are given as functions."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[Tensor], Tensor],
                backward: Callable[[Tensor], Tensor], node: _Node, tensor: Tensor) -> Tensor:
        """The value."""
        ctx.gradient, ctx.node = backward, node
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor]:
        """The gradient of the tensor; the others have none."""
        nodes = _running.nodes
        nodes.append(ctx.node)
        try:
            return None, None, None, ctx.gradient(grad)
        finally:
            nodes.pop()


def apply_with_gradient(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor],
                        tensor: Tensor) -> Tensor:
    """``forward(tensor)`` as one node; see ``Platform.apply_with_gradient``."""
    if needs_gradient(tensor):
        node = _Node()
        result = _WithGradient.apply(forward, backward, node, alias(tensor))
        result._hyper_parallel_node = node
        return result
    value = forward(tensor)
    return alias(tensor) if value is tensor else value


def value_between(value: Tensor, near: Tensor, far: Tensor,
                  gradients: Callable[[Tensor], tuple[Any, Any]]) -> Tensor:
    """``value`` with the gradient of ``far``: nothing tells of a watch on ``near``."""
    del near
    return apply_with_gradient(lambda _: value, lambda grad: gradients(grad)[1], far)


def released(tensor: Tensor) -> Tensor:
    """``tensor`` itself: a node's result may be a view here, and no backend holds it."""
    return tensor


class BackwardPass:
    """A context in which MindSpore computes gradients."""

    def __enter__(self) -> None:
        _running.passes += 1

    def __exit__(self, *error: Any) -> None:
        _running.passes -= 1


def in_backward() -> bool:
    """Whether this thread runs a backward pass now."""
    return _running.passes > 0


def mark_backward(result: Tensor, origin: object) -> None:
    """Remember ``origin`` in the node that just gave ``result``."""
    node = getattr(result, "_hyper_parallel_node", None)
    if node is not None:
        node.origin = origin


def backward_origin() -> object:
    """What the node was told whose gradient runs now, or None."""
    return _running.nodes[-1].origin if _running.nodes else None

"""Where MindSpore has no protocol for tensor classes: gradients, optimizers, a few functions.

:func:`install` replaces

* the function below ``mindspore.grad`` and its like by one whose gradients of DTensors are
  DTensors of the dual layout;
* the call of optimizers, which then work on local tensors: what is spread, moments included, is
  updated where it lies, without communication;
* ``ops.stack`` and ``ops.addn``, which would take the local tensors for the whole, and functions
  that would draw other random numbers on each rank;
* what ``save_checkpoint`` writes, which would be the local tensors.
"""
from __future__ import annotations

from functools import wraps
from typing import Any, Callable, Sequence

import mindspore
from mindspore import Tensor, nn, ops
from mindspore.graph.api import _pynative_executor
from mindspore.experimental import optim
from mindspore.train import serialization

from hyper_parallel.platform.mindspore import graph_mode, history, operators
from hyper_parallel.platform.mindspore.dtensor_base import (
    MindSporeDTensorBase, Undressed, first_dtensor, undress)

_native_grad = _pynative_executor.grad
_native_stack = ops.stack
_native_addn = ops.addn
_native_saved = serialization._convert_save_obj_to_param_list
_OF_WHOLE_TENSORS = (nn.Lamb, nn.LARS, nn.AdaFactor)
# Those that draw for a shape, so that their DTensor is never met by an operator.
_AGREEING = ("rand_like", "randn_like", "randint_like")
_DRAWING = ("rrelu", "gumbel_softmax")


def _grad(function: Any, operation: Any, weights: Any, position: Any, has_aux: Any,
          *args: Any) -> Any:
    """The gradients that ``operation`` asks for, of DTensors as DTensors."""
    with history.BackwardPass():
        found = _native_grad(function, operation, weights, position, has_aux, *args)
    if first_dtensor(_in_order(weights)) is None and first_dtensor(args) is None:
        return found
    inputs = [args[place] for place in _in_order(position) if place < len(args)] \
        if operation.get_by_position else args if operation.get_all else args[:1]
    if operation.get_by_list:
        if operation.get_all or operation.get_by_position:
            return _dressed(found[0], inputs), _dressed(found[1], _in_order(weights))
        return _dressed(found, _in_order(weights))
    return _dressed(found, inputs)


def _in_order(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _dressed(gradients: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(gradients, Tensor):
        return _dressed_one(gradients, tensors[0])
    if isinstance(gradients, (tuple, list)) and len(gradients) == len(tensors):
        return type(gradients)(map(_dressed_one, gradients, tensors))
    return gradients


def _dressed_one(gradient: Any, tensor: Any) -> Any:
    if isinstance(tensor, MindSporeDTensorBase) and type(gradient) is Tensor:
        return tensor._global_gradient(gradient, tensor._spec)
    return gradient


def _undressed(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_undressed, value))
    return undress(value) if isinstance(value, MindSporeDTensorBase) else value


def _step(call: Callable) -> Callable:
    """The call of an optimizer on local tensors."""
    def step(optimizer: nn.Cell, *gradients: Any, **options: Any) -> Any:
        if isinstance(optimizer, _OF_WHOLE_TENSORS) and first_dtensor(gradients) is not None:
            raise NotImplementedError(
                f"{type(optimizer).__name__} takes norms or means of whole parameters, and would "
                f"take them of each rank's part; use an optimizer that treats every element "
                f"alike, such as nn.SGD, nn.Momentum, nn.Adam or nn.AdamWeightDecay")
        with Undressed(), graph_mode.Permitted():
            return call(optimizer, *map(_undressed, gradients), **options)

    return step


def _stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """``ops.stack``."""
    found = first_dtensor(tensors)
    if found is None:
        return _native_stack(tensors, axis)
    return found._dispatch(operators.STACK, (tuple(tensors),), {"dim": axis} if axis else {})


def _addn(tensors: Sequence[Tensor]) -> Tensor:
    """``ops.addn``."""
    if first_dtensor(_in_order(tensors)) is None:
        return _native_addn(tensors)
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _agreeing(name: str) -> Callable:
    """A function of ``ops`` that makes a random tensor like another; DTensors have their own."""
    native, operator = getattr(ops, name), operators.operator_of(name)

    @wraps(native)
    def draw(tensor: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(tensor, MindSporeDTensorBase):
            return native(tensor, *args, **options)
        if options.pop("seed", None) is not None:
            raise ValueError(f"ops.{name} of a DTensor takes no seed; call mindspore.set_seed")
        return tensor._dispatch(operator, (tensor, *args), options)

    return draw


def _drawing(name: str) -> Callable:
    """A function of ``ops`` that draws within; DTensors have none."""
    native = getattr(ops, name)

    @wraps(native)
    def draw(tensor: Any, *args: Any, **options: Any) -> Any:
        if isinstance(tensor, MindSporeDTensorBase):
            operators.refuse_drawing(name)
        return native(tensor, *args, **options)

    return draw


def _saved(save_obj: Any, *options: Any) -> list[dict]:
    """What ``save_checkpoint`` writes, with DTensors whole: all ranks have to call it."""
    entries = _native_saved(save_obj, *options)
    known = save_obj.parameters_dict() if isinstance(save_obj, nn.Cell) else {}
    for entry in entries:
        value = known.get(entry["name"], entry["data"])
        if isinstance(value, MindSporeDTensorBase):
            entry["data"] = value.full_tensor()
    return entries


def install() -> None:
    """Replace what is named above."""
    _pynative_executor.grad = _grad
    for optimizer in (nn.Optimizer, optim.Optimizer):
        optimizer.__call__ = _step(optimizer.__call__)
    mindspore.ops.stack = _stack
    mindspore.ops.addn = _addn
    serialization._convert_save_obj_to_param_list = _saved
    for name in _AGREEING:
        setattr(ops, name, _agreeing(name))
    for name in _DRAWING:
        setattr(ops, name, _drawing(name))

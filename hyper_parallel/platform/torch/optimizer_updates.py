"""The arithmetic of PyTorch's optimizers on DTensors: on local tensors, without dispatch.

What these optimizers do to a parameter is elementwise, and its gradient and their state lie as it
does.  So the whole update runs undressed, which costs a model of DTensors what it costs a plain
one.  Optimizers that look at a whole matrix (Muon, LBFGS, Adafactor) are left to the dispatcher.
"""
from __future__ import annotations

import sys
from functools import wraps
from typing import Any, Callable, Sequence

import torch

from hyper_parallel.platform.torch.dtensor_base import TorchDTensorBase, dress, undressed

# Modules of torch.optim whose function of the same name updates a list of parameters.
_ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop",
                "rprop", "sgd")


def _is_local(lists: Sequence[list], options: dict) -> bool:
    """Whether the update of each parameter needs nothing but local tensors.

    Its gradient and its state have to lie as it does, or be one number for all of its elements.
    """
    if options.get("differentiable") or any(
            isinstance(value, TorchDTensorBase) for value in options.values()):
        return False
    for index, parameter in enumerate(lists[0]):
        spec = _spec(parameter)
        if spec is not None and not (spec.dual is spec and spec.is_root):
            return False
        for others in lists[1:]:
            other = others[index] if index < len(others) else None
            if other is not None and _spec(other) is not spec and (
                    spec is None or other.ndim != 0):
                return False
    return True


def _spec(tensor: torch.Tensor) -> Any:
    return tensor._spec if isinstance(tensor, TorchDTensorBase) else None


def _undressed(native: Callable) -> Callable:
    @wraps(native)
    def update(*args: Any, **options: Any) -> None:
        lists = [value for value in args if isinstance(value, list)]
        spread = next((one for one in lists[0] if isinstance(one, TorchDTensorBase)), None) \
            if lists else None
        if spread is None or spread._is_observed() or not _is_local(lists, options):
            native(*args, **options)
            return
        missing = [(one, index) for one in lists[1:] for index, value in enumerate(one)
                   if value is None]
        with undressed():
            native(*args, **options)
        # State that the update made, such as a first momentum, lies as its parameter does.
        for one, index in missing:
            parameter, value = lists[0][index], one[index]
            if value is not None and isinstance(parameter, TorchDTensorBase):
                dress(value, type(parameter), parameter._spec)

    return update


def install() -> None:
    """Replace the functions that the optimizers call."""
    for name in _ELEMENTWISE:
        module = sys.modules[f"torch.optim.{name}"]
        setattr(module, name, _undressed(getattr(module, name)))

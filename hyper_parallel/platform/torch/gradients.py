"""PyTorch's gradients as data parallelism sees them; see ``phase_adapter.py``."""
from __future__ import annotations

from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_iter, tree_map

from hyper_parallel.platform.torch.dtensor_base import TorchDTensorBase, undressed

_native_grad = Tensor.grad
_native_data = Tensor.data


def on_gradient(parameter: nn.Parameter, callback: Callable[[], None]) -> Callable[[], None]:
    """Tell of each gradient."""
    with undressed():
        handle = Tensor.register_post_accumulate_grad_hook(parameter, lambda _: callback())
    return handle.remove


def on_backward_from(output: Any, callback: Callable[[], None]) -> None:
    """Tell when a backward pass begins."""
    with undressed():
        for tensor in tensors_within(output):
            if tensor.requires_grad:
                # A hook that returns nothing leaves the gradient alone.
                Tensor.register_hook(tensor, lambda _: callback())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Tell when it ends."""
    Variable._execution_engine.queue_callback(callback)


def local_gradient(parameter: Tensor) -> Optional[Tensor]:
    """The gradient, undressed."""
    with undressed():
        grad = _native_grad.__get__(parameter)
        return grad.as_subclass(Tensor) if isinstance(grad, TorchDTensorBase) else grad


def set_local_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Put it in its place."""
    with undressed():
        _native_grad.__set__(parameter, gradient)


def local_value(parameter: Tensor) -> Tensor:
    """The tensor's data, undressed.

    Not ``detach()``: buffers that are written anew with equal values, while a backward pass still
    needs them, are no fault.
    """
    with undressed():
        return _native_data.__get__(parameter).as_subclass(Tensor)


def join_flat(tensors: Sequence[Tensor], extra: Sequence[float], scale: float) -> Tensor:
    """One row."""
    first = tensors[0]
    flat = [(tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1) for tensor in tensors]
    if extra:
        flat.append(torch.tensor(extra, dtype=first.dtype, device=first.device))
    row = torch.cat(flat)
    return row if scale == 1 else row.mul_(scale)


def tensors_within(value: Any) -> Iterator[Tensor]:
    """The leaves of a tree that are tensors."""
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """A tree of the same form."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)

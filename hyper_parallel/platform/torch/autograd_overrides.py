"""Where autograd has no override protocol: ``Function.apply``, ``backward`` and ``grad``.

Importing this module replaces ``torch.autograd.Function.apply`` and ``torch.autograd.backward``
by functions that look for a DTensor among their arguments and otherwise call the original, and
makes checkpoint remember which of its arguments are DTensors.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence, Union

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint

from hyper_parallel.platform.torch.dtensor_base import (
    TorchDTensorBase, dispatch_enabled, dress, handle, note_watched, undress, undressed)
from hyper_parallel.platform.torch.operator_names import decomposed

_native_apply = torch.autograd.Function.apply.__func__
_native_backward = decomposed(torch.autograd.backward)
_native_grad = decomposed(torch.autograd.grad)
_native_save_inputs = checkpoint._CheckpointFrame.save_inputs
_native_get_inputs = checkpoint._CheckpointFrame.get_inputs
_native_metadata = checkpoint._default_meta_extractor

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    """``Function.apply``: with a DTensor argument it is an operator like any other."""
    if dispatch_enabled():
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, TorchDTensorBase):
                if cls is checkpoint.CheckpointFunction:
                    return _apply_checkpoint(*args)
                if cls is BackwardHookFunction:
                    return _apply_identity(cls, args)
                return type(arg)._dispatch(cls.apply, args, kwargs)
    return _native_apply(cls, *args, **kwargs)


def is_function_apply(func: Callable) -> bool:
    """Whether ``func`` is the ``apply`` of an autograd Function, whose code sees plain tensors."""
    owner = getattr(func, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _apply_identity(cls: type, args: Sequence[Any]) -> Any:
    """A Function that returns its arguments, as module backward hooks have: so do layouts."""
    results = _native_apply(cls, *map(_take_off, args))
    # Dressed themselves, not through an alias: the hooks look for the Function in their grad_fn.
    for result, arg in zip(results if isinstance(results, tuple) else (results,), args):
        if isinstance(arg, TorchDTensorBase):
            dress(result, type(arg), arg._spec)
    return results


def _apply_checkpoint(run_function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
    """Reentrant checkpoint: its Function sees local tensors, the user's function sees DTensors."""
    inputs = [_clothes(arg) for arg in args]
    outputs: list = []

    def run_local(*local_args: Any) -> Any:
        results = run_function(*map(_put_on, local_args, inputs))
        several = isinstance(results, (tuple, list))
        outputs[:] = map(_clothes, results if several else (results,))
        plain = tuple(map(_take_off, results if several else (results,)))
        return plain if several else plain[0]

    results = _native_apply(checkpoint.CheckpointFunction, run_local, preserve_rng_state,
                            *map(_take_off, args))
    if isinstance(results, tuple):
        return tuple(map(_put_on, results, outputs))
    return _put_on(results, outputs[0])


def _save_inputs(frame: Any, *args: Any) -> None:
    """Other form of checkpoint: within another one, the saved arguments come back undressed."""
    frame.clothes = [_clothes(arg) for arg in args]
    _native_save_inputs(frame, *args)


def _get_inputs(frame: Any) -> list:
    # What comes back undressed is a tensor of its own, so no alias is needed; in a backward pass
    # one would have no history.
    return [value if clothes is None else dress(value, *clothes)
            for value, clothes in zip(_native_get_inputs(frame), frame.clothes)]


def _metadata(tensor: torch.Tensor) -> Any:
    """Other form of checkpoint: what it compares of a saved tensor and of the recomputed one.

    It asks once within an operator, where a DTensor is its local tensor, and once outside.
    """
    with undressed():
        return _native_metadata(tensor)


def _clothes(value: Any) -> Optional[tuple[type, Any]]:
    return (type(value), value._spec) if isinstance(value, TorchDTensorBase) else None


def _take_off(value: Any) -> Any:
    return undress(value) if isinstance(value, TorchDTensorBase) else value


def _put_on(value: Any, clothes: Optional[tuple[type, Any]]) -> Any:
    return value if clothes is None else dress(undress(value), *clothes)


def _backward(tensors: Tensors, *args: Any, **kwargs: Any) -> None:
    """``torch.autograd.backward``: from a DTensor it starts at the local tensor."""
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    if len(args) > 4:
        args, kwargs = args[:4], {**kwargs, "inputs": args[4]}
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = _watched(kwargs["inputs"])
    if any(isinstance(root, TorchDTensorBase) for root in roots):
        grads = args[0] if args else kwargs.pop("grad_tensors", None)
        tensors, grads = _local_roots(roots, grads)
        args = (grads, *args[1:])
    _native_backward(tensors, *args, **kwargs)


def _grad(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """``torch.autograd.grad``: the results are DTensors of the dual layouts."""
    del func
    return _grad_of(*args, **kwargs)


def _grad_of(outputs: Tensors, inputs: Tensors, grad_outputs: Optional[Tensors] = None,
             **options: Any) -> tuple:
    inputs = _watched(inputs)
    roots, grads = _local_roots(
        (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs), grad_outputs)
    results = _native_grad(roots, inputs, grads, **options)
    return tuple(
        tensor._global_gradient(result, tensor._spec)
        if isinstance(tensor, TorchDTensorBase) and result is not None
        and not isinstance(result, TorchDTensorBase) else result
        for result, tensor in zip(results, inputs))


def _watched(inputs: Any) -> tuple:
    """What gradients are asked of, which may be an iterator, with a note on each tensor."""
    single = isinstance(inputs, (torch.Tensor, GradientEdge))
    inputs = (inputs,) if single else tuple(inputs)
    for one in inputs:
        note_watched(one)
    return inputs


def _local_roots(roots: Sequence[torch.Tensor], grads: Optional[Tensors]) -> tuple[tuple, tuple]:
    """Plain tensors to start from, with the gradient of each."""
    if grads is None or isinstance(grads, torch.Tensor):
        grads = (grads,) * len(roots)
    local_roots, local_grads = [], []
    # A backward pass may be asked for under no_grad, where the alias would have no history.
    with torch.enable_grad():
        for root, grad in zip(roots, grads):
            local = _local_root(root, grad) if isinstance(root, TorchDTensorBase) else (root, grad)
            local_roots.append(local[0])
            local_grads.append(local[1])
    return tuple(local_roots), tuple(local_grads)


def _local_root(root: TorchDTensorBase, grad: Optional[torch.Tensor]
                ) -> tuple[torch.Tensor, torch.Tensor]:
    root = root._as_root()
    spec, local = root._spec, undress(root)
    if grad is None:
        if spec.shape.numel() != 1:
            raise RuntimeError("a gradient is implied only for a tensor of one element, but the "
                               f"tensor has the global shape {tuple(spec.shape)}; pass gradient=.")
        return local, torch.ones_like(local)
    if isinstance(grad, TorchDTensorBase) or grad.shape == spec.shape:
        return local, root._local_gradient(grad, spec)
    if grad.shape != local.shape:
        raise RuntimeError(
            f"a gradient has the shape of its tensor, which is {tuple(spec.shape)} (this rank's "
            f"part: {tuple(local.shape)}), but got {tuple(grad.shape)}.")
    # Autograd's own callers, such as checkpoint, hand over the local gradient.
    return local, grad


torch.autograd.Function.apply = classmethod(_apply)
torch.autograd.backward = _backward
checkpoint._CheckpointFrame.save_inputs = _save_inputs
checkpoint._CheckpointFrame.get_inputs = _get_inputs
checkpoint._allowed_determinism_checks_to_fns["default"] = _metadata
handle(torch.autograd.grad, _grad)

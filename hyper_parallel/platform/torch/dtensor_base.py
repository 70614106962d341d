"""The tensor class below DTensor on PyTorch, and the seam: dress, undress, run undressed.

A DTensor *is* the local tensor with its class switched, so autograd, optimizers and C++ code see
the local shard and cost nothing extra.  PyTorch calls ``__torch_function__`` for every function
that meets such a tensor; while subclass dispatch is disabled ("undressed") the same object is
an ordinary local tensor, its ``shape`` included.
"""
from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any, Callable, Mapping, Optional, Sequence

import torch

from hyper_parallel.platform.history_adapter import Watch
from hyper_parallel.platform.torch.checkpoint import CheckpointableTensor
from hyper_parallel.platform.torch.operator_names import operator_name

undressed = torch._C.DisableTorchFunctionSubclass
dispatch_enabled = torch._C._is_torch_function_enabled
_Tensor = torch.Tensor
_local_shape = torch.Tensor.shape.__get__
_memory_layout = torch.Tensor.layout.__get__
_is_sparse = torch.Tensor.is_sparse.__get__
_native_grad = torch.Tensor.grad
_native_data = torch.Tensor.data

# What a DTensor keeps in its instance dict; a copy of the tensor must not carry it along.
_OWN_ATTRIBUTES = ("_spec", "_views", "_views_of_leaf", "_gathered_from", "_watch")

# Whether whoever asks for ``layout`` is code of torch's own that means the memory layout.
memory_layouts: ContextVar[bool] = ContextVar("memory_layouts", default=False)

Handler = Callable[[Callable, tuple, Mapping[str, Any]], Any]


class TorchDTensorBase(CheckpointableTensor):
    """A local tensor that wears a spec (``_spec``: layout and global shape).

    The methods that raise here are holes, which the layers above fill.
    """

    _spec: Any
    _watch: Optional[Watch] = None  # where a gradient that may go past this tensor is asked for
    _in_files: tuple = ()  # what a file that holds such a tensor has in it besides

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # By default torch.load makes only what it was told of.
        torch.serialization.add_safe_globals([_rebuild, cls, *cls._in_files])

    @staticmethod
    def _dispatch(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator; ``hyper_parallel/__init__.py`` puts the dispatcher here."""
        raise RuntimeError("no dispatcher is installed; import hyper_parallel before using a "
                           f"DTensor (called for {func} with {len(args) + len(kwargs)} arguments).")

    @staticmethod
    def _is_observed() -> bool:
        """Whether somebody wants to see every operator; ``hyper_parallel/__init__.py`` says how
        to tell."""
        return True

    @staticmethod
    def _local_gradient(grad: torch.Tensor, spec: Any) -> torch.Tensor:
        """Local part of ``grad``, plain or not, for a tensor with ``spec``; DTensor says how."""
        raise RuntimeError(f"the class of a DTensor must say how a gradient lies under {spec}, "
                           f"but it does not (gradient of shape {tuple(grad.shape)}).")

    @staticmethod
    def _global_gradient(grad: torch.Tensor, spec: Any) -> "TorchDTensorBase":
        """The local gradient ``grad`` of a tensor with ``spec`` as DTensor; DTensor says how."""
        raise RuntimeError(f"the class of a DTensor must say how a gradient lies under {spec}, "
                           f"but it does not (gradient of shape {tuple(grad.shape)}).")

    def _as_root(self) -> "TorchDTensorBase":
        """The tensor from which a backward pass may start; DTensor says which."""
        raise RuntimeError("the class of a DTensor must say where a backward pass starts.")

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor on every rank, as a plain tensor; DTensor knows how to gather it."""
        raise RuntimeError("the class of a DTensor must say how the tensor is gathered.")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (),
                           kwargs: Optional[Mapping[str, Any]] = None) -> Any:
        try:
            handler = _handlers[func]
        except KeyError:
            handler = _handlers[func] = _find_handler(func)
        if handler is None:
            return cls._dispatch(func, args, kwargs or {})
        return handler(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        """Global shape; the local one while undressed."""
        return self._spec.shape if dispatch_enabled() else _local_shape(self)

    @property
    def layout(self) -> Any:
        """Mesh, placements and shard order; while undressed the memory layout torch knows."""
        if dispatch_enabled() and not memory_layouts.get():
            return self._spec.layout
        return _memory_layout(self)

    @property
    def is_sparse(self) -> bool:
        """As ``torch.Tensor.is_sparse``, which optimizers ask of every gradient."""
        with undressed():
            return _is_sparse(self)

    @property
    def grad(self) -> Optional[torch.Tensor]:
        """Gradient as a DTensor of the dual layout, or None."""
        with undressed():
            grad = _native_grad.__get__(self)
        if grad is None or isinstance(grad, TorchDTensorBase):
            return grad
        return dress(grad, type(self), self._spec.dual)

    @grad.setter
    def grad(self, value: Optional[torch.Tensor]) -> None:
        if value is not None and dispatch_enabled():
            value = self._local_gradient(value, self._spec)
        with undressed():
            _native_grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """An alias outside of autograd."""
        with undressed():
            alias = _native_data.__get__(self)
        return dress(alias, type(self), self._spec)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, TorchDTensorBase):
            raise TypeError("the data of a DTensor is set to a DTensor, but got a plain tensor of "
                            f"shape {tuple(value.shape)}; wrap it with distribute_tensor or "
                            "DTensor.from_local.")
        with undressed():
            _native_data.__set__(self, value)
        self._spec = value._spec
        self.__dict__.pop("_views", None)

    __hash__ = object.__hash__

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __format__(self, format_spec: str) -> str:
        # A number is formatted as one, as a plain tensor's is.
        return format(self.item(), format_spec) if not self.shape else \
            object.__format__(self, format_spec)

    def backward(self, gradient: Optional[torch.Tensor] = None,
                 retain_graph: Optional[bool] = None, create_graph: bool = False,
                 inputs: Any = None) -> None:
        """As ``torch.Tensor.backward``; a plain ``gradient`` means a replicated one."""
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused; PyTorch does not ask the class for this function.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"'set_' would give the tensor of shape {tuple(self._spec.shape)} other memory than "
            f"the part that its layout says, {self._spec.layout!r} (called with "
            f"{len(args) + len(kwargs)} arguments); assign a DTensor to x.data, or write with "
            "x.copy_(value).")

    def register_hook(self, hook: Callable) -> Any:
        """As ``torch.Tensor.register_hook``; the hook is given a DTensor of the dual layout."""
        cls, spec = type(self), self._spec
        note_watched(self)

        def local_hook(grad: torch.Tensor) -> Optional[torch.Tensor]:
            result = hook(dress(undress(grad), cls, spec.dual))
            return None if result is None else cls._local_gradient(result, spec)

        with undressed():
            return torch.Tensor.register_hook(self, local_hook)

    def register_post_accumulate_grad_hook(self, hook: Callable) -> Any:
        """As ``torch.Tensor.register_post_accumulate_grad_hook``."""
        with undressed():
            return torch.Tensor.register_post_accumulate_grad_hook(self, hook)

    def __deepcopy__(self, memo: dict) -> "TorchDTensorBase":
        if id(self) in memo:
            return memo[id(self)]
        with undressed():
            if not self.is_leaf:
                raise RuntimeError(
                    "only a leaf of the autograd graph can be deep-copied; detach() it first.")
            result = self.detach().clone(memory_format=torch.preserve_format)
            result = dress(result.requires_grad_(self.requires_grad), type(self), self._spec)
        memo[id(self)] = result
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        result.__dict__.update(copy.deepcopy(_user_attributes(self), memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple:
        with undressed():
            local = self.detach()
        return _rebuild, (local, type(self), self._spec, self.requires_grad,
                          _user_attributes(self))


def dress(tensor: torch.Tensor, cls: type, spec: Any) -> Any:
    """Turn ``tensor`` itself into a DTensor of class ``cls`` with ``spec``; no copy, no alias."""
    tensor.__class__ = cls
    tensor._spec = spec
    return tensor


def undress(tensor: torch.Tensor) -> torch.Tensor:
    """A plain alias of the local tensor, in the same autograd graph."""
    with undressed():
        return tensor.view_as(tensor)


def run_undressed(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` while every DTensor among the arguments is its local tensor."""
    with undressed():
        return func(*args, **kwargs)


def run_with_own_layouts(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func``, code of the library's own, in which ``layout`` says how a DTensor is spread.

    It may run within code of torch's that asks for memory layouts.
    """
    if not memory_layouts.get():
        return func(*args, **kwargs)
    token = memory_layouts.set(False)
    try:
        return func(*args, **kwargs)
    finally:
        memory_layouts.reset(token)


def run_and_dress(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], cls: type,
                  spec: Any) -> Any:
    """As :func:`run_undressed`; a single tensor that comes out is dressed."""
    with undressed():
        result = func(*args, **kwargs)
    if type(result) is _Tensor or isinstance(result, _Tensor):
        result.__class__ = cls
        result._spec = spec
    return result


def note_watched(tensor: Any) -> None:
    """Somebody waits for the gradient of ``tensor`` itself from now on."""
    watch = getattr(tensor, "_watch", None)
    if watch is not None:
        watch.wanted = True


def value_version(tensor: torch.Tensor) -> tuple[int, int]:
    """Differs whenever the values may: the version counter, and where the memory is.

    Runs undressed.
    """
    return tensor._version, tensor.data_ptr()


def keep_with_graph(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Keep ``tensor`` for as long as the graph that made ``result`` exists."""
    with undressed():
        node = result.grad_fn
    if node is not None:
        node.metadata.setdefault("hyper_parallel_kept", []).append(tensor)


def _user_attributes(tensor: torch.Tensor) -> dict:
    return {name: value for name, value in tensor.__dict__.items() if name not in _OWN_ATTRIBUTES}


def _rebuild(local: torch.Tensor, cls: type, spec: Any, requires_grad: bool, attributes: dict
             ) -> Any:
    with undressed():
        local = local.detach().requires_grad_(requires_grad)
    result = dress(local, cls, spec)
    result.__dict__.update(attributes)
    return result


# --- Functions that are not operators: they read metadata or belong to autograd. ----------------


def _native(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    with undressed():
        return func(*args, **kwargs)


def _detach(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    with undressed():
        result = func(*args, **kwargs)
    return dress(result, type(args[0]), args[0]._spec)


def _retain_grad(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    note_watched(args[0])
    _native(func, args, kwargs)


def _size(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    del func
    return _pick(args[0]._spec.shape, *args[1:], **kwargs)


def _stride(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    del func
    return _pick(_global_strides(args[0]), *args[1:], **kwargs)


def _global_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides the global tensor would have with its dims in memory as the local ones are."""
    with undressed():
        local, sizes = tensor.stride(), tensor.shape
    shape = tensor._spec.shape
    strides, step = [0] * len(shape), 1
    # Of two dims of one stride that of a single entry is the inner one: else it had the larger.
    for dim in sorted(range(len(shape)), key=lambda dim: (local[dim], sizes[dim] > 1, -dim)):
        if local[dim]:
            strides[dim] = step
            step *= max(shape[dim], 1)
    return tuple(strides)


def _is_contiguous(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether the global tensor would be, so that all ranks say the same.

    A part of one row is contiguous the other way round as well.
    """
    with undressed():
        local = func(*args, **kwargs)
    shape = args[0]._spec.shape
    if not local or len(args) > 1 or kwargs or 0 in shape:
        return local
    step = 1
    for length, stride in zip(reversed(shape), reversed(_global_strides(args[0]))):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def _pick(values: tuple, dim: Optional[int] = None) -> Any:
    return values if dim is None else values[dim]


def _numel(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> int:
    del func, kwargs
    return args[0]._spec.shape.numel()


def _ndim(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> int:
    del func, kwargs
    return len(args[0]._spec.shape)


def _nbytes(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> int:
    del func, kwargs
    return args[0]._spec.shape.numel() * args[0].element_size()


_HANDLED: dict[str, Handler] = {
    "size": _size, "stride": _stride, "numel": _numel, "nelement": _numel, "dim": _ndim,
    "ndimension": _ndim, "ndim": _ndim, "nbytes": _nbytes, "detach": _detach,
    "retain_grad": _retain_grad, "is_contiguous": _is_contiguous,
}
_LOCAL_METADATA = frozenset({
    "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned",
    "is_shared", "is_conj", "is_neg", "element_size", "get_device", "data_ptr", "storage_offset",
    "untyped_storage", "storage", "requires_grad_", "detach_", "result_type",
    "_is_view", "_has_compatible_shallow_copy_type", "share_memory_", "dir", "setstate",
    "_typed_storage", "is_same_size", "_clear_non_serializable_cached_data",
})
# Attributes that compute a tensor are operators.
_OPERATOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})

_handlers: dict[Callable, Optional[Handler]] = {}


def handle(func: Callable, handler: Handler) -> None:
    """Let ``handler`` take the calls of ``func`` on DTensors."""
    _handlers[func] = handler


def _find_handler(func: Callable) -> Optional[Handler]:
    """Who takes ``func``: a handler, or None where it is an operator."""
    name = operator_name(func)
    if name in _HANDLED:
        return _HANDLED[name]
    attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
    if name in _LOCAL_METADATA or (attribute and name not in _OPERATOR_ATTRIBUTES):
        return _native
    return None

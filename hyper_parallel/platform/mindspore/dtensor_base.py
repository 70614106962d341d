"""The tensor class below DTensor on MindSpore, and the seam: dress, undress, run undressed.

A DTensor *is* the local tensor with its class switched, so autograd, optimizers and C++ code see
the local shard.  MindSpore hands the operators that meet such a tensor to ``__fallback__``, unless
a ``NoFallbackGuard`` stands ("undressed"), under which the same object is an ordinary local
tensor, its ``shape`` included.  What MindSpore does not hand over, this class overrides.
"""
from __future__ import annotations

import operator
import threading
from typing import Any, Callable, Mapping, Optional, Sequence

import mindspore
import numpy as np
from mindspore import Parameter, Tensor
from mindspore._c_expression import NoFallbackGuard

from hyper_parallel.platform.mindspore import graph_mode, history, operators

_NOTHING: Mapping[str, Any] = {}


class _Depth(threading.local):
    """How many guards stand on a thread."""

    guards = 0


_depth = _Depth()


class Undressed:
    """A context in which every DTensor is its local tensor."""

    __slots__ = ("_guard",)

    def __init__(self) -> None:
        self._guard = NoFallbackGuard()

    def __enter__(self) -> None:
        self._guard.__enter__()
        _depth.guards += 1

    def __exit__(self, *error: Any) -> None:
        _depth.guards -= 1
        self._guard.__exit__(*error)


class MindSporeDTensorBase(Tensor):
    """A local tensor that wears a spec (``_spec``: layout and global shape).

    The methods that raise here are holes, which the layers above fill.
    """

    _spec: Any

    def __new__(cls, dtensor: "MindSporeDTensorBase") -> "MindSporeDTensorBase":
        """``Parameter(dtensor)`` makes a parameter of it this way: its memory is shared."""
        if not isinstance(dtensor, MindSporeDTensorBase):
            raise TypeError("a DTensor is made by distribute_tensor or DTensor.from_local, not by "
                            f"its class; got a {type(dtensor).__name__}")
        self = Tensor._make_subclass(cls, dtensor)
        self._spec = dtensor._spec
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        """There is nothing left to do: the memory is that of another tensor."""

    @staticmethod
    def _dispatch(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator; ``hyper_parallel/__init__.py`` puts the dispatcher here."""
        raise RuntimeError("no dispatcher is installed; import hyper_parallel before using a "
                           f"DTensor (called for {func} with {len(args) + len(kwargs)} arguments).")

    def __fallback__(self, func: Any, args: Sequence[Any],
                     kwargs: Optional[Mapping[str, Any]] = None) -> Any:
        """MindSpore's protocol: an operator met a DTensor."""
        if func.name == "Dropout":
            return self._dropout_pair(*args[2])
        operator_, args, kwargs = operators.normalised(func, args, kwargs or _NOTHING)
        if operator_.native:
            return run_undressed(operator_, args, kwargs)
        return type(self)._dispatch(operator_, args, kwargs)

    @classmethod
    def _dropout_pair(cls, tensor: Any, keep_prob: float, *_: Any) -> tuple[Any, Any]:
        """The old Dropout, which also gives the mask."""
        ones = cls._dispatch(operators.ONES_LIKE, (tensor,), _NOTHING)
        mask = cls._dispatch(operators.DROPOUT, (ones,), {"p": 1 - keep_prob})
        return tensor * mask, mask != 0

    __parameter__ = graph_mode.NOT_A_PARAMETER  # asked for by the graph compiler alone

    # ---- metadata ----

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape; the local one while undressed."""
        return self._shape if _depth.guards else self._spec.shape

    @property
    def layout(self) -> Any:
        """Mesh, placements and shard order."""
        return self._spec.layout

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, of the global tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.size * self.itemsize

    def numel(self) -> int:
        """Number of elements, of the global tensor."""
        return self.size

    nelement = numel

    def dim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    ndimension = dim

    def stride(self, dim: Optional[int] = None) -> Any:
        """Strides of a contiguous tensor of the global shape."""
        shape = self.shape
        strides = tuple(int(np.prod(shape[one + 1:], dtype=np.int64))
                        for one in range(len(shape)))
        return strides if dim is None else strides[dim]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    # ---- what MindSpore does not hand over ----

    def _run(self, func: Callable, *args: Any) -> Any:
        if _depth.guards:
            return func(self, *args)
        return type(self)._dispatch(func, (self, *args), _NOTHING)

    def __getitem__(self, index: Any) -> Any:
        return Tensor.__getitem__(self, index) if _depth.guards else \
            self._run(operators.GETITEM, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if _depth.guards:
            Tensor.__setitem__(self, index, value)
        else:
            self._run(operators.SETITEM, index, value)

    def __iter__(self) -> Any:
        if _depth.guards:
            return Tensor.__iter__(self)
        return iter(self._run(operators.UNBIND))

    def item(self) -> Any:
        """The one value, as a Python number."""
        return Tensor.item(self) if _depth.guards else self._run(operators.ITEM)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return Tensor.tolist(self) if _depth.guards else self._run(operators.TOLIST)

    def asnumpy(self) -> np.ndarray:
        """The whole tensor as a numpy array, a copy."""
        return Tensor.asnumpy(self) if _depth.guards else self._run(operators.ASNUMPY)

    numpy = asnumpy

    def __array__(self, dtype: Any = None) -> np.ndarray:
        array = self.asnumpy()
        return array if dtype is None else array.astype(dtype)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    __hash__ = Tensor.__hash__

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, format_spec: str) -> str:
        # A number is formatted as one, as a plain tensor's is.
        return format(self.item(), format_spec) if not self.shape else \
            object.__format__(self, format_spec)

    def detach(self) -> "MindSporeDTensorBase":
        """An alias without history."""
        return dress(history.detach(self), _class_of(self), self._spec)

    @property
    def data(self) -> "MindSporeDTensorBase":
        """An alias without history."""
        return Tensor.data.__get__(self) if _depth.guards else self.detach()

    def value(self) -> "MindSporeDTensorBase":
        """The tensor of a parameter."""
        return history.alias(self) if _depth.guards else \
            dress(history.alias(self), _class_of(self), self._spec)

    def copy(self) -> "MindSporeDTensorBase":
        """A copy in the same graph."""
        return self._run(operators.CLONE)

    clone = copy

    def contiguous(self) -> "MindSporeDTensorBase":
        """The tensor itself, or a contiguous copy of the local one."""
        return self._run(operators.CONTIGUOUS)

    def __deepcopy__(self, memo: dict) -> "MindSporeDTensorBase":
        if id(self) not in memo:
            memo[id(self)] = dress(history.copied(history.detach(self)), type(self), self._spec)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _rebuild, (np.array(Tensor.asnumpy(self)), type(self), self._spec)


def _rebuild(local: np.ndarray, cls: type, spec: Any) -> Any:
    return dress(Tensor(local), cls, spec)


def _class_of(tensor: Any) -> type:
    """DTensor itself, of a parameter as of any other."""
    cls = type(tensor)
    return cls if not issubclass(cls, Parameter) else next(
        base for base in cls.__mro__[1:]
        if issubclass(base, MindSporeDTensorBase) and not issubclass(base, Parameter))


def dress(tensor: Tensor, cls: type, spec: Any) -> Any:
    """Turn ``tensor`` itself into a DTensor of class ``cls`` with ``spec``; no copy, no alias."""
    if not isinstance(tensor, cls):  # a parameter that is a DTensor stays a parameter
        tensor.__class__ = cls
    tensor._spec = spec
    return tensor


def undress(tensor: Tensor) -> Tensor:
    """A plain alias of the local tensor, in the same autograd graph."""
    return history.alias(tensor)


def run_undressed(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` while every DTensor among the arguments is its local tensor."""
    with Undressed():
        return func(*args, **kwargs)


def run_and_dress(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], cls: type,
                  spec: Any) -> Any:
    """As :func:`run_undressed`; a single tensor that comes out is dressed."""
    with Undressed():
        result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        if not isinstance(result, cls):
            result.__class__ = cls
        result._spec = spec
    return result


def run_with_own_layouts(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func``: on MindSpore ``layout`` is the library's alone."""
    return func(*args, **kwargs)


def masked_fill(tensor: Any, mask: Any, value: Any) -> Any:
    """A number at the places of a mask; see ``Platform.masked_fill``."""
    found = None if _depth.guards else first_dtensor((tensor, mask))
    if found is None:
        return operators.MASKED_FILL(tensor, mask, value)
    return found._dispatch(operators.MASKED_FILL, (tensor, mask, value), _NOTHING)


def _bridge(_: Tensor, func: Any, args: Sequence[Any],
            kwargs: Optional[Mapping[str, Any]] = None) -> Any:
    """Where the first tensor is a plain one: find the DTensor among the others."""
    found = None
    if not _depth.guards:
        found = first_dtensor((*args, *(kwargs or _NOTHING).values()))
    if found is None:
        with NoFallbackGuard():
            return func(*args, **(kwargs or {}))
    return found.__fallback__(func, args, kwargs)


def first_dtensor(values: Any) -> Optional[MindSporeDTensorBase]:
    """The first DTensor among values, within lists too."""
    for value in values:
        found = first_dtensor(value) if isinstance(value, (tuple, list)) else value
        if isinstance(found, MindSporeDTensorBase):
            return found
    return None


mindspore.Tensor.__fallback__ = _bridge

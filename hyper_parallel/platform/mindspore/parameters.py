"""Parameters that are DTensors.

``Parameter(dtensor)`` makes an object whose class is both.  MindSpore would let the tensor's
methods win; here those win by which a parameter is copied, saved and set.  :func:`install` enters
the class where MindSpore looks for it.
"""
from __future__ import annotations

from typing import Any, Callable

import numpy as np
from mindspore import Parameter, Tensor

from hyper_parallel.platform.mindspore import graph_mode, history
from hyper_parallel.platform.mindspore.dtensor_base import MindSporeDTensorBase, Undressed

_native_combined_class = Parameter._get_combined_class
_classes: dict[type, type] = {}


class _DTensorParameter:
    """What a parameter does in another way than a tensor."""

    _spec: Any
    _tensor_class: type
    _local_gradient: Callable[[Any, Any], Any]
    name: str
    requires_grad: bool
    layerwise_parallel: bool
    copy_: Callable[[Any], Any]

    __parameter__ = graph_mode.PARAMETER  # asked for by the graph compiler alone

    def __copy__(self) -> Parameter:
        """A plain parameter of this rank's part, as MindSpore's ``clone`` wants it."""
        with Undressed():
            return Parameter(history.copied(history.detach(self)), name=self.name,
                             requires_grad=self.requires_grad,
                             layerwise_parallel=self.layerwise_parallel)

    def __deepcopy__(self, memo: dict) -> "_DTensorParameter":
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _rebuild, (np.array(Tensor.asnumpy(self)), type(self)._tensor_class, self._spec,
                          self.name, self.requires_grad)

    def clone(self, init: Any = "same") -> "_DTensorParameter":
        """As ``Parameter.clone``; the parameter lies as this one does."""
        with Undressed():
            result = Parameter.clone(self, init)
        result.__class__ = type(self)
        result._spec = self._spec
        return result

    def init_data(self, layout: Any = None, set_sliced: bool = False) -> "_DTensorParameter":
        """The parameter itself, which holds its values from the start."""
        del layout, set_sliced
        return self

    def copy(self) -> "_DTensorParameter":
        """A parameter with the same values."""
        return self.clone()

    # MindSpore's own give another tensor, which would take the parameter's place in the program.

    def __iadd__(self, other: Any) -> "_DTensorParameter":
        return self.copy_(self + other)

    def __isub__(self, other: Any) -> "_DTensorParameter":
        return self.copy_(self - other)

    def __imul__(self, other: Any) -> "_DTensorParameter":
        return self.copy_(self * other)

    def __itruediv__(self, other: Any) -> "_DTensorParameter":
        return self.copy_(self / other)

    def set_data(self, data: Any, slice_shape: bool = False) -> "_DTensorParameter":
        """As ``Parameter.set_data``: a DTensor, or a plain tensor that is the whole on every rank.

        The parameter keeps its layout.
        """
        if isinstance(data, Tensor):
            data = self._local_gradient(data, self._spec)
        with Undressed():
            Parameter.set_data(self, data, slice_shape)
        return self


def _combined_class(tensor_class: type) -> type:
    """The class of parameters that are tensors of a class."""
    if not issubclass(tensor_class, MindSporeDTensorBase):
        return _native_combined_class(tensor_class)
    found = _classes.get(tensor_class)
    if found is None:
        found = _classes[tensor_class] = type(
            f"Parameter{tensor_class.__name__}", (_DTensorParameter, tensor_class, Parameter),
            {"__init__": _init, "_tensor_class": tensor_class})
    return found


def _init(self: Any, default_input: Any, *args: Any, **kwargs: Any) -> None:
    with Undressed():
        Parameter.__init__(self, default_input, *args, **kwargs)


def _rebuild(local: np.ndarray, cls: type, spec: Any, name: str, requires_grad: bool) -> Parameter:
    tensor = Tensor(local)
    tensor.__class__ = cls
    tensor._spec = spec
    return Parameter(tensor, name=name, requires_grad=requires_grad)


def install() -> None:
    """Let ``Parameter(dtensor)`` make parameters of the class here."""
    Parameter._get_combined_class = staticmethod(_combined_class)

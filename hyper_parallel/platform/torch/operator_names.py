"""One name for every spelling of a PyTorch function, and functions opened up to their parts."""
from __future__ import annotations

from types import CellType, FunctionType, ModuleType
from typing import Any, Callable, Optional

import torch

from hyper_parallel.platform.platform import DeclaredArguments

_DUNDERS = {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not", "pos": "positive",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "radd": "add",
    "rmul": "mul", "setitem": "setitem_",
}
_IN_PLACE_DUNDERS = frozenset({"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and",
                               "or", "xor", "lshift", "rshift", "div"})
# float(x) gives a Python number and x.float() a tensor, so they must not share a name.
_CONVERSIONS = frozenset({"float", "int", "bool", "complex", "index"})

# Functions that share a name with another one whose arguments come in another order.
_RENAMED = {
    torch.Tensor.where: "where_method",
    **dict.fromkeys((torch.embedding, torch.ops.aten.embedding, torch.ops.aten.embedding.default),
                    "embedding_lookup"),
}

_NO_OVERRIDES = {name: lambda *_: False for name in (
    "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")}


class _Replaced:
    """A module with some attributes replaced."""

    def __init__(self, module: ModuleType, **attributes: Any) -> None:
        self._module = module
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# Some functions make the check through the module: torch.overrides.has_torch_function(...).
_TORCH = _Replaced(torch, overrides=_Replaced(torch.overrides, **_NO_OVERRIDES))
_namespaces: dict[int, dict] = {}


def operator_name(func: Callable) -> str:
    """The library's name of a PyTorch function.

    ``torch.add``, ``Tensor.add``, ``a + b`` and ``aten.add.Tensor`` are all ``add``; in-place
    forms end in an underscore; an autograd Function has the name of its class, an operator of
    another namespace keeps it (``mylib::scale``).
    """
    if func in _RENAMED:
        return _RENAMED[func]
    owner = getattr(func, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner.__name__
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name.removeprefix("aten::")
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        return owner.__name__
    return _without_dunders(name)


def declared_arguments(func: Callable) -> Optional[DeclaredArguments]:
    """See ``Platform.declared_arguments``; operators made with ``torch.library`` have a schema."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if not isinstance(func, torch._ops.OpOverload) or func.namespace == "aten":
        return None
    schema = func._schema
    return DeclaredArguments(
        tuple(argument.name for argument in schema.arguments),
        tuple(argument.name for argument in schema.arguments
              if argument.alias_info is not None and argument.alias_info.is_write),
        len(schema.returns))


def _without_dunders(name: str) -> str:
    if not (name.startswith("__") and name.endswith("__")):
        return name
    if name[2:-2] in _CONVERSIONS:
        return name
    name = name[2:-2]
    if name[0] == "i" and name[1:] in _IN_PLACE_DUNDERS:
        return _DUNDERS.get(name[1:], name[1:]) + "_"
    return _DUNDERS.get(name, name)


def decomposed(func: Callable) -> Optional[Callable]:
    """``func`` without its override check, or None unless PyTorch wrote it in Python.

    The body of the result runs on DTensors, and the functions it calls are dispatched one by
    one, each by its own rule.
    """
    if not isinstance(func, FunctionType) or not func.__module__.startswith("torch."):
        return None
    namespace = _namespaces.get(id(func.__globals__))
    if namespace is None:
        namespace = {**func.__globals__, **_NO_OVERRIDES}
        if namespace.get("torch") is torch:
            namespace["torch"] = _TORCH
        _namespaces[id(func.__globals__)] = namespace
        # A helper may make the check on behalf of the function that calls it.
        namespace.update({
            name: decomposed(value) for name, value in func.__globals__.items()
            if name.startswith("_") and isinstance(value, FunctionType)
            and value.__globals__ is func.__globals__})
    body = FunctionType(func.__code__, namespace, func.__name__, func.__defaults__,
                        _opened_closure(func))
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _opened_closure(func: FunctionType) -> Optional[tuple[CellType, ...]]:
    """The closure, with functions of PyTorch in it opened up as well.

    A function that picks one of two by an argument holds them there, and theirs is the override
    check that would call it again.
    """
    if func.__closure__ is None:
        return None
    inner = [cell.cell_contents for cell in func.__closure__]
    # A decorated function may hold itself, for its own check.
    return tuple(CellType(value if value is func else decomposed(value) or value)
                 for value in inner)

"""MindSpore's operators as the library knows them: one name and one order of arguments for each.

MindSpore hands over an operator as an object of its own for every call, with the arguments as the
caller wrote them, and calls one thing by several names (``SumExt``, ``ReduceSum``,
``DeprecatedSum``). :func:`normalised` finds the library's operator for it, which is one object for
all calls, and puts the arguments in the library's order under the library's names. So one table of
sharding rules serves every framework.

An operator that the tables here do not know keeps its MindSpore name, for which there is no rule.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

from mindspore import bool_
from mindspore._c_expression.typing import type_id_to_type

from hyper_parallel.platform.mindspore import functions, layer_functions
from hyper_parallel.platform.mindspore._operator_table import (
    ARGUMENTS, DRAWING, IGNORED, RENAMED)

_NOTHING: Mapping[str, Any] = {}
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "keep_dims": "keepdim"}


class Operator:
    """A function on local tensors that the dispatcher knows by name.

    Attributes:
        name: the library's name.
        native: it is no operator on DTensors, but looks at what the local tensor is.
    """

    __slots__ = ("name", "native", "_run", "__weakref__")

    def __init__(self, name: str, run: Callable, native: bool = False) -> None:
        self.name = name
        self.native = native
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Operator({self.name})"


class _Form(NamedTuple):
    """How MindSpore passes arguments.

    Attributes:
        operator: the operator.
        names: the library's names of MindSpore's positional arguments, in order; ``""`` for one
            that does not matter.
        positional: how many of them, from the first on, are passed by position.
        defaults: values that need not be passed on.
        gathers: the last one takes what is passed beyond it, too.
    """

    operator: Operator
    names: tuple[str, ...]
    positional: int
    defaults: Mapping[str, Any]
    gathers: bool


_operators: dict[str, Operator] = {}
_forms: dict[str, _Form] = {}
_foreign: dict[Any, Operator] = {}


def _operator(name: str, run: Callable) -> Operator:
    return _operators.setdefault(name, Operator(name, run))


def _own_function(name: str) -> Callable:
    """The function of ``functions.py`` for an operator; some have an underscore for Python."""
    for place in (functions, layer_functions):
        for spelling in (name, name + "_"):
            if hasattr(place, spelling):
                return getattr(place, spelling)
    raise AttributeError(f"no function for the operator {name!r}")


for _names, _name, _parameters in ARGUMENTS:
    _positional, _, _rest = _parameters.partition("|")
    _defaults: dict[str, Any] = {}
    _order = [text.removeprefix("*") for text in _positional.split()]
    _count = len(_order)
    for _text in _rest.split():
        _parameter, _, _default = _text.partition("=")
        _order.append("" if _parameter == "_" else _parameter)
        _defaults[_parameter] = {"": None, "False": False, "True": True}.get(_default, _default)
    for _msname in _names.split():
        _forms[_msname] = _Form(_operator(_name, _own_function(_name)), tuple(_order), _count,
                                _defaults, "*" in _positional)


def operator_of(name: str) -> Operator:
    """The operator of a name of the library's."""
    return _operators[name]


MATMUL = _operators["matmul"]
LINEAR = _operators["linear"]
EMBEDDING = _operators["embedding"]
INDEX_SELECT = _operators["index_select"]
MASKED_FILL = _operators["masked_fill"]
WHERE = _operator("where", functions.where)
DROPOUT = _operators["dropout"]
ONES_LIKE = _operators["ones_like"]
LAYER_NORM = _operator("native_layer_norm", layer_functions.native_layer_norm)
GETITEM = _operator("getitem", functions.getitem)
SETITEM = _operator("setitem_", functions.setitem_)
UNBIND = _operator("unbind", functions.unbind)
ITEM = _operator("item", functions.item)
TOLIST = _operator("tolist", functions.tolist)
ASNUMPY = _operator("numpy", functions.numpy)
CLONE = _operator("clone", functions.clone)
CONTIGUOUS = _operator("contiguous", functions.contiguous)
STACK = _operator("stack", functions.stack)


def normalised(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
               ) -> tuple[Operator, tuple, Mapping[str, Any]]:
    """The library's operator for a call, and its arguments.

    Args:
        func: what MindSpore hands over.
        args, kwargs: the arguments of ``func``.
    """
    name = func.name
    packed = None
    if len(args) == 3 and type(args[1]) is str and args[1] == name:
        packed, _, args = args  # an old primitive, its name, and what it is called with
        kwargs = {}
    reshaped = _SPECIAL.get(name)
    if reshaped is not None:
        special = reshaped(*args)
        if special is not None:
            return special
    form = _forms.get(name)
    if form is not None:
        return _bound(name, form, args, kwargs)
    if name in DRAWING:
        refuse_drawing(name)
    simple = RENAMED.get(name)
    # A method's object takes other arguments than a function's.
    key = (name, type(func)) if packed is None else (
        name, repr(sorted(packed.attrs.items(), key=repr)))
    found = _foreign.get(key)
    if found is None:
        run = func if packed is None else _unpacked(func, packed, name)
        found = _foreign[key] = Operator(simple or name, run, name in IGNORED)
    return found, tuple(args), kwargs


def refuse_drawing(name: str) -> None:
    """Raise for a function whose random numbers would differ where ranks hold the same."""
    raise NotImplementedError(
        f"{name} of a DTensor would draw other numbers on each rank, also where they hold the "
        f"same; use dropout, rand_like, randn_like, randint_like or bernoulli, which agree, or "
        f"spread what you drew: distribute_tensor({name}(...), mesh, placements)")


def _unpacked(func: Any, primitive: Any, name: str) -> Callable:
    def run(*args: Any) -> Any:
        return func(primitive, name, args)

    return run


def _bound(name: str, form: _Form, args: Sequence[Any], kwargs: Mapping[str, Any]
           ) -> tuple[Operator, tuple, Mapping[str, Any]]:
    given = dict(zip(form.names, args))
    if form.gathers and len(args) > len(form.names):
        given[form.names[-1]] = tuple(args[len(form.names) - 1:])
    for key, value in kwargs.items():
        given[_ALIASES.get(key, key)] = value
    given.pop("", None)
    adapt = _ADAPTED.get(name)
    if adapt is not None:
        given = adapt(given)
    positional = []
    for key in form.names[:form.positional]:
        if key not in given:
            break
        positional.append(given.pop(key))
    while positional and positional[-1] is None:
        positional.pop()
    defaults = form.defaults
    return form.operator, tuple(positional), {
        key: value for key, value in given.items()
        if not (value is None or key in defaults and _same(value, defaults[key]))}


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


def _without_empty_dim(given: dict[str, Any]) -> dict[str, Any]:
    """Old reductions say ``()`` for all dims."""
    if given.get("dim") == ():
        given["dim"] = None
    return given


def _with_one_dim(given: dict[str, Any]) -> dict[str, Any]:
    """A softmax may be told its dim as a tuple."""
    dim = given.get("dim")
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        given["dim"] = dim[0]
    return given


def _with_named_reduction(given: dict[str, Any]) -> dict[str, Any]:
    given["reduction"] = layer_functions.named_reduction(given.get("reduction"))
    return given


def _with_dtype(given: dict[str, Any]) -> dict[str, Any]:
    """Some are given the number of a dtype."""
    if isinstance(given.get("dtype"), int):
        given["dtype"] = type_id_to_type(given["dtype"])
    return given


_ADAPTED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd",
                     "ReduceAny", "ReduceAll"), _without_empty_dim),
    **dict.fromkeys(("MSELossExt", "L1LossExt"), _with_named_reduction),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _with_one_dim),
    **dict.fromkeys(("Cast", "ToDtype", "FullLike", "RandLikeExt", "RandnLike", "RandIntLike"),
                    _with_dtype),
}

_Normalised = Optional[tuple[Operator, tuple, Mapping[str, Any]]]


def _product(left: Any, right: Any, turn_left: bool = False, turn_right: bool = False
             ) -> _Normalised:
    """A product whose matrices may be turned over; of a weight as layers hold it, a linear one."""
    if not turn_left and turn_right and len(right.shape) == 2:
        return LINEAR, (left, right), _NOTHING
    left, right = (each.swapaxes(-1, -2) if turned else each
                   for each, turned in ((left, turn_left), (right, turn_right)))
    return MATMUL, (left, right), _NOTHING


def _lookup(table: Any, index: Any, dim: Any = 0, batch_dims: int = 0) -> _Normalised:
    if dim == 0 and not batch_dims and len(table.shape) == 2:
        return EMBEDDING, (index, table), _NOTHING
    if not batch_dims and len(index.shape) == 1:
        return INDEX_SELECT, (table, dim, index), _NOTHING
    return None


def _bias_add(values: Any, bias: Any, *_: Any) -> _Normalised:
    return (_operators["add"], (values, bias), _NOTHING) if len(values.shape) == 2 else None


def _layer_norm(values: Any, weight: Any, bias: Any, first: int, _: int, eps: float
                ) -> _Normalised:
    return LAYER_NORM, (values, tuple(values.shape[first:]), weight, bias), {"eps": eps}


def _where(*args: Any) -> _Normalised:
    """The method has the tensor first, the function the condition."""
    if args[0].dtype != bool_:
        args = (args[1], args[0], args[2])
    return WHERE, args, _NOTHING


# Those whose arguments decide what they are.
_SPECIAL: dict[str, Callable[..., _Normalised]] = {
    "MatMul": _product, "BatchMatMul": _product, "Gather": _lookup, "BiasAdd": _bias_add,
    "LayerNorm": _layer_norm, "Select": _where,
}


def operator_name(func: Any) -> str:
    """The library's name of an operator or of any function."""
    return func.name if isinstance(func, Operator) else getattr(func, "__name__", str(func))

"""One name for every spelling of a function, and functions opened up."""
import inspect
import operator

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.platform.torch.operator_names import decomposed, operator_name

aten = torch.ops.aten


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


@pytest.mark.parametrize("functions, name", [
    ((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, aten.add,
      aten.add.Tensor), "add"),
    ((torch.Tensor.add_, torch.Tensor.__iadd__, aten.add_.Tensor), "add_"),
    ((torch.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), "mul"),
    ((torch.div, torch.Tensor.__truediv__), "div"),
    ((torch.Tensor.div_, torch.Tensor.__itruediv__), "div_"),
    ((torch.floor_divide, torch.Tensor.__floordiv__), "floor_divide"),
    ((torch.remainder, torch.Tensor.__mod__), "remainder"),
    ((torch.bitwise_and, torch.Tensor.__and__), "bitwise_and"),
    ((torch.Tensor.__iand__,), "bitwise_and_"),
    ((torch.bitwise_not, torch.Tensor.__invert__), "bitwise_not"),
    ((torch.neg, torch.Tensor.__neg__), "neg"),
    ((torch.matmul, torch.Tensor.__matmul__), "matmul"),
    ((torch.Tensor.__getitem__,), "getitem"),
    ((torch.Tensor.__setitem__,), "setitem_"),
    ((torch.sum, torch.Tensor.sum, aten.sum.dim_IntList), "sum"),
    ((F.linear, aten.linear.default), "linear"),
    ((F.softmax,), "softmax"),
    ((torch.Tensor.T.__get__,), "T"),
    ((torch.Tensor.float,), "float"),
    ((torch.Tensor.__float__,), "__float__"),
    ((torch.Tensor.__bool__,), "__bool__"),
    ((torch.Tensor.bool,), "bool"),
    ((torch.Tensor.__int__,), "__int__"),
    ((torch.Tensor.__complex__,), "__complex__"),
    ((torch.Tensor.__index__,), "__index__"),
    ((torch.complex,), "complex"),
    ((torch.where, aten.where.self), "where"),
    ((torch.Tensor.where,), "where_method"),
    ((F.embedding,), "embedding"),
    ((torch.embedding, aten.embedding, aten.embedding.default), "embedding_lookup"),
    ((_Twice.apply,), "_Twice"),
])
def test_names(functions, name):
    assert [operator_name(function) for function in functions] == [name] * len(functions)


def test_an_operator_of_another_namespace_keeps_it():
    with torch.library._scoped_library("hyper_parallel_name_tests", "DEF") as library:
        library.define("scale(Tensor x) -> Tensor")
        packet = torch.ops.hyper_parallel_name_tests.scale
        assert operator_name(packet) == operator_name(packet.default) == \
            "hyper_parallel_name_tests::scale"


def _defaults(function):
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


def test_functions_written_in_python_are_opened():
    assert decomposed(torch.add) is None and decomposed(torch.Tensor.exp) is None
    assert decomposed(len) is None and decomposed(lambda x: x) is None
    assert decomposed(test_names) is None
    for function in (F.normalize, F.cross_entropy, torch.unique, torch.Tensor.__rpow__, F.dropout):
        body = decomposed(function)
        assert body is not None and body is not function
        assert _defaults(body) == _defaults(function)


def test_opened_functions_compute_the_same():
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(decomposed(F.normalize)(x, dim=0), F.normalize(x, dim=0))
    assert torch.equal(decomposed(torch.Tensor.__rpow__)(x, 2), 2 ** x)
    values, counts = decomposed(torch.unique)(torch.tensor([1, 2, 1]), return_counts=True)
    assert values.tolist() == [1, 2] and counts.tolist() == [2, 1]


def test_opened_functions_dispatch_their_parts():
    x = distribute_tensor(torch.arange(6.0).reshape(2, 3), init_device_mesh((1,), ("x",)),
                          [Shard(0)])
    assert F.normalize(x).placements == (Shard(0),)
    assert torch.unique(x).placements == (Replicate(),)
    assert operator.pow(2, x).placements == (Shard(0),)

"""Operators that write to their first operand."""

import operator
from typing import Any

import torch

from tests.torch.shard.tables.entries import (
    X, Entry, bools, const, entry, ints, pos, write)


def _set(target: Any, index: Any, value: Any) -> Any:
    target[index] = value
    return target


def _write_view(x: torch.Tensor) -> torch.Tensor:
    x.t().mul_(2.0)
    x.view(5, 7).add_(1.0)
    return x


IN_PLACE: list[Entry] = [
    entry("x += y", operator.iadd, X, X, in_place=True),
    entry("x -= y", operator.isub, X, X, in_place=True),
    entry("x *= y", operator.imul, X, X, in_place=True),
    entry("x /= y", operator.itruediv, X, pos(*X), in_place=True),
    entry("x %= y", operator.imod, const(*X), const(*X), in_place=True),
    entry("x //= y", operator.ifloordiv, const(*X), const(*X), in_place=True),
    entry("x **= y", operator.ipow, pos(*X), X, in_place=True),
    entry("x **= 2", lambda a: operator.ipow(a, 2), X, in_place=True),
    entry("x += 1", lambda a: operator.iadd(a, 1.0), X, in_place=True),
    entry("x *= 2", lambda a: operator.imul(a, 2.0), X, in_place=True),
    entry("x -= row", operator.isub, X, (7,), in_place=True),
    entry("x &= y", operator.iand, bools(*X), bools(*X), in_place=True),
    entry("add_", write("add_"), X, X, in_place=True),
    entry("add_ one", write("add_"), (1,), (1,), in_place=True),
    entry("mul_ row of one", write("mul_"), (1, 5), (1, 1), in_place=True),
    entry("add_ alpha", lambda a, b: a.add_(b, alpha=2), X, X, in_place=True),
    entry("mul_", write("mul_"), X, (5, 1), in_place=True),
    entry("div_", write("div_"), X, pos(*X), in_place=True),
    entry("neg_", write("neg_"), X, in_place=True),
    entry("zero_", write("zero_"), X, in_place=True),
    entry("fill_", write("fill_", 3.0), X, in_place=True),
    entry("fill_ tensor", write("fill_"), X, (), in_place=True),
    entry("copy_", write("copy_"), X, X, in_place=True),
    entry("copy_ row", write("copy_"), X, (7,), in_place=True),
    entry("clamp_", write("clamp_", -0.5, 0.5), X, in_place=True),
    entry("relu_", torch.relu_, X, in_place=True),
    entry("exp_", write("exp_"), X, in_place=True),
    entry("sqrt_", write("sqrt_"), pos(*X), in_place=True),
    entry("sigmoid_", write("sigmoid_"), X, in_place=True),
    entry("masked_fill_", lambda a, m: a.masked_fill_(m, 2.0), X, bools(*X), in_place=True),
    entry("addcmul_", write("addcmul_"), X, X, X, in_place=True),
    entry("lerp_", lambda a, b: a.lerp_(b, 0.3), X, X, in_place=True),
    entry("pow_", write("pow_", 3), X, in_place=True),
    entry("square then add_", lambda a, b: (a * a).add_(b), X, X),
    entry("use, write, use", lambda a, b: (a.exp() * b).add_(a) * a, X, X),
    entry("setitem row", lambda a: _set(a, 1, 2.0), X, in_place=True),
    entry("setitem slice", lambda a, b: _set(a, (slice(None), slice(1, 3)), b), X, (5, 2),
          in_place=True),
    entry("setitem mask", lambda a, m: _set(a, m, 0.5), X, bools(*X), in_place=True),
    entry("setitem index", _set, X, ints(1, 1), (7,), in_place=True),
    entry("setitem all", lambda a, b: _set(a, slice(None), b), X, X, in_place=True),
    entry("write to a view", _write_view, X, in_place=True),
    entry("index_add_", lambda a, i, b: a.index_add_(0, i, b), X, ints(5, 3), (3, 7),
          in_place=True),
    entry("index_fill_", lambda a, i: a.index_fill_(1, i, 2.0), X, ints(7, 3), in_place=True),
    entry("scatter_add_", lambda a, i, b: a.scatter_add_(1, i, b), X, ints(7, 5, 3), (5, 3),
          in_place=True),
    entry("t_", torch.Tensor.t_, X, in_place=True),
    entry("unsqueeze_", lambda a: a.unsqueeze_(1), X, in_place=True),
    entry("squeeze_ small", torch.Tensor.squeeze_, (4, 2), in_place=True),
    entry("transpose_", lambda a: a.transpose_(0, 1), X, in_place=True),
    entry("requires_grad_ of a product", lambda a: (a * 2).requires_grad_(), X),
]

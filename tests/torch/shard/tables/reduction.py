"""Operators that reduce dims."""

import torch

from tests.torch.shard.tables.entries import (
    X, Entry, bools, const, entry, ints, pos)


def _reductions(name: str) -> list[Entry]:
    function = getattr(torch, name)
    return [
        entry(f"{name}", function, pos(*X)),
        entry(f"{name} dim", lambda a: function(a, 0), pos(*X)),
        entry(f"{name} -1 keepdim", lambda a: function(a, -1, keepdim=True), pos(*X)),
        entry(f"{name} kw", lambda a: function(a, dim=1, keepdim=False), pos(5, 3, 2)),
        entry(f"{name} axis", lambda a: function(a, axis=1), pos(*X)),
        entry(f"{name} 1-d", function, pos(5)),
    ]


REDUCTION: list[Entry] = [
    *(one for name in ("sum", "mean", "amax", "amin", "prod", "var", "std", "argmax", "argmin",
                       "count_nonzero", "any", "all", "nansum", "nanmean")
      for one in _reductions(name)
      if not (name in ("var", "std", "count_nonzero") and "axis" in one.name)
      and not (name == "count_nonzero" and ("keepdim" in one.name or "kw" in one.name))),
    *(entry(f"{name} dims", lambda a, f=getattr(torch, name): f(a, (0, 2)), pos(5, 3, 2))
      for name in ("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "any", "all")),
    *(entry(f"{name} dims keepdim", lambda a, f=getattr(torch, name): f(a, (0, -1), keepdim=True),
            pos(5, 3, 2)) for name in ("sum", "mean", "amax", "var", "logsumexp")),
    entry("sum []", lambda a: a.sum(dim=[]), X),
    entry("sum method dims", lambda a: a.sum([0, 1]), X),
    entry("sum *dims", lambda a: a.sum((0,)).sum(), X),
    entry("sum dtype", lambda a: a.sum(dtype=torch.float32), X),
    entry("sum dim dtype", lambda a: a.sum(0, dtype=torch.float32), X),
    entry("sum bool", lambda a: a.sum(), bools(*X)),
    entry("sum of ints", lambda a: a.sum(1), ints(9, *X)),
    entry("sum 0-d", lambda a: a.sum(), ()),
    entry("mean 0-d", lambda a: a.mean(), ()),
    entry("mean dtype", lambda a: a.mean(dtype=torch.float32), X),
    entry("mean of ints", lambda a: a.mean(dtype=torch.float64), ints(9, *X)),
    entry("sum twice", lambda a: a.sum(0).sum(0), X),
    entry("sum squared", lambda a: a.sum() ** 2, X),
    entry("mean squared", lambda a: a.mean() ** 2, X),
    entry("sum*a", lambda a: a.sum() * a, X),
    entry("a-mean", lambda a: a - a.mean(0, keepdim=True), X),
    entry("a/sum", lambda a: a / a.sum(-1, keepdim=True), pos(*X)),
    entry("sum+sum", lambda a, b: a.sum(0) + b.sum(0), X, X),
    entry("sum*sum", lambda a, b: a.sum() * b.sum(), X, X),
    entry("max", torch.max, X),
    entry("min", torch.Tensor.min, X),
    entry("max dim", lambda a: a.max(0), X),
    entry("max dim keepdim", lambda a: torch.max(a, dim=-1, keepdim=True), X),
    entry("min dim", lambda a: a.min(dim=1), X),
    entry("min values", lambda a: a.min(dim=1).values, X),
    entry("max named", lambda a: torch.max(a, 1)[0], X),
    entry("argmax keepdim", lambda a: a.argmax(1, keepdim=True), X),
    entry("argmax none keepdim", lambda a: a.argmax(keepdim=True), X),
    entry("amax tie", lambda a: (a > 0).double().mul(a.detach() * 0 + 1).amax() + a.sum(), X),
    entry("amax of ties", lambda a: (a * 0).amax(), X),
    entry("max of ties", lambda a: (a * 0).max(), X),
    entry("aminmax", torch.aminmax, X),
    entry("aminmax dim", lambda a: torch.aminmax(a, dim=0), X),
    entry("logsumexp", lambda a: a.logsumexp(1), X),
    entry("logsumexp keepdim", lambda a: torch.logsumexp(a, 0, True), X),
    entry("var unbiased", lambda a: a.var(unbiased=False), X),
    entry("var positional", lambda a: a.var(0, False), X),
    entry("var positional keepdim", lambda a: torch.var(a, 0, True, True), X),
    entry("var correction", lambda a: a.var(1, correction=0), X),
    entry("var bool", lambda a: torch.var(a, False), X),
    entry("std correction", lambda a: a.std(dim=(0, 1), correction=2, keepdim=True), X),
    entry("var_mean", lambda a: torch.var_mean(a, 1), X),
    entry("var_mean all", torch.var_mean, X),
    entry("std_mean", lambda a: torch.std_mean(a, 0, keepdim=True), X),
    entry("median", torch.median, X),
    entry("median dim", lambda a: a.median(1), X),
    entry("nanmedian", lambda a: a.nanmedian(0), X),
    entry("mode", lambda a: a.mode(1), const(*X)),
    entry("kthvalue", lambda a: a.kthvalue(2, 1), X),
    entry("kthvalue kw", lambda a: torch.kthvalue(a, 2, dim=0, keepdim=True), X),
    entry("quantile", lambda a: a.quantile(0.3, dim=1), X),
    entry("norm", torch.Tensor.norm, X),
    entry("norm 1", lambda a: a.norm(1), X),
    entry("norm dim", lambda a: a.norm(2, 1), X),
    entry("norm keepdim", lambda a: a.norm(p=2, dim=-1, keepdim=True), X),
    entry("torch.norm", torch.norm, X),
    entry("norm fro", lambda a: torch.norm(a, "fro"), X),
    entry("linalg.norm", torch.linalg.norm, X),
    entry("linalg.vector_norm", torch.linalg.vector_norm, X),
    *(entry(f"vector_norm {order}", lambda a, o=order: torch.linalg.vector_norm(a, o), X)
      for order in (0, 0.5, 1, 2, 3, float("inf"), -float("inf"), -1)),
    entry("vector_norm dim", lambda a: torch.linalg.vector_norm(a, 2, 0), X),
    entry("vector_norm inf dim", lambda a: torch.linalg.vector_norm(a, float("inf"), 1), X),
    entry("vector_norm keepdim", lambda a: torch.linalg.vector_norm(a, dim=(0, 1), keepdim=True),
          X),
    entry("vector_norm dtype", lambda a: torch.linalg.vector_norm(a.float(), dtype=torch.float64),
          ints(9, *X)),
    entry("linalg.matrix_norm", torch.linalg.matrix_norm, X),
    entry("dist", torch.dist, X, X),
    entry("prod empty dim", lambda a: a.prod(0), (0, 3)),
    entry("cumsum", lambda a: a.cumsum(0), X),
    entry("cumsum kw", lambda a: torch.cumsum(a, dim=-1), X),
    entry("cumprod", lambda a: a.cumprod(1), X),
    entry("cummax", lambda a: a.cummax(0), X),
    entry("logcumsumexp", lambda a: a.logcumsumexp(1), X),
    entry("diff", lambda a: torch.diff(a, dim=0), X),
    entry("trapezoid", lambda a: torch.trapezoid(a, dim=0), X),
]

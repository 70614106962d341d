"""Losses."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.torch.shard.tables.entries import (
    X, Entry, Tensor, const, entry, ints, pos, unit)


def _loss(name: str, *makers: Any, **options: Any) -> list[Entry]:
    function = getattr(F, name)
    return [entry(f"{name} {reduction}", lambda *a, r=reduction: function(
        *a, reduction=r, **options), *makers) for reduction in ("mean", "sum", "none")]


def _weighted(name: str) -> list[Entry]:
    function = getattr(F, name)
    return [entry(f"{name} weight {reduction}", lambda a, b, w, r=reduction: function(
        a, b, reduction=r, weight=w), X, X, pos(*X)) for reduction in ("mean", "sum")]


C = (5, 4)

LOSS: list[Entry] = [
    *_loss("mse_loss", X, X),
    *_loss("l1_loss", X, X),
    *_loss("smooth_l1_loss", X, X),
    *_loss("huber_loss", X, X),
    *(one for name in ("mse_loss", "l1_loss", "huber_loss") for one in _weighted(name)),
    *_loss("soft_margin_loss", X, const(*X)),
    *_loss("binary_cross_entropy", unit(*X), unit(*X)),
    *_loss("binary_cross_entropy_with_logits", X, unit(*X)),
    *_loss("kl_div", X, unit(*X))[1:],
    *_loss("poisson_nll_loss", X, pos(*X)),
    entry("kl_div batchmean", lambda a, b: F.kl_div(a, b, reduction="batchmean"), X, unit(*X)),
    entry("bce weight", lambda a, b, w: F.binary_cross_entropy_with_logits(a, b, weight=w), X,
          unit(*X), Tensor(X, "positive", grad=False)),
    entry("bce pos_weight", lambda a, b, w: F.binary_cross_entropy_with_logits(a, b, pos_weight=w),
          X, unit(*X), Tensor((7,), "positive", grad=False)),
    entry("mse positional", F.mse_loss, (5,), (5,)),
    entry("mse default", F.mse_loss, (5, 1), (5, 1)),
    entry("huber delta", lambda a, b: F.huber_loss(a, b, delta=0.5), X, X),
    entry("smooth beta", lambda a, b: F.smooth_l1_loss(a, b, beta=0.3), X, X),
    *_loss("cross_entropy", C, ints(4, 5)),
    *_loss("cross_entropy", C, ints(4, 5), ignore_index=1),
    *_loss("cross_entropy", C, ints(4, 5), label_smoothing=0.1),
    *_loss("cross_entropy", C, ints(4, 5), ignore_index=2, label_smoothing=0.2),
    *_loss("cross_entropy", C, ints(4, 5), Tensor((4,), "positive", grad=False)),
    *_loss("cross_entropy", C, unit(5, 4)),
    entry("cross_entropy weight kw", lambda a, t, w: F.cross_entropy(
        a, t, weight=w, ignore_index=0, label_smoothing=0.1), C, ints(4, 5),
        Tensor((4,), "positive", grad=False)),
    entry("cross_entropy spatial", F.cross_entropy, (3, 4, 5), ints(4, 3, 5)),
    entry("cross_entropy spatial sum", lambda a, t: F.cross_entropy(a, t, reduction="sum"),
          (3, 4, 5), ints(4, 3, 5)),
    entry("cross_entropy 1-d", F.cross_entropy, (4,), ints(4)),
    entry("cross_entropy flat", lambda a, t: F.cross_entropy(a.view(-1, 4), t.view(-1)),
          (3, 5, 4), ints(4, 3, 5)),
    entry("cross_entropy probabilities weight", lambda a, t, w: F.cross_entropy(a, t, weight=w), C,
          unit(5, 4), Tensor((4,), "positive", grad=False)),
    *_loss("nll_loss", C, ints(4, 5)),
    entry("nll_loss weight", F.nll_loss, C, ints(4, 5),
          Tensor((4,), "positive", grad=False)),
    entry("nll_loss ignore", lambda a, t: F.nll_loss(a, t, ignore_index=3), C, ints(4, 5)),
    entry("log_softmax+nll", lambda a, t: F.nll_loss(F.log_softmax(a, 1), t), C, ints(4, 5)),
    entry("hinge", F.hinge_embedding_loss, X, const(*X)),
    entry("margin", lambda a, b: F.margin_ranking_loss(a, b, torch.ones(5)), (5,), (5,)),
    entry("triplet", F.triplet_margin_loss, X, X, X),
    entry("cosine loss", lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(5)), X, X),
    entry("multilabel", F.multilabel_soft_margin_loss, X, unit(*X)),
    entry("gaussian", F.gaussian_nll_loss, X, X, pos(*X)),
]

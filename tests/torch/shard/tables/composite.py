"""Functions that PyTorch wrote in Python, operators without a rule, and whole modules."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.torch.shard.tables.entries import X, Entry, Tensor, bools, const, entry, ints, pos

IMAGE = (2, 4, 6, 6)


def _module(make, *args, **kwargs):
    """A function of an input and of the module's parameters."""
    torch.manual_seed(3)
    module = make().double().train(False)

    def run(x, *parameters):
        named = dict(zip((name for name, _ in module.named_parameters()), parameters))
        # A copy, since an RNN goes on holding the weights that its last functional call swapped in.
        return torch.func.functional_call(copy.deepcopy(module), named, (x, *args), kwargs,
                                          strict=False)

    return run


def _shapes(make):
    return [tuple(parameter.shape) for parameter in make().parameters()]


def _attention():
    return nn.MultiheadAttention(8, 2, batch_first=True)


def _encoder():
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)


def _self_attention(**options):
    torch.manual_seed(3)
    module = _attention().double()

    def attend(x, *parameters):
        named = dict(zip((name for name, _ in module.named_parameters()), parameters))
        return torch.func.functional_call(module, named, (x, x, x), options)

    return attend


def _into(function):
    """The ``out=`` form of a function."""
    def run(target, *tensors):
        result = function(*tensors, out=target)
        assert result is target
        return target
    return run


COMPOSITE: list[Entry] = [
    entry("F.interpolate", lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    entry("F.interpolate bilinear", lambda x: F.interpolate(x, (5, 7), mode="bilinear"), IMAGE),
    entry("F.max_pool2d", lambda x: F.max_pool2d(x, 2), IMAGE),
    entry("F.max_pool2d indices", lambda x: F.max_pool2d(x, 2, return_indices=True), IMAGE),
    entry("F.avg_pool2d", lambda x: F.avg_pool2d(x, 3, padding=1), IMAGE),
    entry("F.adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), IMAGE),
    entry("F.adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 3), (2, 4, 6)),
    entry("F.unfold", lambda x: F.unfold(x, 2), IMAGE),
    entry("F.pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), IMAGE),
    entry("F.local_response_norm", lambda x: F.local_response_norm(x, 2), IMAGE),
    entry("F.lp_pool1d", lambda x: F.lp_pool1d(x, 2.0, 2), (2, 4, 6)),
    entry("F.conv_transpose2d", F.conv_transpose2d, IMAGE, (4, 3, 2, 2)),
    entry("F.softplus beta", lambda x: F.softplus(x, beta=2), X),
    entry("F.gumbel none", lambda x: F.softmax(x / 0.5, dim=-1), X),
    entry("F.celu_", lambda x: F.celu(x, inplace=True), X, in_place=True),
    entry("F.hardtanh inplace", lambda x: F.hardtanh(x, inplace=True), X, in_place=True),
    entry("F.dropout eval inplace", lambda x: F.dropout(x, 0.5, False, True), X, in_place=True),
    entry("F.pdist", F.pdist, X),
    entry("F.ctc-like logcumsumexp", lambda x: torch.logcumsumexp(x, 0), X),
    entry("meshgrid", lambda a, b: torch.meshgrid(a, b, indexing="ij"), (3,), (4,)),
    entry("block_diag", torch.block_diag, (2, 3), (3, 2)),
    entry("cartesian_prod", torch.cartesian_prod, (3,), (4,)),
    entry("tensordot 2", lambda a, b: torch.tensordot(a, b, 2), (3, 4), (3, 4)),
    entry("vander", lambda a: torch.vander(a, 3), const(4)),
    entry("cross", torch.linalg.cross, (5, 3), (5, 3)),
    entry("cumulative_trapezoid", torch.cumulative_trapezoid, X),
    entry("fft", torch.fft.fft, X),
    entry("rfft and back", lambda x: torch.fft.irfft(torch.fft.rfft(x), 7), X),
    entry("linalg.svdvals", torch.linalg.svdvals, (4, 3)),
    entry("linalg.qr", torch.linalg.qr, (4, 3)),
    entry("linalg.cholesky", lambda a: torch.linalg.cholesky(a @ a.t() + torch.eye(3)), (3, 3)),
    entry("matrix_exp", torch.matrix_exp, (3, 3)),
    entry("special.entr", torch.special.entr, pos(*X)),
    entry("special.bessel_j0", torch.special.bessel_j0, const(*X)),
    entry("logdet", lambda a: torch.logdet(a @ a.t() + torch.eye(3)), (3, 3)),
    entry("histc", lambda a: torch.histc(a, 4, -2, 2), const(*X)),
    entry("isin", torch.isin, ints(9, *X), ints(9, 3)),
    entry("bucketize", torch.bucketize, const(*X), pos(1)),
    entry("tril_indices", lambda a: a[tuple(torch.tril_indices(5, 5))], X),
    entry("nanquantile", lambda a: a.nanquantile(0.5, 0), X),
    entry("renorm", lambda a: torch.renorm(a, 2, 0, 1.0), X),
    entry("swapaxes chain", lambda a: a.swapaxes(0, 1).movedim(0, 1).mT.unflatten(0, (-1, 1)), X),
    entry("expand and reduce", lambda a: a.unsqueeze(1).expand(-1, 3, -1).sum((0, 2)), X),
    entry("masked softmax", lambda a, m: a.masked_fill(~m, -1e9).softmax(-1) * m, X, bools(*X)),
    entry("rotary", lambda x, f: torch.cat((-x[..., 2:], x[..., :2]), -1) * f.sin()
          + x * f.cos(), (2, 3, 4), (3, 4)),
    entry("complex rotary", lambda x, f: torch.view_as_real(torch.view_as_complex(
        x.reshape(2, 3, 2, 2)) * torch.polar(torch.ones_like(f), f)).flatten(2), (2, 3, 4), (3, 2)),
    entry("mean absolute deviation", lambda x: (x - x.mean(0, True)).abs().mean(), X),
    entry("gram", lambda x: torch.einsum("ni,nj->ij", x, x) / len(x), X),
    entry("topk gate", lambda x: torch.zeros_like(x).scatter(-1, x.topk(2)[1], 1.0) * x, X),
    entry("add out", _into(torch.add), const(*X), const(*X), const(*X), in_place=True),
    entry("matmul out", _into(torch.matmul), const(5, 5), const(5, 7), const(7, 5), in_place=True),
    entry("sum out", _into(lambda x, out: torch.sum(x, 1, out=out)), const(5),
          const(*X), in_place=True),
    entry("max out", lambda v, a: _into(torch.maximum)(v, v, a), const(*X), const(*X),
          in_place=True),
    entry("MultiheadAttention", _self_attention(), (2, 3, 8), *_shapes(_attention)),
    entry("MultiheadAttention alone", _self_attention(need_weights=False), (2, 3, 8),
          *_shapes(_attention)),
    entry("TransformerEncoderLayer", _module(_encoder), (2, 3, 8), *_shapes(_encoder)),
    entry("Conv2d and BatchNorm", _module(lambda: nn.Sequential(
        nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())), IMAGE, (3, 4, 3, 3),
          (3,), (3,), (3,)),
    entry("LSTM", _module(lambda: nn.LSTM(4, 3, batch_first=True)), (2, 5, 4), (12, 4), (12, 3),
          (12,), (12,)),
    entry("GRUCell", _module(lambda: nn.GRUCell(4, 3)), (5, 4), (9, 4), (9, 3), (9,), (9,)),
    entry("Bilinear", _module(lambda: nn.Bilinear(3, 3, 2), torch.ones(5, 3).double()), (5, 3),
          (2, 3, 3), (2,)),
    entry("EmbeddingBag", _module(lambda: nn.EmbeddingBag(9, 3)), ints(9, 4, 5), Tensor((9, 3))),
    entry("Transformer mask", lambda x: x + nn.Transformer.generate_square_subsequent_mask(
        5, dtype=torch.float64), (5, 5)),
]

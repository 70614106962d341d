"""What operators send: nothing where the sharded dim is free, and no more than the result's size
where it is reduced."""

import torch
import torch.nn.functional as F

from hyper_parallel import CommDebugMode, Replicate, Shard, distribute_tensor, init_device_mesh
from tests.torch.against_dense import Failures

NPROC = 2

X = (4, 6)
IMAGE = (4, 4, 6, 6)

# Name, function, shape of the first operand, the dim that is sharded, and the number of
# all-reduces that the forward pass may take. Nothing else may be sent.
CASES = [
    *((f"{name} of the sharded dim", lambda a, f=getattr(torch, name): f(a, 0), X, 0, count)
      for name, count in (("sum", 0), ("mean", 0), ("prod", 1), ("amax", 1), ("amin", 1),
                          ("any", 0), ("all", 0), ("count_nonzero", 0), ("logsumexp", 2),
                          ("var", 2), ("std", 2), ("nanmean", 1))),
    *((f"{name} of a free dim", lambda a, f=getattr(torch, name): f(a, 1), X, 0, 0)
      for name in ("sum", "mean", "prod", "amax", "any", "count_nonzero", "logsumexp", "var",
                   "argmax", "argmin", "median", "mode", "softmax", "log_softmax", "cumsum",
                   "cumprod", "sort", "argsort")),
    ("max", torch.max, X, 0, 1),
    ("aminmax", torch.aminmax, X, 1, 2),
    ("norm", torch.norm, X, 0, 1),
    ("norm 1", lambda a: a.norm(1), X, 0, 0),
    ("norm inf", lambda a: a.norm(float("inf")), X, 0, 1),
    ("max of a free dim", lambda a: a.max(1), X, 0, 0),
    ("norm of a free dim", lambda a: a.norm(2, 1), X, 0, 0),
    ("topk", lambda a: a.topk(2, 1), X, 0, 0),
    ("flip", lambda a: a.flip(1), X, 0, 0),
    ("roll", lambda a: a.roll(1, 1), X, 0, 0),
    ("repeat", lambda a: a.repeat(2, 1, 3), X, 0, 0),
    ("tile", lambda a: a.tile((1, 2)), X, 0, 0),
    ("F.pad", lambda a: F.pad(a, (1, 2)), X, 0, 0),
    ("F.pad reflect", lambda a: F.pad(a, (1, 2), mode="reflect"), (2, 4, 6), 1, 0),
    ("cat", lambda a: torch.cat([a, a], 1), X, 0, 0),
    ("stack", lambda a: torch.stack([a, a]), X, 0, 0),
    ("hstack", lambda a: torch.hstack([a, a]), X, 0, 0),
    ("gather", lambda a: a.gather(1, torch.zeros(4, 2, dtype=torch.int64)), X, 0, 0),
    ("scatter", lambda a: a.scatter(1, torch.zeros(4, 1, dtype=torch.int64), 1.0), X, 0, 0),
    ("index_add", lambda a: a.index_add(1, torch.tensor([1, 2]), torch.ones(4, 2)), X, 0, 0),
    ("index_select", lambda a: a.index_select(1, torch.tensor([1, 5])), X, 0, 0),
    ("x[:, index]", lambda a: a[:, torch.tensor([3, 1])], X, 0, 0),
    ("tensor_split", lambda a: a.tensor_split(3, 1), X, 0, 0),
    ("unfold", lambda a: a.unfold(1, 3, 1), X, 0, 0),
    ("diagonal", lambda a: a.diagonal(0, 1, 2), (4, 3, 3), 0, 0),
    ("one_hot", lambda a: F.one_hot(a.long().clamp(0, 3), 4), X, 1, 0),
    ("layer_norm", lambda a: F.layer_norm(a, (6,)), X, 0, 0),
    ("rms_norm", lambda a: F.rms_norm(a, (6,)), X, 0, 0),
    ("group_norm batch", lambda a: F.group_norm(a, 2), IMAGE, 0, 0),
    ("group_norm groups", lambda a: F.group_norm(a, 2), IMAGE, 1, 0),
    ("conv1d batch", lambda a: F.conv1d(a, torch.ones(3, 4, 2)), (4, 4, 6), 0, 0),
    ("conv2d batch", lambda a: F.conv2d(a, torch.ones(3, 4, 2, 2)), IMAGE, 0, 0),
    ("conv2d channels", lambda a: F.conv2d(a, torch.ones(3, 4, 2, 2)), IMAGE, 1, 0),
    ("conv2d groups", lambda a: F.conv2d(a, torch.ones(4, 2, 2, 2), groups=2), IMAGE, 1, 0),
    ("max_pool2d", lambda a: F.max_pool2d(a, 2), IMAGE, 1, 0),
    ("attention", lambda a: F.scaled_dot_product_attention(a, a, a, is_causal=True), IMAGE, 1, 0),
    ("einsum", lambda a: torch.einsum("bi,ij->bj", a, torch.ones(6, 3)), X, 0, 0),
    ("einsum summed", lambda a: torch.einsum("bi,ij->bj", a, torch.ones(6, 3)), X, 1, 0),
    ("tensordot", lambda a: torch.tensordot(a, torch.ones(6, 3), 1), X, 0, 0),
    ("cross_entropy", lambda a: F.cross_entropy(a, torch.zeros(4, dtype=torch.int64)), X, 0, 0),
    ("nll_loss", lambda a: F.nll_loss(a, torch.zeros(4, dtype=torch.int64)), X, 0, 0),
    ("zeros_like", torch.zeros_like, X, 0, 0),
    ("linalg.inv", torch.linalg.inv, (4, 3, 3), 0, 0),
    ("fft", lambda a: torch.fft.fft(a, dim=1), X, 0, 0),
    ("tril", torch.tril, (4, 3, 3), 0, 0),
    ("searchsorted", lambda a: torch.searchsorted(torch.arange(3.0), a), X, 0, 0),
]


def _sends(function, shape, dim, allowed):
    torch.manual_seed(0)
    mesh = init_device_mesh((2,), ("x",))
    x = distribute_tensor(torch.randn(shape), mesh, [Shard(dim)])
    with CommDebugMode() as mode:
        result = function(x)
    counts = mode.get_comm_counts()
    assert counts == ({"differentiable_all_reduce": allowed} if allowed else {}), counts
    first = result[0] if isinstance(result, (tuple, list)) else result
    if not allowed:
        assert first.placements != (Replicate(),), "the result is whole"


def test_traffic():
    failures = Failures()
    for name, function, shape, dim, allowed in CASES:
        failures.run(lambda case=(function, shape, dim, allowed): _sends(*case), name, str(dim))
    failures.report()

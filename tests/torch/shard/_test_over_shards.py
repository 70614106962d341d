"""What reductions and losses send over a sharded dim, and the corner cases of their values."""
import math

import torch
import torch.nn.functional as F

from hyper_parallel import CommDebugMode, Replicate, Shard, distribute_tensor, init_device_mesh
from tests.torch.against_dense import normal

NPROC = 4
TIMEOUT = 60
ROWS, CLASSES = 6, 64


def _spread(tensor, *placements):
    return distribute_tensor(tensor, init_device_mesh((4,), ("tp",)), placements or (Shard(1),))


def _sent(function, *tensors):
    """The result, its gradients, and the bytes that it took on this rank, forward and backward."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.is_floating_point())
              for tensor in tensors]
    spread = [_spread(leaf) if leaf.dim() > 1 and leaf.shape[1] == CLASSES else leaf
              for leaf in leaves]
    with CommDebugMode() as mode:
        result = function(*spread)
        whole = result.full_tensor()
        if whole.requires_grad:
            whole.sum().backward()
    return (whole, spread[0].grad, sum(mode.get_comm_bytes().values()),
            mode.generate_comm_debug_tracing_table(3))


def _check(function, *tensors, numbers):
    """Equal to the dense result, and at most ``numbers`` 8-byte numbers reduced over 4 ranks."""
    whole, grad, sent, table = _sent(function, *tensors)
    dense = [tensor.detach().clone().requires_grad_(tensor.is_floating_point())
             for tensor in tensors]
    expected = function(*dense)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    if expected.requires_grad:
        expected.sum().backward()
        torch.testing.assert_close(grad.full_tensor(), dense[0].grad, rtol=1e-12, atol=1e-12,
                                   equal_nan=True)
    assert sent <= numbers * 8 * 2 * 3 / 4, f"{sent} bytes\n{table}"


def test_reductions_send_no_more_than_their_results():
    x = normal(ROWS, CLASSES)
    for function, numbers in [
            (lambda a: a.amax(1), 2 * ROWS), (lambda a: a.amin(1, keepdim=True), 2 * ROWS),
            (torch.max, 2), (torch.min, 2), (lambda a: a.max(1).values, 2 * ROWS),
            (lambda a: a.min(1, keepdim=True)[0], 2 * ROWS), (lambda a: a.argmax(1), 2 * ROWS),
            (torch.argmin, 2), (lambda a: a.logsumexp(1), 2 * ROWS),
            (lambda a: a.prod(1), 3 * ROWS), (lambda a: a.var(1), 3 * ROWS), (torch.std, 3),
            (lambda a: (a > 0).any(1), ROWS), (lambda a: (a > -9).all(), 1),
            (lambda a: torch.count_nonzero(a, 1), ROWS), (torch.Tensor.norm, 1),
            (lambda a: torch.linalg.vector_norm(a, math.inf, 1), 2 * ROWS)]:
        _check(function, x, numbers=numbers)


CORNERS = {
    "amax": lambda a: a.amax(1), "max": torch.max, "max values": lambda a: a.max(1).values,
    "max indices": lambda a: a.max(1).indices, "argmax": torch.argmax,
    "argmin": lambda a: a.argmin(1, True), "logsumexp": lambda a: a.logsumexp(1),
    "norm": torch.Tensor.norm, "std": lambda a: a.std(1), "var": lambda a: a.var(correction=0),
    "prod": lambda a: a.prod(1), "aminmax": lambda a: torch.aminmax(a)[0],
    **{f"norm {order}": lambda a, p=order: torch.linalg.vector_norm(a, p, 1)
       for order in (math.inf, -math.inf, -1)},
}


def _differences(name, found, expected, ours, dense):
    if not torch.allclose(found, expected, equal_nan=True):
        yield f"{name}: {found}, not {expected}"
    if expected.requires_grad:
        expected.sum().backward()
        found.sum().backward()
        grad = ours.grad.full_tensor()
        if not torch.allclose(grad, dense.grad, equal_nan=True):
            yield f"gradient of {name}: {grad}, not {dense.grad}"


def test_corner_cases():
    """Ties within and over shards, nan, infinities, no spread, empty shards, integers."""
    ties = torch.tensor([[5., 5, 1, 2, 5, 0, 0, 5], [7, 7, 7, 7, 7, 7, 7, 7]]).double()
    special = torch.tensor([[1., math.nan, 3, 4, 5, 6, 7, math.nan],
                            [1., 2, math.inf, 4, math.inf, 6, -math.inf, 8]]).double()
    few = torch.tensor([[4., 9., 4., 1., 9.]]).double()
    zeros = torch.zeros(2, 8).double()
    wrong = []
    for kind, x in {"ties": ties, "special": special, "few": few, "zeros": zeros,
                    "negative": -special}.items():
        for name, function in CORNERS.items():
            dense = x.clone().requires_grad_()
            ours = _spread(dense)
            wrong += _differences(f"{name} of {kind}", function(ours).full_tensor(),
                                  function(dense), ours, dense)
    assert not wrong, "\n".join(wrong)
    counts = torch.tensor([[3, -4, 2, 9, 9]])
    for function in (torch.max, torch.argmax, torch.prod, lambda a: a.min(1).indices,
                     lambda a: a.logsumexp(1)):
        torch.testing.assert_close(function(_spread(counts)).full_tensor(), function(counts))


def test_a_pair_is_a_named_one():
    dense = normal(3, 8)
    ours = _spread(dense.detach()).max(1)
    assert type(ours) is type(dense.max(1))
    assert ours.values.placements == ours.indices.placements == (Replicate(),)


def test_cross_entropy_over_a_vocabulary_shard():
    """A maximum and a sum for each row, and the loss; never the logits."""
    x = normal(ROWS, CLASSES)
    target = torch.tensor([0, 63, 17, 40, 5, 40])
    weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(2)).double()
    for options in ({}, {"reduction": "sum"}, {"ignore_index": 40}, {"label_smoothing": 0.1},
                    {"weight": weight}, {"weight": weight, "label_smoothing": 0.2,
                                         "ignore_index": 5}, {"reduction": "none"}):
        _check(lambda a, o=options: F.cross_entropy(a, target, **o), x,
               numbers=3 * ROWS if options.get("reduction") == "none" else 2 * ROWS + 1)
    _check(lambda a: F.cross_entropy(a, target, weight, None, 40, None, "mean", 0.1), x,
           numbers=2 * ROWS + 1)
    _check(lambda a: F.nll_loss(a, target, ignore_index=17), x, numbers=1)
    whole, *_ = _sent(lambda a: F.cross_entropy(a, target, ignore_index=40, reduction="mean"), x)
    assert whole.shape == ()
    nothing = torch.full((ROWS,), -100)
    for options in ({}, {"label_smoothing": 0.1}):  # 0 / 0, with a gradient of 0
        _check(lambda a, o=options: F.cross_entropy(a, nothing, **o), x, numbers=2 * ROWS + 1)
    odd = normal(5, 10)  # 3, 3, 3 and 1 classes
    dense = F.cross_entropy(odd, torch.tensor([9, 0, 3, 8, 2]))
    ours = F.cross_entropy(_spread(odd.detach()), torch.tensor([9, 0, 3, 8, 2]))
    torch.testing.assert_close(ours.full_tensor(), dense, rtol=1e-12, atol=1e-12)


def test_cross_entropy_of_half_precision_sums_in_float32():
    x = (normal(ROWS, CLASSES) * 4).detach().bfloat16()
    target = torch.tensor([0, 63, 17, 40, 5, 40])
    ours = F.cross_entropy(_spread(x), target)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours.full_tensor(), F.cross_entropy(x.float(), target).bfloat16())


def test_a_target_that_no_rank_has_is_refused():
    x = _spread(normal(2, 8).detach())
    for target in (torch.tensor([0, 8]), torch.tensor([-1, 0])):
        try:
            F.cross_entropy(x, target)
        except (IndexError, RuntimeError) as error:
            assert "out of" in str(error)
        else:
            raise AssertionError(f"the classes {target.tolist()} of 8 were accepted")

"""Hooks, the autograd API and its modes with DTensors, on four ranks."""
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.platform.torch import collectives
from tests.torch.against_dense import normal, spread

NPROC = 4
WAYS = ([Replicate()], [Shard(0)], [Shard(1)], [Partial()])


def _mesh():
    return init_device_mesh((4,), ("x",))


def _plane():
    return init_device_mesh((2, 2), ("dp", "tp"))


def test_a_hook_sees_the_layout_of_the_global_gradient():
    seen = []
    for mesh, placements, dual in (
            (_mesh(), [Shard(0)], (Shard(0),)), (_mesh(), [Replicate()], (Replicate(),)),
            (_mesh(), [Partial()], (Replicate(),)),
            (_plane(), [Shard(0), Partial()], (Shard(0), Replicate()))):
        for on_leaf in (True, False):
            dense = normal(5, 3)
            x = spread(dense, mesh, placements)
            y = x if on_leaf else x * 1
            hook = y.register_hook(seen.append)
            (y * y).sum().backward()
            grad = seen.pop()
            assert type(grad) is DTensor and grad.placements == dual and grad.shape == (5, 3)
            assert torch.allclose(grad.full_tensor(), 2 * dense.detach())
            hook.remove()
            if on_leaf:
                (y * y).sum().backward()
            assert not seen


def test_a_hook_may_give_another_gradient():
    for placements in WAYS:
        for new in (lambda grad: grad * 3, lambda grad: torch.ones(5, 3, dtype=torch.float64) * 3,
                    lambda grad: grad.redistribute(placements=[Replicate()]) * 3,
                    lambda grad: spread(3 * grad.full_tensor(), grad.device_mesh, [Shard(0)])):
            dense = normal(5, 3)
            x = spread(dense, _mesh(), placements)
            x.register_hook(new)
            x.sum().backward()
            assert torch.allclose(x.grad.full_tensor(), torch.full((5, 3), 3.0).double())
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        x = spread(normal(5, 3), _mesh(), [Shard(0)])
        x.register_hook(lambda grad: torch.ones(2, 2))
        x.sum().backward()


def _watched(way: str, leaf: torch.Tensor, part: torch.Tensor, loss: torch.Tensor) -> list:
    """What is seen of the gradient of ``part``, and the gradient of ``leaf``."""
    seen = []
    if way == "hook":
        part.register_hook(lambda grad: seen.append(grad) or grad * 2)
    elif way == "kept":
        part.retain_grad()
    if way in ("asked for", "second"):
        seen += torch.autograd.grad(loss, [part], create_graph=way == "second", retain_graph=True)
    if way == "second":
        loss = seen[0].square().sum()
    loss.backward(inputs=[part, leaf] if way == "among inputs" else None)
    return [*seen, leaf.grad, *([part.grad] if way in ("kept", "among inputs") else [])]


def test_a_gathered_tensor_watched_after_its_use_shows_all_of_its_gradient():
    """Else its gradient goes past it, reduced and scattered in one step."""
    values = [normal(*shape, seed=seed) for seed, shape in enumerate([(6, 4), (4, 8), (4, 3)])]

    def loss(part: torch.Tensor, wide: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return (part @ wide).square().sum() + (part @ beside).sum()

    for way in ("nobody", "hook", "kept", "asked for", "among inputs", "second"):
        dense = values[0].detach().clone().requires_grad_()
        x, wide, beside = (spread(value, _mesh(), [placement]) for value, placement in zip(
            values, (Shard(0), Shard(1), Replicate())))
        kept, gathered = dense * 1, x.redistribute(placements=[Replicate()])
        wanted = _watched(way, dense, kept, loss(kept, *values[1:]))
        got = _watched(way, x, gathered, loss(gathered, wide, beside))
        assert len(got) == len(wanted)
        for one, two in zip(got, wanted):
            assert torch.allclose(one.full_tensor(), two), way


def test_inputs_of_a_backward_pass_may_be_an_iterator_one_tensor_or_an_edge():
    """Of DTensors and of plain tensors, whose backward the library replaces, too."""
    for leaf in (normal(5, 3), spread(normal(5, 3), _mesh(), [Shard(0)])):
        other = leaf.detach().clone().requires_grad_()
        for inputs in (iter([leaf]), leaf, [leaf], get_gradient_edge(leaf)):
            leaf.grad = None
            (leaf * other).sum().backward(inputs=inputs)
            assert leaf.grad is not None and other.grad is None
            leaf.grad = None
            torch.autograd.backward((leaf * other).sum(), None, None, False, None,
                                    [leaf] if inputs is leaf else (leaf for _ in range(1)))
            assert leaf.grad is not None and other.grad is None


def test_a_moved_tensor_may_be_modified_in_place():
    """On every rank, whatever the last step was that it moved by there."""
    for shape, before, after in itertools.product(((4, 6), (5, 3)), WAYS, WAYS):
        dense = normal(*shape)
        x = spread(dense, _mesh(), before)
        moved = (x * 1).redistribute(placements=after)
        moved.add_(1).mul_(2)
        (moved * moved).sum().backward()
        (2 * (dense + 1)).square().sum().backward()
        assert torch.allclose(x.grad.full_tensor(), dense.grad)
        (x * 1).redistribute(placements=after).to_local().add_(1)
        (x * 1).full_tensor().add_(1)


def test_what_a_backend_holds_belongs_to_no_graph():
    """Its threads let go of it late, and a graph must not live as long, nor die there."""
    held = []

    def hold(function):
        def call(*tensors, **options):
            held.extend(value for value in tensors if isinstance(value, torch.Tensor))
            return function(*tensors, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_to_all_single"):
            patch.setattr(dist, name, hold(getattr(dist, name)))
        for name in ("_all_gather_single", "_reduce_scatter_single"):
            patch.setattr(collectives, name, hold(getattr(collectives, name)))
        for before, after in itertools.product(WAYS, WAYS):
            moved = (spread(normal(8, 4), _mesh(), before) * 1).redistribute(placements=after)
            moved.sum().backward()
    assert len(held) > 10 and all(tensor.grad_fn is None for tensor in held)


def test_hooks_after_accumulation_and_kept_gradients():
    for placements in WAYS:
        dense = normal(5, 3)
        x = spread(dense, _mesh(), placements)
        calls = []
        x.register_post_accumulate_grad_hook(calls.append)
        y = x * 2
        y.retain_grad()
        (y * y).sum().backward()
        assert len(calls) == 1 and calls[0] is x and type(calls[0].grad) is DTensor
        assert torch.allclose(x.grad.full_tensor(), 8 * dense.detach())
        assert torch.allclose(y.grad.full_tensor(), 4 * dense.detach())
        assert y.retains_grad and not y.is_leaf and x.is_leaf
        assert y.grad.placements == y.layout.dual.placements


def test_a_post_accumulate_hook_may_step():
    x = spread(normal(5, 3), _mesh(), [Shard(0)])
    before = x.full_tensor().detach().clone()

    def step(leaf):
        with torch.no_grad():
            leaf -= 0.1 * leaf.grad
        leaf.grad = None

    x.register_post_accumulate_grad_hook(step)
    (x * 3).sum().backward()
    assert x.grad is None
    assert torch.allclose(x.full_tensor(), before - 0.3)


def test_autograd_grad():
    for placements in WAYS:
        dense, second = normal(5, 3), normal(3)
        x, w = spread(dense, _mesh(), placements), spread(second, _mesh(), [Shard(0)])
        wanted = torch.autograd.grad((dense.exp() * second).sum(), [dense, second])
        got = torch.autograd.grad((x.exp() * w).sum(), [x, w])
        for one, other, leaf in zip(got, wanted, (x, w)):
            assert type(one) is DTensor and one.placements == leaf.layout.dual.placements
            assert torch.allclose(one.full_tensor(), other)
        assert x.grad is None and w.grad is None
        vector = torch.arange(15.0).double().view(5, 3)
        for given in (vector, spread(vector, _mesh(), [Shard(1)]),
                      spread(vector, _mesh(), [Partial()])):
            got, = torch.autograd.grad(x.exp(), x, grad_outputs=given)
            assert torch.allclose(got.full_tensor(), vector * dense.detach().exp())
        unused = spread(normal(2), _mesh(), [Shard(0)])
        got = torch.autograd.grad(x.sum(), [x, unused], allow_unused=True)
        assert got[1] is None
        plain = normal(3, seed=5)
        got, = torch.autograd.grad((x * plain).sum(), plain)
        assert type(got) is torch.Tensor
        assert torch.allclose(got, dense.detach().sum(0))


def test_backward_with_a_given_gradient():
    vector = torch.arange(15.0).double().view(5, 3)
    for placements in WAYS:
        dense = normal(5, 3)
        for give in (lambda y: y.backward(vector), lambda y: y.backward(gradient=vector),
                     lambda y: y.backward(spread(vector, _mesh(), [Shard(0)])),
                     lambda y: torch.autograd.backward([y], [vector]),
                     lambda y: torch.autograd.backward(y, grad_tensors=vector)):
            x = spread(dense, _mesh(), placements)
            give(x.sin())
            assert torch.allclose(x.grad.full_tensor(), vector * dense.detach().cos())
        other = spread(normal(5, 3), _mesh(), [Shard(0)])
        x.grad = None
        (x.sin() * other).backward(vector, inputs=[x])
        assert other.grad is None and x.grad is not None
        with pytest.raises(RuntimeError, match="one element"):
            (x * 2).backward()
        with pytest.raises(ValueError, match="shape"):
            (x * 2).backward(spread(torch.ones(3, 5).double(), _mesh(), [Shard(0)]))


def test_second_derivatives():
    functions = [
        lambda x: (x ** 3).sum(), lambda x: x.exp().mean() ** 2,
        lambda x: x.softmax(-1).pow(2).sum(), lambda x: (x @ x.t()).pow(2).sum(),
        lambda x: x.norm() ** 3, lambda x: x.sum(0).pow(3).sum(), lambda x: x.var(0).pow(2).sum(),
        lambda x: F.layer_norm(x, (3,)).pow(3).sum(), lambda x: x.t().reshape(-1).pow(3).sum(),
    ]
    for mesh, ways in ((_mesh(), WAYS), (_plane(), [[Shard(0), Shard(1)], [Partial(), Shard(0)]])):
        for index, function in enumerate(functions):
            for placements in ways:
                dense = normal(5, 3)
                x = spread(dense, mesh, placements)
                first, = torch.autograd.grad(function(dense), dense, create_graph=True)
                wanted, = torch.autograd.grad(first.pow(2).sum(), dense)
                first, = torch.autograd.grad(function(x), x, create_graph=True)
                first.pow(2).sum().backward()
                assert torch.allclose(x.grad.full_tensor(), wanted), (index, placements)


def test_modes():
    x = spread(normal(5, 3), _mesh(), [Shard(0)])
    with torch.no_grad():
        y = x * 2 + x.sum()
        assert not y.requires_grad and type(y) is DTensor
        assert not x.redistribute(placements=[Replicate()]).requires_grad
    with torch.inference_mode():
        z = (x @ x.t()).redistribute(placements=[Shard(1)])
        assert z.is_inference() and not z.requires_grad
        assert torch.allclose(z.full_tensor(), x.full_tensor() @ x.full_tensor().t())
    with torch.enable_grad():
        assert (x * 2).requires_grad
    with torch.no_grad():
        x.mul_(2.0)
        x.copy_(torch.zeros(5, 3).double())
    assert not x.full_tensor().any() and x.requires_grad and x.is_leaf
    with pytest.raises(RuntimeError, match="leaf"):
        x.add_(1.0)
    x = spread(normal(5, 3), _mesh(), [Replicate()])
    with torch.no_grad():
        (x * x).sum()
    (x * x).sum().backward()
    assert torch.allclose(x.grad.full_tensor(), 2 * x.full_tensor())


def test_autocast():
    for placements in ([Shard(0)], [Replicate()], [Shard(1)]):
        dense, weight = normal(4, 6).detach().float(), normal(8, 6, seed=1).detach().float()
        x = spread(dense.requires_grad_(), _mesh(), placements)
        w = spread(weight.requires_grad_(), _mesh(), [Shard(0)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, wanted = F.linear(x, w), F.linear(dense, weight)
            assert y.dtype is torch.bfloat16 is wanted.dtype
            loss, dense_loss = F.layer_norm(y, (8,)).float().pow(2).mean(), \
                F.layer_norm(wanted, (8,)).float().pow(2).mean()
        loss.backward()
        dense_loss.backward()
        assert torch.allclose(y.full_tensor().float(), wanted.float(), atol=0.05)
        assert x.grad.dtype is torch.float32
        assert torch.allclose(x.grad.full_tensor(), dense.grad, atol=0.02)


def test_from_and_to_local_with_given_gradient_placements():
    mesh = _mesh()
    rank = mesh.rank
    # The user says that the gradient arriving at the local result is only this rank's share.
    x = spread(torch.ones(4).double().requires_grad_(), mesh, [Replicate()])
    local = x.to_local(grad_placements=[Partial()])
    (local * (rank + 1)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((4,), 10.0).double())
    x = spread(torch.ones(5).double().requires_grad_(), mesh, [Shard(0)])
    whole = x.full_tensor(grad_placements=[Partial()])
    (whole * (rank + 1)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5,), 10.0).double())
    leaf = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = DTensor.from_local(leaf, mesh, [Replicate()], grad_placements=[Partial()])
    (y * 3).sum().backward()
    total = leaf.grad.clone()
    torch.distributed.all_reduce(total)
    assert torch.equal(total, torch.full((4,), 3.0).double())


def test_the_users_tensors_stay_plain():
    mesh = _mesh()
    plain = torch.ones(4, requires_grad=True)
    x = DTensor.from_local(plain, mesh, [Shard(0)])
    assert type(plain) is torch.Tensor and x is not plain and x.shape == (16,)
    local = x.to_local()
    assert type(local) is torch.Tensor and local.data_ptr() == plain.data_ptr()
    other = torch.ones(16)
    y = x + other
    assert type(other) is torch.Tensor and type(y) is DTensor
    for function in (lambda t: t.contiguous(), lambda t: t.to(torch.float32), lambda t: t.view(4),
                     lambda t: t.expand(4), lambda t: t.detach(), lambda t: t.float()):
        function(local)
        function(x.redistribute(placements=[Replicate()]).to_local()[:4])
        assert type(local) is torch.Tensor and type(plain) is torch.Tensor
    wrapped = DTensor.from_local(plain.detach(), mesh, [Replicate()])
    assert type(torch.maximum(other[:4], wrapped)) is DTensor and type(other) is torch.Tensor
    same = torch.where(torch.tensor(True), other[:4], wrapped)
    assert type(same) is DTensor
    assert wrapped.contiguous() is not plain and type(wrapped.to_local()) is torch.Tensor


def test_checkpoint_of_operators_that_keep_an_index():
    tokens = torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(1))
    for way, reentrant in itertools.product(([Shard(0)], [Shard(1)], [Replicate()]), (False, True)):
        weight, dense = spread(normal(7, 3), _mesh(), [Replicate()]), normal(7, 3)
        spread_tokens = spread(tokens, _mesh(), way)
        for table, index in ((weight, spread_tokens), (dense, tokens)):
            picked = checkpoint(lambda t, i: F.embedding(i, t).gather(1, i[..., None] % 4).tanh(),
                                table, index, use_reentrant=reentrant)
            picked.sum().backward()
        assert torch.allclose(weight.grad.full_tensor(), dense.grad)


def test_autocast_gives_all_ranks_one_dtype():
    # Rank by rank: one element of the summed dim, several, none.
    for equation, shapes in (("ik,kj->ij", ((3, 5), (5, 2))), ("bik,bjk->bij", ((2, 3, 4),) * 2)):
        dense = [normal(*shape, seed=index).detach().float() for index, shape in enumerate(shapes)]
        ways = [Shard(text.index("k")) for text in equation.partition("->")[0].split(",")]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted = torch.einsum(equation, *dense)
            got = torch.einsum(equation, *[spread(value, _mesh(), [way])
                                           for value, way in zip(dense, ways)])
        assert got.to_local().dtype is wanted.dtype is torch.bfloat16
        assert torch.allclose(got.full_tensor(), wanted, atol=0.1)
    query = normal(2, 2, 3, 4).detach().float()  # two of the ranks have no part of the batch
    image, kernel = normal(2, 3, 6).detach().float(), normal(4, 3, 2).detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        split = spread(query, _mesh(), [Shard(0)])
        mixed = F.scaled_dot_product_attention(split, split, split)
        folded = F.conv1d(spread(image, _mesh(), [Shard(0)]), kernel)
        assert mixed.to_local().dtype is F.scaled_dot_product_attention(query, query, query).dtype
        assert folded.to_local().dtype is F.conv1d(image, kernel).dtype


def test_a_product_over_shards_has_the_whole_gradient():
    x, dense = spread(normal(5, 3), _mesh(), [Shard(0)]), normal(5, 3)
    seen = []
    for leaf in (x, dense):
        total = leaf.prod(0)
        total.register_hook(seen.append)
        total.sin().sum().backward()
    assert torch.allclose(seen[0].full_tensor(), seen[1])
    assert torch.allclose(x.grad.full_tensor(), dense.grad)

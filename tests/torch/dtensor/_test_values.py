"""Values that leave a DTensor, and sums that stay one, on four ranks."""
import operator

import pytest
import torch

from hyper_parallel import (
    DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh)
from tests.torch.against_dense import spread

NPROC = 4
EVERY = [Replicate(), Shard(0), Partial()]


def _mesh():
    return init_device_mesh((4,), ("x",))


def _plane():
    return init_device_mesh((2, 2), ("dp", "tp"))


def _range(count, **options):
    return torch.arange(float(count), dtype=torch.float64, **options)


def test_summands_have_the_gradient_of_their_sum():
    mesh = _mesh()
    for way in ([Replicate()], [Shard(0)], None):
        leaf = torch.ones(4, requires_grad=True)
        x = DTensor.from_local(leaf, mesh, [Partial()])
        moved = x.full_tensor() if way is None else x.redistribute(placements=way).to_local()
        assert torch.equal(moved, torch.full_like(moved, 4.0))
        moved.sum().backward()
        assert torch.equal(leaf.grad, torch.ones(4)), way


def test_summands_reduced_twice_count_each_use():
    mesh = _mesh()
    leaf = torch.ones(4, requires_grad=True)
    x = DTensor.from_local(leaf, mesh, [Partial()])
    again = x.redistribute(placements=[Replicate()]).to_local()
    (x.full_tensor().sum() + 2 * again.sum()).backward()
    assert torch.equal(leaf.grad, torch.full((4,), 3.0))


def test_summands_on_two_axes_have_the_gradient_of_their_sum():
    mesh = _plane()
    for placements in ([Partial(), Partial()], [Partial(), Replicate()], [Shard(0), Partial()]):
        dense = _range(4).requires_grad_()
        x = spread(dense, mesh, placements)
        (x.full_tensor() * _range(4)).sum().backward()
        assert torch.equal(x.grad.full_tensor(), _range(4)), placements
        assert x.grad.placements == tuple(
            Replicate() if p == Partial() else p for p in placements)


def test_average_and_extremum_reduce_with_their_gradients():
    mesh = _mesh()
    rank = mesh.rank
    leaf = torch.full((2,), float(rank), dtype=torch.float64, requires_grad=True)
    x = DTensor.from_local(leaf, mesh, [Partial("avg")])
    assert torch.equal(x.full_tensor(), torch.full((2,), 1.5, dtype=torch.float64))
    x.full_tensor().sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 0.25, dtype=torch.float64))
    for op, value, holder in (("max", 3.0, 3), ("min", 0.0, 0)):
        leaf = torch.full((2,), float(rank), requires_grad=True)
        whole = DTensor.from_local(leaf, mesh, [Partial(op)]).full_tensor()
        assert torch.equal(whole, torch.full((2,), value))
        whole.sum().backward()
        assert torch.equal(leaf.grad, torch.full((2,), float(rank == holder)))
    leaf = torch.tensor([float(rank + 1)], requires_grad=True)
    whole = DTensor.from_local(leaf, mesh, [Partial("product")]).full_tensor()
    assert whole.item() == 24.0
    whole.backward()
    assert torch.allclose(leaf.grad, torch.tensor([24.0 / (rank + 1)]))


def test_square_of_a_sum_of_shards():
    mesh = _mesh()
    for trip in (False, True):
        for square in (lambda s: s ** 2, lambda s: s * s, torch.square, lambda s: s.pow(2.0)):
            x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Shard(0)])
            x.requires_grad_()
            total = x.sum()
            assert total.placements == (Partial(),)
            if trip:
                total = DTensor.from_local(total.to_local(), mesh, [Partial()])
            result = square(total)
            assert result.item() == 100.0
            result.backward()
            assert torch.equal(x.grad.to_local(), torch.tensor([20.0]))
            assert torch.equal(x.grad.full_tensor(), torch.full((4,), 20.0))


def _trip(x):
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape)


def test_functions_of_a_reduction_equal_dense():
    mesh = _mesh()
    functions = [
        lambda x: x.mean() ** 2, lambda x: x.sum() / x.mean(), lambda x: x.sum().exp().log(),
        lambda x: (x.sum() - 3.0) ** 2, lambda x: 2.0 / x.sum(), lambda x: x.sum() * x.mean(),
        lambda x: (x * x.sum()).sum(), lambda x: (x - x.mean()).pow(2).mean().sqrt(),
        lambda x: x.sum(0, keepdim=True) * x, lambda x: x.max() * x.sum(), lambda x: x.norm() ** 3,
        lambda x: torch.relu(x.sum()), lambda x: x.sum() + 1.0, lambda x: 1.0 - x.sum(),
        lambda x: (x.sum() + x.sum()) ** 2, lambda x: x.sum().abs() * 3,
        lambda x: torch.stack([x.sum(), x.mean()]).prod(), lambda x: x.sum().view(1, 1).squeeze(),
    ]
    for index, function in enumerate(functions):
        for count in (4, 5, 2):
            for placement in EVERY:
                for between in (lambda x: x, _trip):
                    dense = (_range(count) + 1).requires_grad_()
                    x = spread(dense, mesh, [placement])
                    wanted, got = function(dense), function(between(x))
                    note = f"{index} {count} {placement}"
                    assert torch.allclose(got.full_tensor(), wanted), note
                    wanted.sum().backward()
                    got.sum().backward()
                    assert torch.allclose(x.grad.full_tensor(), dense.grad), note


def test_a_number_is_the_global_one():
    mesh = _mesh()
    for placement in (Shard(0), Replicate(), Partial()):
        s = spread(_range(8), mesh, [placement]).sum()
        assert s.item() == 28 and float(s) == 28.0 and int(s) == 28 and complex(s) == 28 + 0j
        assert bool(s > 20) is True and bool(s) is True and bool(s < 20) is False
        assert s.tolist() == 28.0 and s.numpy() == 28.0
        assert f"{s:.1f}" == "28.0" and format(s, "5.2f") == "28.00" and f"{s.item()}" == "28.0"
        assert ("yes" if s > 27.5 else "no") == "yes"
        assert s == 28 and s != 27 and s >= 28 and not s < 28
        assert (s.max() if s > 1 else 0).item() == 28
        assert [0, 1, 2][(s / 28).long()] == 1
        assert list(range(30))[int(s)] == 28
        assert torch.is_nonzero(s) and s.is_nonzero()
        assert abs(s).item() == 28 and (-s).item() == -28 and (s % 10).item() == 8


def test_whole_values_of_larger_tensors():
    for mesh, placements in ((_mesh(), [Shard(0)]), (_mesh(), [Partial()]),
                             (_plane(), [Shard(0), Shard(0)]), (_plane(), [Partial(), Shard(0)])):
        x = spread(_range(5), mesh, placements)
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert [float(value) for value in x] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert len(x) == 5 and 3.0 in x and 7.0 not in x
        assert torch.equal(x, x) and torch.allclose(x, x + 0.0) and not torch.equal(x, x + 1.0)
        assert (x.numpy() == [0, 1, 2, 3, 4]).all()
        assert x.max().item() == 4.0 and x[3].item() == 3.0
        with pytest.raises(RuntimeError):
            x.item()
        with pytest.raises(RuntimeError):
            bool(x)
        assert x.nonzero().full_tensor().tolist() == [[1], [2], [3], [4]]
        assert x.any().item() is True and x.all().item() is False
        with pytest.raises(TypeError):
            len(x.sum())


def test_a_loss_accumulates_into_a_number():
    mesh = _mesh()
    ones = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    loss = 0.0
    for _ in range(3):
        loss += ones.sum()
    assert type(loss) is DTensor and loss.item() == 12.0
    cases = {
        operator.iadd: 0.0, operator.isub: 24.0, operator.imul: 1.0, operator.itruediv: 64.0}
    wanted = {operator.iadd: 12.0, operator.isub: 12.0, operator.imul: 64.0, operator.itruediv: 1.0}
    for start in (lambda value: value, torch.tensor, lambda value: torch.zeros(()) + value):
        for operation, first in cases.items():
            if operation is operator.itruediv and not isinstance(start(first), float):
                continue  # a test of its own: the plain tensor is written to
            value = start(first)
            for _ in range(3):
                value = operation(value, ones.sum())
            assert value.item() == wanted[operation], (operation, start(first))
            assert type(value) is DTensor
    assert sum([ones.sum(), ones.sum() * 2, ones.mean()]).item() == 13.0
    assert sum((ones.sum() for _ in range(3)), torch.zeros(())).item() == 12.0
    assert torch.stack([ones.sum(), ones.sum()]).sum().item() == 8.0


def test_a_plain_tensor_that_is_written_to_takes_part():
    mesh = _mesh()
    ones = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    total = torch.zeros(())
    kept = total
    total += ones.sum() * 3
    assert total.item() == 12.0 and kept.item() == 12.0
    total.backward()
    assert torch.equal(ones.grad.full_tensor(), torch.full((4,), 3.0))
    buffer = torch.zeros(4)
    buffer.copy_(ones.detach() * 2)
    assert torch.equal(buffer if type(buffer) is torch.Tensor else buffer.full_tensor(),
                       torch.full((4,), 2.0))


def test_gradients_through_an_accumulated_loss():
    for mesh, placements in ((_mesh(), [Shard(0)]), (_plane(), [Shard(0), Partial()]),
                             (_mesh(), [Replicate()])):
        x = spread(_range(5).requires_grad_(), mesh, placements)
        loss = 0.0
        for step in range(1, 4):
            loss = loss + (x * step).sum()
            loss += (x * x).mean()
        loss *= 2
        loss -= 1.0
        loss.backward()
        assert torch.allclose(x.grad.full_tensor(), 12.0 + 12.0 * _range(5) / 5)


def test_uneven_and_empty_shards_reduce_rightly():
    mesh = _mesh()
    x = distribute_tensor(torch.tensor([5.0, 7.0]), mesh, [Shard(0)])
    assert x.max().item() == 7 and x.min().item() == 5 and x.mean().item() == 6
    assert x.argmax().item() == 1 and x.argmin().item() == 0 and x.prod().item() == 35
    assert x.var().item() == 2 and x.sum().item() == 12 and x.amax().item() == 7
    assert abs(x.std().item() - 2 ** 0.5) < 1e-6 and x.median().item() == 5
    assert x.max(0).indices.item() == 1 and x.min(0).values.item() == 5
    assert abs(x.norm().item() - 74 ** 0.5) < 1e-5 and x.norm(float("inf")).item() == 7
    assert x.norm(1).item() == 12 and x.norm(0).item() == 2 and x.norm(-float("inf")).item() == 5
    assert x.logsumexp(0).item() == pytest.approx(7.126928, abs=1e-5)
    assert x.any().item() and x.all().item() and x.count_nonzero().item() == 2
    assert x.softmax(0).sum().item() == pytest.approx(1.0)
    assert x.aminmax().max.item() == 7
    negative = -x
    assert negative.max().item() == -5 and negative.prod().item() == 35
    assert negative.amin().item() == -7 and negative.argmax().item() == 0
    nothing = distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)])
    assert nothing.sum().item() == 0 and nothing.shape == (0, 3)
    assert nothing.sum(0).full_tensor().tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(RuntimeError):
        nothing.max()


def test_the_extremum_alone_has_a_gradient():
    for mesh, placements in ((_mesh(), [Shard(0)]), (_plane(), [Shard(0), Shard(0)]),
                             (_mesh(), [Replicate()]), (_mesh(), [Partial()])):
        cases = [lambda x: x.max(), lambda x: x.amax(), lambda x: x.min(), lambda x: x.amin(0),
                 lambda x: x.max(0)[0], lambda x: x.max(0).values, lambda x: x.aminmax()[1],
                 lambda x: torch.linalg.vector_norm(x, float("inf")),
                 lambda x: torch.linalg.vector_norm(x, -float("inf")),
                 lambda x: x.norm(p=float("inf")), lambda x: x.median(), lambda x: x.sort()[0][1],
                 lambda x: x.topk(2)[0].sum(), lambda x: torch.maximum(x, x.mean()).sum()]
        for values in ([1.0, 5.0, 2.0, 3.0], [1.0, 5.0, 2.0, 5.0], [5.0, 5.0, 5.0, 5.0],
                       [1.0, 5.0], [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]):
            for index, function in enumerate(cases):
                dense = torch.tensor(values, requires_grad=True)
                x = spread(dense, mesh, placements)
                function(dense).backward()
                function(x).backward()
                assert torch.allclose(x.grad.full_tensor(), dense.grad), (index, values, placements)


def test_distribution_is_exact():
    for mesh in (_mesh(), _plane()):
        for shape in ((5,), (5, 3), (1,), (0, 2), (3, 2, 5)):
            dense = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            for placements in _layouts(len(shape), mesh.ndim):
                x = distribute_tensor(dense, mesh, placements)
                positive = tuple(Shard(p.dim % len(shape)) if p.is_shard() else p
                                 for p in placements)
                assert x.placements == positive and x.shape == shape
                assert tuple(x.to_local().shape) == x.layout.local_shape(shape)
                assert torch.equal(x.full_tensor(), dense), placements
                own = distribute_tensor(dense, mesh, placements, src_data_rank=None)
                assert torch.equal(own.to_local(), x.to_local())


def _layouts(ndim, axes):
    if not axes:
        return [[]]
    kinds = [Replicate(), *(Shard(dim) for dim in range(-1, ndim))]
    return [[kind, *rest] for kind in kinds for rest in _layouts(ndim, axes - 1)
            if kind not in rest or kind in (Replicate(), Shard(0))] \
        if ndim else [[Replicate()] * axes]


def test_only_the_source_rank_counts():
    mesh = _mesh()
    mine = torch.arange(5.0) + 100 * mesh.rank
    for placement in (Shard(0), Replicate(), Partial()):
        assert torch.equal(distribute_tensor(mine, mesh, [placement]).full_tensor(),
                           torch.arange(5.0))
        other = distribute_tensor(mine, mesh, [placement], src_data_rank=2)
        assert torch.equal(other.full_tensor(), torch.arange(5.0) + 200)
    assert torch.equal(mine, torch.arange(5.0) + 100 * mesh.rank)  # the caller's tensor stays

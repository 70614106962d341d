"""Moves between all layouts, with their gradients, against the dense tensor."""
import itertools

import torch

from hyper_parallel import (
    DeviceMesh, DTensor, Layout, Partial, Replicate, Shard, init_device_mesh)

NPROC = 4


def _placements(ndim):
    return [Replicate(), Partial(), *(Shard(dim) for dim in range(ndim))]


def _part(tensor, layout):
    """What this rank holds of ``tensor`` under ``layout``; summands are whole."""
    return tensor[tuple(slice(start, start + length)
                        for start, length in layout.local_bounds(tensor.shape))]


def _spread(dense, mesh, placements):
    """A DTensor of value ``dense`` whose summands differ from rank to rank, and its local leaf."""
    layout = Layout(mesh, placements)
    local = _part(dense, layout).clone()
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            first = mesh.get_coordinate()[axis] == 0
            others = mesh.mesh_shape[axis] - 1
            local = (local if first else torch.zeros_like(local)) \
                + (axis + 1.0) * (others if first else -1.0)
    local.requires_grad_()
    return DTensor.from_local(local, mesh, placements, shape=dense.shape), local


def _check(x, leaf, leaf_grad, dense, target, order=None):
    """Move ``x``: the value stays, and the gradient arrives at ``leaf`` as ``leaf_grad`` says."""
    note = f"{x.layout} -> {target} {order}"
    y = x.redistribute(placements=target, shard_order=order)
    assert torch.equal(y.full_tensor(), dense), note
    if not any(placement.is_partial() for placement in target):
        assert torch.equal(y.to_local(), _part(dense, y.layout)), note
    weight = torch.arange(1.0, dense.numel() + 1).reshape(dense.shape)
    torch.autograd.backward(y.to_local(), _part(weight, y.layout.dual))
    assert torch.equal(leaf.grad, leaf_grad(weight)), note


def _dense(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def _check_every_pair(mesh, dense):
    kinds = list(itertools.product(_placements(dense.dim()), repeat=mesh.ndim))
    for source, target in itertools.product(kinds, kinds):
        x, leaf = _spread(dense, mesh, source)
        _check(x, leaf, lambda weight, x=x: _part(weight, x.layout.dual), dense, target)


def test_every_pair_on_one_axis():
    mesh = init_device_mesh((4,), ("tp",))
    for shape in ((8, 4), (5, 3), (1, 6), (7, 2, 3)):
        _check_every_pair(mesh, _dense(*shape))


def test_every_pair_on_two_axes():
    _check_every_pair(init_device_mesh((2, 2), ("dp", "tp")), _dense(5, 3))


def test_every_pair_on_a_permuted_mesh():
    _check_every_pair(DeviceMesh([3, 1, 2, 0], ("tp",)), _dense(4, 5))


def test_every_shard_order():
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    dense = _dense(5, 7)
    orders = [None, {0: ("tp", "dp")}]
    both = [Shard(0), Shard(0)]
    cases = [(source, both, target) for source, target in itertools.product(orders, orders)]
    cases += [({0: ("tp", "dp")}, target, None)
              for target in itertools.product(_placements(2), repeat=2)]
    for source_order, target, target_order in cases:
        leaf = dense.clone().requires_grad_()
        whole = DTensor.from_local(leaf, mesh, [Replicate(), Replicate()])
        x = whole.redistribute(placements=both, shard_order=source_order)
        _check(x, leaf, lambda weight: weight, dense, target, target_order)

"""A write to a view of a DTensor writes to the tensor, also where it was moved to be viewed."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    CommDebugMode, DeviceMesh, Partial, Replicate, Shard, distribute_tensor, init_device_mesh)
from tests.torch.against_dense import Failures

NPROC = 4
TIMEOUT = 150

VIEWS: dict[str, Callable] = {
    "select": lambda x: x.select(0, 1),
    "last": lambda x: x.select(-1, -1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "index": lambda x: x[1:, None, 2],
    "every other": lambda x: x[::2],
    "number": lambda x: x[1, 2],
    "view": lambda x: x.view(-1),
    "view in two": lambda x: x.view(-1, 2),
    "reshape": lambda x: x.reshape(-1, 2),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "permute": lambda x: x.permute(2, 0, 1),
    "squeeze": lambda x: x.narrow(0, 1, 1).squeeze(),
    "diagonal": lambda x: x.diagonal(1, -2, -1),
    "unfold": lambda x: x.unfold(-1, 2, 2),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "equal parts": lambda x: x.chunk(2, 0)[0],
    "split": lambda x: x.split([1, x.shape[0] - 1], 0)[0],
    "tensor_split": lambda x: x.tensor_split(2, 1)[0],
    "unbind": lambda x: x.unbind(0)[2],
    "by keyword": lambda x: torch.select(input=x, dim=0, index=1),
    "detached": lambda x: x.select(0, 1).detach(),
    "data": lambda x: x.select(1, 1).data,
    "view of a view": lambda x: x.select(0, 1).view(-1)[2:].unsqueeze(0),
    "part of a part": lambda x: x.flatten().view(2, -1)[1].narrow(0, 1, 2),
    "other dtype": lambda x: x.select(0, 1).view(torch.int64),
    "complex": lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))),
    # What follows is a copy for a plain tensor, too.
    "reshape that copies": lambda x: x.transpose(0, 1).reshape(-1),
    "flatten that copies": lambda x: x.transpose(0, 2).flatten(1),
    "contiguous": lambda x: x.transpose(0, 1).contiguous().select(0, 1),
    "by a tensor": lambda x: x[torch.tensor([0, 1])],
    "mask": lambda x: x[x > 4],
    "clone": lambda x: x.select(0, 1).clone().view(-1),
}
WRITES: dict[str, Callable] = {
    "add": lambda view: view.add_(1),
    "set": lambda view: view.__setitem__(0, 7),
    "copy": lambda view: view.copy_(torch.full(view.shape, 2.0)),
    "foreach": lambda view: torch._foreach_add_([view], 2),
    "out": lambda view: torch.mul(view, 2, out=view),
    "init": nn.init.ones_,
    "inplace": lambda view: F.relu(view.sub_(9), inplace=True),
    "+=": lambda view: view.__iadd__(2),
}


def placements(mesh: DeviceMesh) -> Iterator[Sequence[Any]]:
    """Some ways to lie on the mesh."""
    if mesh.ndim == 1:
        return iter([[Shard(0)], [Shard(1)], [Shard(2)], [Partial()]])
    return iter([[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(2)]])


def check(mesh: DeviceMesh, shape: tuple, way: Sequence[Any], view: Callable, write: Callable
          ) -> None:
    """The whole tensor is what it is without ranks."""
    dense = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    spread = distribute_tensor(dense.clone(), mesh, way)
    write(view(dense))
    write(view(spread))
    assert spread.placements == tuple(way)
    assert torch.equal(spread.full_tensor(), dense), spread.full_tensor()


def test_every_view() -> None:
    failures = Failures()
    for mesh in (init_device_mesh((4,), ("x",)), init_device_mesh((2, 2), ("x", "y"))):
        for way, (name, view) in itertools.product(placements(mesh), VIEWS.items()):
            shape = (4, 4, 6) if mesh.ndim == 1 else (5, 4, 6)
            with torch.inference_mode(mesh.ndim == 2):
                failures.run(partial(check, mesh, shape, way, view, WRITES["add"]),
                             f"{name}, {way}, {shape}", "")
    failures.report()


def test_every_write() -> None:
    failures = Failures()
    mesh = init_device_mesh((4,), ("x",))
    for way, view, (name, write) in itertools.product(
            placements(mesh), ("select", "view of a view", "equal parts"), WRITES.items()):
        failures.run(partial(check, mesh, (8, 4, 6), way, VIEWS[view], write),
                     f"{name} to {view}, {way}", "")
    failures.report()


def test_a_row_of_zeros_in_a_split_embedding() -> None:
    """As ``reset_parameters`` with a padding index writes it."""
    mesh = init_device_mesh((4,), ("x",))
    layer = nn.Embedding(10, 6, padding_idx=7)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(10, 6), mesh, [Shard(0)]))
    layer._fill_padding_idx_with_zero()
    wanted = torch.ones(10, 6)
    wanted[7] = 0
    assert torch.equal(layer.weight.full_tensor(), wanted)
    layer.reset_parameters()
    assert not layer.weight.full_tensor()[7].any() and layer.weight.full_tensor()[6].all()


def test_what_a_write_sends() -> None:
    """The copy is everywhere already: the ranks take their part of it."""
    x = distribute_tensor(torch.ones(8, 6), init_device_mesh((4,), ("x",)), [Shard(0)])
    part = x[3]
    with CommDebugMode() as mode:
        part.fill_(2)
    assert mode.get_total_counts() == 0
    assert x.full_tensor().sum() == 8 * 6 + 6


def test_refused_where_gradients_are_recorded() -> None:
    """Nothing is written then; under no_grad, or to what needs none, it is."""
    mesh = init_device_mesh((4,), ("x",))
    leaf = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]).requires_grad_()
    x, beside = leaf * 1, distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
    row = torch.zeros(6, requires_grad=True)
    words = r"'fill_' writes to a view of a tensor of shape \(8, 6\) with Layout\(x=Shard\(dim=0"
    for view in (x[1], x[1:3].t(), x.unbind()[2].detach()):
        with pytest.raises(RuntimeError, match=words):
            view.fill_(3)
    with pytest.raises(RuntimeError, match="'copy_' writes to a view .* write under no_grad"):
        beside[1].copy_(row)
    assert x.full_tensor().sum() == beside.full_tensor().sum() == 48
    with torch.no_grad():
        x[1].fill_(3)
        beside[1].copy_(row)
    assert x.full_tensor().sum() == 48 + 12 and beside.full_tensor().sum() == 48 - 6

"""What lives how long, on four ranks."""
import gc
import time
import weakref

import torch
import torch.nn.functional as F

from hyper_parallel import Partial, Replicate, Shard, init_device_mesh
from tests.torch.against_dense import normal, spread

NPROC = 4
WAYS = ([Replicate()], [Shard(0)], [Shard(1)], [Partial()])


def _mesh():
    return init_device_mesh((4,), ("x",))


def test_nothing_is_kept_alive():
    mesh = _mesh()
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            for placements in WAYS:
                w = spread(normal(6, 6), mesh, [Replicate()])
                x = spread(normal(4, 6), mesh, placements)
                watched = [weakref.ref(w), weakref.ref(x)]
                h = F.relu(x @ w) @ w
                watched.append(weakref.ref(h))
                loss = (h * w.sum()).pow(2).mean()
                if backward:
                    loss.backward()
                del w, x, h, loss
                # A collective's thread may hold its result a little longer than the caller.
                limit = time.monotonic() + 10
                while time.monotonic() < limit and any(ref() is not None for ref in watched):
                    time.sleep(0.01)
                assert [ref() for ref in watched] == [None] * 3, (backward, placements)
    finally:
        gc.enable()


def test_views_of_a_parameter_do_not_pile_up():
    mesh = _mesh()
    w = spread(normal(6, 6), mesh, [Replicate()])
    sizes = []
    for step in range(6):
        x = spread(normal(8, 6, seed=step), mesh, [Shard(0)])
        (x @ w).pow(2).sum().backward()
        with torch.no_grad():
            w -= 0.01 * w.grad
        w.grad = None
        sizes.append(len(w.__dict__.get("_views", ())))
    assert sizes[-1] == sizes[0] <= 1
    activation = w * 1
    for _ in range(5):
        (spread(normal(8, 6), mesh, [Shard(0)]) @ activation).sum()
    assert len(activation.__dict__.get("_views", ())) <= 1


def test_a_replicated_tensor_used_twice_reduces_once():
    mesh = _mesh()
    dense, weight = normal(8, 6), normal(6, 6, seed=1)
    x, w = spread(dense, mesh, [Shard(0)]), spread(weight, mesh, [Replicate()])
    calls = []
    native = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *args, **kwargs: calls.append(1) or native(
        *args, **kwargs)
    try:
        ((x @ w).relu() @ w).to_local().sum().backward()
    finally:
        torch.distributed.all_reduce = native
    assert len(calls) == 1
    assert torch.allclose(w.grad.full_tensor(), torch.autograd.grad(
        ((dense @ weight).relu() @ weight).sum(), weight)[0])

"""Copies, files and dtypes of DTensors and of modules that hold them, on four ranks."""
import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh)
from tests.torch.against_dense import normal, spread

NPROC = 4
WAYS = ([Replicate()], [Shard(0)], [Shard(1)], [Partial()])


def _mesh():
    return init_device_mesh((4,), ("x",))


def _same(one, other):
    assert type(one) is type(other) is DTensor
    assert one.placements == other.placements and one.shape == other.shape
    assert one.layout is other.layout and one.requires_grad == other.requires_grad
    return torch.equal(one.to_local(), other.to_local())


def _through_file(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    # A module is code; tensors and state dicts need no trust in the file.
    return torch.load(buffer, weights_only=not isinstance(value, nn.Module), **options)


def test_copies_are_independent():
    for placements in WAYS:
        for needs_grad in (True, False):
            x = spread(normal(5, 6).requires_grad_(needs_grad), _mesh(), placements)
            x.note = "mine"
            for make in (copy.deepcopy, copy.copy, lambda t: pickle.loads(pickle.dumps(t)),
                         _through_file):
                other = make(x)
                assert other is not x and _same(other, x) and other.note == "mine"
                assert other.is_leaf
            other = copy.deepcopy(x)
            with torch.no_grad():
                other.add_(1.0)
            assert not torch.equal(other.to_local(), x.to_local()) or not x.to_local().numel()
    x = spread(normal(5, 6), _mesh(), [Shard(0)])
    (x * 2).sum().backward()
    other = copy.deepcopy(x)
    assert _same(other.grad, x.grad) and other.grad is not x.grad
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(x * 2)
    twice = copy.deepcopy([x, x])
    assert twice[0] is twice[1]


def test_a_copy_does_not_carry_what_belongs_to_the_graph():
    w = spread(normal(6, 6), _mesh(), [Replicate()])
    (spread(normal(8, 6), _mesh(), [Shard(0)]) @ w).sum().backward()
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert "_views" not in other.__dict__ and "_gathered_from" not in other.__dict__
        (spread(normal(8, 6), _mesh(), [Shard(0)]) @ other).sum().backward()
        assert torch.allclose(other.grad.full_tensor() * (2 if other.grad is None else 1),
                              other.grad.full_tensor())


def test_a_plain_module_used_beside_a_dtensor_can_still_be_saved():
    norm = nn.LayerNorm(6).double()
    for shape in ((8, 6), (4, 6)):
        norm(spread(normal(*shape), _mesh(), [Shard(0)])).sum().backward()
        for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _through_file):
            other = make(norm)
            assert torch.equal(other.weight, norm.weight) and not vars(other.weight)
    hidden = norm.weight * 2
    (spread(normal(8, 6), _mesh(), [Shard(0)]) * hidden).sum()
    assert not vars(hidden)


def test_parameters():
    x = distribute_tensor(normal(5, 6).detach(), _mesh(), [Shard(0)])
    parameter = nn.Parameter(x)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
    assert parameter.requires_grad and parameter.is_leaf and parameter.shape == (5, 6)
    assert parameter.to_local().data_ptr() == x.to_local().data_ptr()
    assert not nn.Parameter(x, requires_grad=False).requires_grad
    module = nn.Module()
    module.weight = parameter
    module.register_buffer("buffer", distribute_tensor(torch.ones(4), _mesh(), [Shard(0)]))
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert module.weight is parameter and type(module.buffer) is DTensor
    assert sum(p.numel() for p in module.parameters()) == 30
    other = copy.deepcopy(module)
    assert isinstance(other.weight, nn.Parameter) and _same(other.weight, module.weight)
    other = _through_file(module)
    assert isinstance(other.weight, nn.Parameter) and _same(other.weight, module.weight)
    assert "DTensor" in repr(parameter) and "Shard(dim=0)" in repr(parameter)


def _linear(placements):
    module = nn.Linear(6, 8, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(normal(8, 6))
        module.bias.copy_(normal(8, seed=1))
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, _mesh(), placements))
    module.bias = nn.Parameter(distribute_tensor(module.bias.data, _mesh(), [Shard(0)]))
    return module


def test_modules_change_dtype_and_place():
    for placements in WAYS[:3]:
        module = _linear(placements)
        before = module.weight
        for change in (lambda m: m.to(torch.float32), lambda m: m.double(), lambda m: m.float(),
                       lambda m: m.bfloat16(), lambda m: m.to("cpu"),
                       lambda m: m.to(device="cpu", dtype=torch.float64), lambda m: m.half(),
                       lambda m: m.type(torch.float64), lambda m: m.cpu()):
            assert change(module) is module
            assert type(module.weight) is type(before)
            assert module.weight.placements == tuple(placements)
            assert module.weight.shape == (8, 6) and module.weight.requires_grad
        assert module.weight.dtype is torch.float64
        assert torch.allclose(module.weight.full_tensor(), normal(8, 6), atol=0.01)
        module(normal(3, 6)).sum().backward()
        assert module.weight.grad.placements == module.weight.layout.dual.placements
        module.to(torch.float32)
        assert module.weight.grad.dtype is torch.float32
        module.requires_grad_(False)
        assert not module.weight.requires_grad
        module.train().eval().zero_grad()
        assert module.weight.grad is None
        module.to_empty(device="cpu")
        assert module.weight.placements == tuple(placements)


def test_state_dicts():
    for placements in WAYS[:3]:
        source, target = _linear(placements), _linear([Replicate()])
        with torch.no_grad():
            source.weight.mul_(2.0)
        state = source.state_dict()
        assert type(state["weight"]) is DTensor and not state["weight"].requires_grad
        assert state["weight"].to_local().data_ptr() == source.weight.to_local().data_ptr()
        target.load_state_dict(_through_file(state))
        assert target.weight.placements == (Replicate(),)  # the target keeps its layout
        assert torch.equal(target.weight.full_tensor(), source.weight.full_tensor())
        target.load_state_dict({name: value.full_tensor() for name, value in state.items()})
        target.load_state_dict(state, assign=True)
        assert target.weight.placements == tuple(placements)
        with pytest.raises(RuntimeError, match="size mismatch"):
            target.load_state_dict({**state, "weight": torch.zeros(3, 3)})


def _step(module, optimizer):
    optimizer.zero_grad()
    module(normal(3, 6)).pow(2).sum().backward()
    optimizer.step()


def test_optimizer_state_is_saved_and_loaded():
    for kind, options in ((torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}),
                          (torch.optim.AdamW, {"fused": True})):
        first, second = _linear([Shard(0)]), _linear([Shard(0)])
        optimizer = kind(first.parameters(), lr=0.1, **options)
        other = kind(second.parameters(), lr=0.1, **options)
        _step(first, optimizer)
        _step(first, optimizer)
        second.load_state_dict(_through_file(first.state_dict()))
        other.load_state_dict(_through_file(optimizer.state_dict()))
        for state in other.state.values():
            for name, value in state.items():
                assert name == "step" or type(value) is DTensor
        _step(first, optimizer)
        _step(second, other)
        assert torch.equal(first.weight.full_tensor(), second.weight.full_tensor())
        assert len(copy.deepcopy(optimizer).state_dict()["state"]) == 2


def test_attributes_that_share_memory():
    for placements in WAYS:
        x = spread(normal(5, 6), _mesh(), placements)
        for alias in (x.data, x.detach()):
            assert type(alias) is DTensor and alias.placements == x.placements
            assert not alias.requires_grad and alias.is_leaf and alias.shape == (5, 6)
            assert alias.to_local().data_ptr() == x.to_local().data_ptr()
        other = spread(normal(5, 6, seed=9), _mesh(), [Shard(0)])
        x.data = other.data
        assert x.placements == (Shard(0),) and x.requires_grad
        assert torch.equal(x.full_tensor(), other.full_tensor())
        with pytest.raises(TypeError, match="DTensor"):
            x.data = torch.zeros(5, 6)
        y = (x * 2).detach_()
        assert type(y) is DTensor and y.grad_fn is None
        assert x.requires_grad_(False) is x and not x.requires_grad


def test_metadata_speaks_of_the_global_tensor():
    plane = init_device_mesh((2, 2), ("dp", "tp"))
    for mesh, placements in ((_mesh(), [Shard(0)]), (_mesh(), [Shard(1)]),
                             (plane, [Shard(0), Shard(1)]), (_mesh(), [Partial()])):
        dense = normal(5, 6)
        x = spread(dense, mesh, placements)
        assert x.shape == (5, 6) and isinstance(x.shape, torch.Size) and x.size() == (5, 6)
        assert x.size(0) == 5 and x.size(-1) == 6 and x.size(dim=1) == 6
        assert x.numel() == x.nelement() == 30 and len(x) == 5
        assert x.dim() == x.ndim == x.ndimension() == 2
        assert x.stride() == (6, 1) and x.stride(0) == 6 and x.stride(dim=1) == 1
        assert x.t().stride() == (1, 6) and x.t().shape == (6, 5)
        assert x.element_size() == 8 and x.nbytes == 240 and x.itemsize == 8
        assert x.dtype is torch.float64 and x.device == torch.device("cpu")
        assert x.layout.local_shape((5, 6)) == tuple(x.to_local().shape)
        assert x.is_floating_point() and not x.is_complex() and x.requires_grad and x.is_leaf
        assert (x * 1).grad_fn is not None and not (x * 1).is_leaf
        assert x.device_mesh is mesh and x.placements == tuple(placements)
        assert isinstance(x, torch.Tensor) and torch.is_tensor(x)
        assert hash(x) == hash(x) and {x: 1}[x] == 1
        assert not x.is_sparse and x.layout is not torch.strided
        assert torch.result_type(x, 1.0) is torch.float64
        assert torch.numel(x) == 30 and torch.is_floating_point(x)
        assert repr(x).startswith("DTensor(") and str(tuple(placements)) in repr(x)
        with pytest.raises(IndexError):
            x.size(2)


def test_errors_name_operator_arguments_shapes_and_layouts():
    x = distribute_tensor(torch.ones(5, 3), _mesh(), [Shard(0)])
    for call, texts in (
            (lambda: x @ torch.ones(4, 2), ("'matmul'", "argument 1: plain tensor (4, 2)")),
            (lambda: torch.cat([x, torch.ones(5, 4)], 0), ("'cat'", "argument 0[1]: plain tensor",
                                                           "argument 1: 0")),
            (lambda: x.sum(dim=5), ("'sum'", "argument dim: 5")),
            (lambda: x.view(4, 4), ("'view'", "argument 1: 4"))):
        with pytest.raises((RuntimeError, IndexError)) as caught:
            call()
        note, = caught.value.__notes__
        for text in (*texts, ": (5, 3) as Layout(x=Shard(dim=0)) on DeviceMesh"):
            assert text in note, note
    with pytest.raises(RuntimeError, match="'set_' would give .*Shard.*x.data"):
        x.set_(torch.ones(5, 3))
    with pytest.raises(RuntimeError, match="'set_' would give"):
        x.set_(torch.ones(5, 3).untyped_storage(), 0, (5, 3))
    assert x.sum().item() == 15.0

"""Optimizers, clipping and accumulation on DTensor parameters, on four ranks."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    CommDebugMode, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh)
from hyper_parallel.core.shard._op_dispatch import dispatcher
from tests.torch.against_dense import Failures, difference, normal, spread

NPROC = 4


class _Net(nn.Module):
    """A matrix, a bias, a scale of one element and a row that nobody splits evenly."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(normal(6, 5).detach())
        self.bias = nn.Parameter(normal(6, seed=1).detach())
        self.second = nn.Parameter(normal(3, 6, seed=2).detach())
        self.scale = nn.Parameter(normal(1, seed=3).detach())
        self.unused = nn.Parameter(normal(2, 2, seed=4).detach())

    def forward(self, x):
        return (F.linear(F.gelu(F.linear(x, self.first, self.bias)), self.second)
                * self.scale).pow(2).mean()


def _plans():
    line = init_device_mesh((4,), ("x",))
    plane = init_device_mesh((2, 2), ("dp", "tp"))
    whole = [Replicate()]
    return {
        "shards": (line, {"first": [Shard(0)], "bias": [Shard(0)], "second": [Shard(1)],
                          "scale": [Shard(0)], "unused": [Shard(1)]}),
        "mixed": (line, {"first": [Shard(1)], "bias": whole, "second": [Shard(0)],
                         "scale": whole, "unused": whole}),
        "some plain": (line, {"first": [Shard(0)], "second": whole}),
        "plane": (plane, {"first": [Shard(0), Shard(1)], "bias": [Replicate(), Shard(0)],
                          "second": [Shard(0), Shard(0)], "scale": whole * 2,
                          "unused": [Replicate(), Shard(0)]}),
    }


def _spread_net(mesh, plan):
    net = _Net()
    for name, placements in plan.items():
        dense = getattr(net, name)
        setattr(net, name, nn.Parameter(distribute_tensor(dense.data, mesh, placements)))
    return net


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _assert_same(net, dense, what):
    texts = [difference(_whole(got).detach(), wanted.detach())
             for got, wanted in zip(net.parameters(), dense.parameters())]
    wrong = [f"{name}: {text}" for (name, _), text in zip(dense.named_parameters(), texts) if text]
    assert not wrong, f"{what}: {wrong}"


def _optimizers():
    yield "sgd", torch.optim.SGD, {"lr": 0.1}
    yield "momentum", torch.optim.SGD, {
        "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    yield "adam", torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.01}
    yield "amsgrad", torch.optim.Adam, {"lr": 0.1, "amsgrad": True}
    yield "adamw", torch.optim.AdamW, {"lr": 0.1}
    yield "adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}
    yield "rmsprop", torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5, "centered": True}
    yield "adadelta", torch.optim.Adadelta, {}
    yield "adamax", torch.optim.Adamax, {"lr": 0.1}
    yield "nadam", torch.optim.NAdam, {"lr": 0.1}
    yield "radam", torch.optim.RAdam, {"lr": 0.1}
    yield "asgd", torch.optim.ASGD, {"lr": 0.1}
    yield "rprop", torch.optim.Rprop, {"lr": 0.1}


_FORMS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def _train(make, mesh, plan, what):
    """Some steps with spread and with dense parameters; the parameters stay the same."""
    net, dense = _spread_net(mesh, plan), _Net()
    pairs = [(model, make(model.parameters())) for model in (net, dense)]
    for step in range(4):
        x = normal(8, 5, seed=10 + step).detach()
        for model, optimizer in pairs:
            optimizer.zero_grad(set_to_none=step != 2)
            model(x).backward()
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
        _assert_same(net, dense, f"{what}, step {step}")
    for name, placements in plan.items():
        parameter = getattr(net, name)
        assert type(parameter) is DTensor and list(parameter.placements) == placements
        for value in pairs[0][1].state[parameter].values():
            if isinstance(value, torch.Tensor) and value.ndim:
                assert type(value) is DTensor and list(value.placements) == placements


def test_every_optimizer_steps_like_the_dense_one():
    failures = Failures()
    plans = _plans()
    for index, (name, kind, options) in enumerate(_optimizers()):
        for form, choice in _FORMS.items():
            if form == "fused" and (kind not in _FUSED or "lr_decay" in options):
                continue
            # Two of the plans each, so that all optimizers together meet all plans.
            for title in (list(plans) * 2)[index % 4:][:2]:
                if form == "fused" and title == "some plain":
                    continue
                make = partial(kind, **{**options, **choice})
                failures.run(partial(_train, make, *plans[title], f"{name} {form} {title}"),
                             f"{name} {form}", title)
    failures.report()


def test_an_update_is_not_dispatched_but_a_trace_shows_it():
    mesh, plan = _plans()["plane"]
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})):
        nets = [_spread_net(mesh, plan) for _ in range(2)]
        optimizers = [kind(net.parameters(), lr=0.1, foreach=False, **options) for net in nets]
        calls = []
        for step in range(3):
            for net, optimizer in zip(nets, optimizers):
                optimizer.zero_grad()
                net(normal(8, 5, seed=step).detach()).backward()
            if step:  # the first step makes the state
                before = dispatcher.cache_info()
                optimizers[0].step()
                assert dispatcher.cache_info() == before
            else:
                optimizers[0].step()
            with CommDebugMode() as mode:
                optimizers[1].step()
            calls.append(mode.generate_comm_debug_tracing_table(1).count("Op("))
        assert min(calls) > 0
        for one, other in zip(*(net.parameters() for net in nets)):
            assert torch.equal(_whole(one), _whole(other))


def test_an_update_of_what_lies_otherwise_is_dispatched():
    mesh = init_device_mesh((4,), ("x",))
    whole = normal(6, 5).detach()
    parameter = nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
    dense = nn.Parameter(whole.clone())
    other = distribute_tensor(normal(6, 5, seed=1).detach(), mesh, [Shard(1)])
    for momentum, source in ((parameter, other), (dense, other.full_tensor())):
        optimizer = torch.optim.SGD([momentum], lr=0.1, momentum=0.9)
        optimizer.state[momentum]["momentum_buffer"] = source.clone()
        momentum.grad = torch.ones_like(momentum)
        optimizer.step()
    assert not difference(parameter.full_tensor().detach(), dense.detach())


def test_adagrad_and_others_fused_beside_plain_parameters():
    mesh, plan = _plans()["some plain"]
    for kind in _FUSED:
        _train(partial(kind, lr=0.1, fused=True), mesh, plan, f"{kind.__name__} fused")


def test_lbfgs():
    mesh, plan = _plans()["mixed"]
    net, dense = _spread_net(mesh, plan), _Net()
    x = normal(8, 5, seed=10).detach()
    for model in (net, dense):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    _assert_same(net, dense, "lbfgs")


def test_clipping():
    for title, (mesh, plan) in _plans().items():
        for norm_type in (1, 1.0, 2, 2.0, 3.0, float("inf"), 0.5):
            for foreach in (None, False, True):
                net, dense = _spread_net(mesh, plan), _Net()
                x = normal(8, 5, seed=10).detach()
                norms = []
                for model in (net, dense):
                    model(x).backward()
                    norms.append(nn.utils.clip_grad_norm_(
                        model.parameters(), 0.01, norm_type=norm_type, foreach=foreach))
                note = f"{title} {norm_type} {foreach}"
                assert abs(float(norms[0]) - float(norms[1])) <= 1e-10 * float(norms[1]), note
                for (name, got), wanted in zip(net.named_parameters(), dense.parameters()):
                    if wanted.grad is not None:
                        assert torch.allclose(_whole(got.grad), wanted.grad, rtol=1e-10), \
                            f"{note} {name}"
        for foreach in (False, True):
            net, dense = _spread_net(mesh, plan), _Net()
            for model in (net, dense):
                model(x).backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.003, foreach=foreach)
            for got, wanted in zip(net.parameters(), dense.parameters()):
                assert wanted.grad is None or torch.allclose(_whole(got.grad), wanted.grad)
        total = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        wanted = nn.utils.get_total_norm([p.grad for p in dense.parameters()
                                          if p.grad is not None])
        assert abs(float(total) - float(wanted)) < 1e-12


def test_gradients_accumulate():
    for title, (mesh, plan) in _plans().items():
        net, dense = _spread_net(mesh, plan), _Net()
        for step in range(3):
            x = normal(8, 5, seed=step).detach()
            for model in (net, dense):
                (model(x) / 3).backward()
        for got, wanted in zip(net.parameters(), dense.parameters()):
            assert wanted.grad is None or torch.allclose(_whole(got.grad), wanted.grad), title
        net.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        net(x).backward()
        net.zero_grad(set_to_none=False)
        assert all(p.grad is None or not _whole(p.grad).any() for p in net.parameters())


def test_gradients_are_set_and_taken_away():
    mesh = init_device_mesh((4,), ("x",))
    for placements in ([Shard(0)], [Replicate()]):
        dense = normal(6, 5)
        x = spread(dense, mesh, placements)
        assert x.grad is None
        x.grad = spread(torch.ones(6, 5).double(), mesh, [Shard(1)])
        assert x.grad.placements == tuple(placements)
        assert torch.equal(x.grad.full_tensor(), torch.ones(6, 5).double())
        x.grad = torch.full((6, 5), 2.0).double()  # a plain one is replicated
        assert torch.equal(x.grad.full_tensor(), torch.full((6, 5), 2.0).double())
        first = x.grad
        assert x.grad is first
        first.zero_()
        (x * 3).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full((6, 5), 3.0).double())
        x.grad.add_(1.0)
        assert torch.equal(x.grad.full_tensor(), torch.full((6, 5), 4.0).double())
        with pytest.raises(ValueError, match="shape"):
            x.grad = torch.zeros(5, 6).double()
        del x.grad
        assert x.grad is None


def test_a_plain_parameter_beside_shards_trains_like_the_dense_one():
    mesh = init_device_mesh((4,), ("x",))
    dense, weight = normal(8, 6), normal(6, seed=1)
    x = spread(dense, mesh, [Shard(0)])
    plain = weight.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([plain], lr=0.1)
    other = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(3):
        for parameter, tensor, each in ((plain, x, optimizer), (weight, dense, other)):
            each.zero_grad()
            F.layer_norm(tensor, (6,), parameter).pow(3).mean().backward()
            each.step()
    assert type(plain) is torch.Tensor and type(plain.grad) is torch.Tensor
    assert torch.allclose(plain, weight)

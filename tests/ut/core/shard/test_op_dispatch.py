"""The dispatcher in one process: its cache, what a plan depends on, and its errors."""
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import (
    DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh,
    register_rule)
from hyper_parallel.core.shard import _op_dispatch, _planner
from hyper_parallel.core.shard._op_dispatch import OpDispatcher, dispatcher
from hyper_parallel.core.shard._rule import rule_from_notation
from tests.torch.shard.tables import TABLES


@pytest.fixture(name="x")
def _x():
    """A matrix on a mesh of this process alone."""
    return distribute_tensor(torch.arange(12.0).reshape(3, 4), init_device_mesh((1,), ("x",)),
                             [Shard(0)])


@pytest.fixture(name="own")
def _own(monkeypatch):
    """A dispatcher of the test's own, so that it counts from zero."""
    own = OpDispatcher()
    monkeypatch.setattr(DTensor, "_dispatch", staticmethod(own.dispatch))
    return own


def _info(own):
    info = own.cache_info()
    return info["plans"], info["hits"], info["misses"]


def test_the_cache_counts(own, x):
    assert _info(own) == (0, 0, 0)
    for _ in range(3):
        x.exp()
    assert _info(own) == (1, 2, 1)
    for _ in range(2):
        torch.add(x, x)
    assert _info(own) == (2, 3, 2)
    x.t().exp()
    assert _info(own) == (4, 3, 4)
    own.clear_cache()
    assert _info(own) == (0, 0, 0)


def test_metadata_is_not_dispatched(own, x):
    for read in (x.size, x.numel, x.dim, x.stride, x.detach, x.is_floating_point, x.data_ptr):
        read()
    for name in ("shape", "dtype", "device", "is_leaf", "requires_grad", "grad", "data", "ndim"):
        getattr(x, name)
    assert len(x) == 3
    assert _info(own) == (0, 0, 0)


def test_the_cache_is_bounded(own, x, monkeypatch):
    monkeypatch.setattr(_op_dispatch, "_MOST_PLANS", 50)
    for number in range(10_000):
        assert (x.narrow(1, 0, 1 + number % 3) if number % 2 else x.clamp(max=float(number))
                ).shape[0] == 3
        x.softmax(number % 2)
    for number in range(200):
        x.new_zeros(number)
    assert own.cache_info()["plans"] <= 50 * len(own._operators)
    # Numbers that do not matter to a rule do not fill the cache.
    before = own.cache_info()["misses"]
    for number in range(10_000):
        torch.mul(x, float(number))
        torch.add(x, number)
        x.detach().mul_(float(number))
    assert own.cache_info()["misses"] <= before + 4
    # The oldest goes first: the newest is still there.
    before = own.cache_info()["misses"]
    x.new_zeros(199)
    assert own.cache_info()["misses"] == before


def test_ten_thousand_different_shapes(own):
    mesh = init_device_mesh((1,), ("x",))
    tensor = torch.empty(10_000, 1)
    for rows in range(10_000):
        DTensor.from_local(tensor[:rows], mesh, [Shard(0)]).exp()
    assert own.cache_info() == {"plans": _op_dispatch._MOST_PLANS, "hits": 0, "misses": 10_000}


def test_arguments_are_told_apart(x):
    """Each pair has keys that a careless cache would mix up."""
    dense = x.full_tensor()
    pairs = [
        [lambda t: t.sum(1, False), lambda t: t.sum(1, True)],
        [lambda t: t.sum(dim=1), lambda t: t.sum(0, keepdim=True)],
        [lambda t: t.sum(dim=1), lambda t: t.sum(1, keepdim=True)],
        [lambda t: torch.clamp(t, None, 3), lambda t: torch.clamp(t, 3, None)],
        [lambda t: torch.clamp(t, min=3), lambda t: torch.clamp(t, max=3)],
        [lambda t: t.clamp(2), lambda t: t.clamp(2.5)],
        [lambda t: t.to(torch.float64), lambda t: t.to(torch.float32)],
        [lambda t: t + 1, lambda t: t + 1.5, lambda t: t.long() + 1, lambda t: t.long() + 1.5],
        [lambda t: t.long() // 2, lambda t: t.long() / 2, lambda t: t.long() * True],
        [lambda t: t.view(4, 3), lambda t: t.view(-1), lambda t: t.view(2, 6)],
        [lambda t: t[1], lambda t: t[1:], lambda t: t[:1], lambda t: t[True], lambda t: t[None]],
        [lambda t: t[:, 1], lambda t: t[1, :], lambda t: t[1, 1], lambda t: t[[1, 1]]],
        [lambda t: t[(1, 2)], lambda t: t[[1, 2]]],
        [lambda t: t.transpose(0, 1), lambda t: t.transpose(1, 1)],
        [lambda t: torch.stack([t, t]), lambda t: torch.cat([t, t]),
         lambda t: torch.cat([t, t], 1)],
        [lambda t: t.split(2, 1)[0], lambda t: t.split([1, 3], 1)[0], lambda t: t.split(2)[0]],
        [lambda t: F.softmax(t, 0), lambda t: F.softmax(t, 1)],
        [lambda t: t.var(0), lambda t: t.var(0, False), lambda t: t.var(False)],
        [lambda t: t.norm(2), lambda t: t.norm(1), lambda t: t.norm(float("inf"))],
        [lambda t: torch.where(t > 3, t, 0.0), lambda t: torch.where(t > 3, 0.0, t)],
        [lambda t: t.type(torch.float64), lambda t: t.type(torch.int32)],
        [lambda t: F.dropout(t, 0.0, True), lambda t: F.dropout(t, 1.0, True),
         lambda t: F.dropout(t, 1.0, False)],
    ]
    for group in pairs:
        for function in [*group, *reversed(group)]:
            wanted, got = function(dense), function(x)
            assert type(got) is DTensor and got.dtype == wanted.dtype
            assert torch.equal(got.full_tensor(), wanted)


def test_dtypes_are_told_apart_where_they_matter(x):
    index = distribute_tensor(torch.tensor([1, 0, 1]), x.device_mesh, [Replicate()])
    mask = distribute_tensor(torch.tensor([True, False, True]), x.device_mesh, [Replicate()])
    dense = x.full_tensor()
    for _ in range(2):
        assert torch.equal(x[index].full_tensor(), dense[[1, 0, 1]])
        assert torch.equal(x[mask].full_tensor(), dense[[0, 2]])
        assert torch.equal(x[index.bool()].full_tensor(), dense[[0, 2]])


def test_a_string_argument_is_not_a_keyword(x):
    class Scale(torch.autograd.Function):
        """Its arguments may read like a keyword and its value."""

        @staticmethod
        def forward(ctx, x, *rest):
            return x * len(rest)

    keys = []

    def maker(call):
        keys.append((call.args[1:], dict(call.kwargs)))
        return rule_from_notation("... -> ...", call.shapes)

    register_rule(Scale.apply, maker)
    try:
        assert Scale.apply(x, "dim", 1).full_tensor().max() == 22
        with pytest.raises(TypeError):
            Scale.apply(x, dim=1)
        assert keys == [(("dim", 1), {}), ((), {"dim": 1})]
    finally:
        register_rule(Scale.apply, None)


def test_an_argument_that_cannot_be_compared_is_planned_each_time(own, x):
    class Plus(torch.autograd.Function):
        """Takes a dict."""

        @staticmethod
        def forward(ctx, x, options):
            return x + options["by"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (1.0, 2.0):
            assert torch.equal(Plus.apply(x, {"by": number}).full_tensor(),
                               x.full_tensor() + number)
    assert _info(own)[0] == 0


def test_the_cache_does_not_keep_what_functions_hold(x):
    class Call(torch.autograd.Function):
        """Calls a function that it is given."""

        @staticmethod
        def forward(ctx, x, function):
            return function(x)

    held = torch.zeros(3, 4)
    watched = weakref.ref(held)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Call.apply(x, lambda value, held=held: value + held)
    del held
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("family", TABLES)
def test_no_plan_keeps_its_operands(family):
    """Whatever was planned when a call was new, the tensors of that call are forgotten."""
    mesh = init_device_mesh((1,), ("x",))
    kept = []
    dispatcher.clear_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in TABLES[family]:
            tensors = [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in entry.tensors()]
            watched = [weakref.ref(tensor) for tensor in tensors]
            entry.function(*[tensor.clone() if entry.in_place else tensor for tensor in tensors])
            del tensors
            if any(ref() is not None for ref in watched):
                kept.append(entry.name)
    assert not kept


def test_a_new_rule_is_seen_at_once(x):
    class Double(torch.autograd.Function):
        """Has a rule from time to time."""

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    with pytest.warns(UserWarning, match="'Double' has no sharding rule"):
        assert Double.apply(x).placements == (Replicate(),)
    register_rule(Double.apply, "... -> ...")
    assert Double.apply(x).placements == (Shard(0),)
    register_rule("Double", lambda call: None)
    assert Double.apply(x).placements == (Replicate(),)
    register_rule(Double.apply, None)
    assert Double.apply(x).placements == (Replicate(),)


def _times(factor: int, name: str) -> type:
    return type(name, (torch.autograd.Function,), {
        "forward": staticmethod(lambda ctx, x: x * factor),
        "backward": staticmethod(lambda ctx, grad: grad * factor)})


def test_functions_of_one_name_do_not_share_a_rule(x, monkeypatch):
    """Nor does a Function have the rule of the operator whose name it has by chance."""
    monkeypatch.setattr(_planner, "_warned", set())
    one, other, fake = _times(2, "Scale"), _times(3, "Scale"), _times(4, "relu_")
    register_rule(one.apply, "... -> ...")
    try:
        assert one.apply(x).placements == (Shard(0),)
        for function, factor in ((other, 3), (fake, 4)):
            with pytest.warns(UserWarning, match="has no sharding rule"):
                result = function.apply(x)
            assert result.placements == (Replicate(),)
            assert torch.equal(result.full_tensor(), factor * x.full_tensor())
        assert torch.relu(x).placements == (Shard(0),)
    finally:
        register_rule(one.apply, None)


def test_an_operator_without_a_rule_warns_once(x, monkeypatch):
    monkeypatch.setattr(_planner, "_warned", set())
    dispatcher.clear_cache()
    with pytest.warns(UserWarning, match=r"'cov' has no sharding rule.*"
                                         "register_rule") as record:
        for _ in range(3):
            result = torch.cov(x)
        torch.cov(x.t())
    assert len(record) == 1
    assert result.placements == (Replicate(),)
    assert torch.equal(result.full_tensor(), torch.cov(x.full_tensor()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reading values is no surprise
        assert x.sum().item() == 66.0 and x.tolist() and torch.equal(x, x)


def test_wrong_rules_are_refused(x):
    class Odd(torch.autograd.Function):
        """Returns one column less."""

        @staticmethod
        def forward(ctx, x):
            return x[:, 1:].clone()

    for rule, error, message in (
            ("... d -> ... d", RuntimeError, r"rule of 'Odd' promised .* \(3, 4\).* gave \(3, 3\)"),
            ("a b c -> a b c", ValueError, "does not fit 'a b c -> a b c'")):
        register_rule(Odd.apply, rule)
        with pytest.raises(error, match=message):
            Odd.apply(x)
        register_rule(Odd.apply, None)
    with pytest.raises(TypeError, match=r"a notation such as '\.\.\. d -> \.\.\. d'"):
        register_rule(Odd.apply, 3)
    with pytest.raises(ValueError, match="operands -> results"):
        register_rule(Odd.apply, "a b")


def test_two_meshes_in_one_operator_are_refused(x):
    other = distribute_tensor(torch.ones(3, 4), init_device_mesh((1,), ("y",)), [Shard(0)])
    for function in (lambda: x + other, lambda: torch.cat([x, other]), lambda: x @ other.t(),
                     lambda: x.add_(other), lambda: torch.where(x > 0, x, other)):
        with pytest.raises(ValueError, match=r"must be on one mesh.*full_tensor\(\)"):
            function()


def test_shapes_that_do_not_fit_raise_as_the_operator_does(x):
    for function in (lambda t: t + torch.ones(2, 4), lambda t: t @ t, lambda t: t.view(5, 5),
                     lambda t: t.expand(2, 4), lambda t: torch.cat([t, t.t()]),
                     lambda t: F.linear(t, torch.ones(2, 3))):
        with pytest.raises((RuntimeError, ValueError)):
            function(x.full_tensor())
        with pytest.raises((RuntimeError, ValueError)):
            function(x)
    for function in (lambda t: t.sum(2), lambda t: t.transpose(0, 2), lambda t: t.select(2, 0),
                     lambda t: t.softmax(5), lambda t: t.unsqueeze(4), lambda t: t.squeeze(3)):
        with pytest.raises(IndexError, match=r"2|3|4|5"):
            function(x)
    with pytest.raises(IndexError):
        _ = x[5]
    with pytest.raises(IndexError):
        _ = x[0, 0, 0]
    with pytest.raises(TypeError):
        torch.add(x, "text")
    with pytest.raises(TypeError):
        torch.sum(x, dim="no")
    # A call that failed is planned anew, and right.
    assert x.sum(1).shape == (3,)


def test_observers_see_enter_and_exit(x):
    events = []

    class Observer:
        """Writes down what it is told."""

        def _on_op_dispatch_enter(self, name, call, args, kwargs):
            events.append(("enter", name, call, len(args), sorted(kwargs)))

        def _on_op_dispatch_exit(self, name, result):
            events.append(("exit", name, type(result)))

    token = _op_dispatch._debug_mode_observer.set(Observer())
    try:
        torch.sum(x, dim=1)
        assert x.shape == (3, 4)
        with pytest.raises(IndexError):
            x.sum(7)
    finally:
        _op_dispatch._debug_mode_observer.reset(token)
    x.exp()
    assert events == [
        ("enter", "sum", torch.sum, 1, ["dim"]), ("exit", "sum", DTensor),
        ("enter", "sum", torch.Tensor.sum, 2, []), ("exit", "sum", type(None))]


def test_partial_on_one_rank_is_whole():
    mesh = init_device_mesh((1,), ("x",))
    x = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    assert x.sum().item() == 3.0 and (x * x).full_tensor().tolist() == [1.0] * 3
    assert DeviceMesh([0], ("x",)) == mesh

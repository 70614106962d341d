"""The user's own autograd Functions and operators, and checkpoints, on four ranks."""
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import Partial, Replicate, Shard, init_device_mesh, register_rule
from tests.torch.against_dense import Failures, compare, normal, spread

NPROC = 4
WAYS = ([Replicate()], [Shard(0)], [Shard(1)], [Partial()])


def _mesh():
    return init_device_mesh((4,), ("x",))


def _plane():
    return init_device_mesh((2, 2), ("dp", "tp"))


class _Scale(torch.autograd.Function):
    """x * w of the same last dim, with a gradient written by hand."""

    @staticmethod
    def forward(ctx, x, w, factor=2.0):
        assert type(x) is torch.Tensor and type(w) is torch.Tensor
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        scaled = grad * ctx.factor
        return scaled * w, (scaled * x).flatten(0, -2).sum(0), None


class _SumAndSquare(torch.autograd.Function):
    """Several results, one of another shape, one without a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        order = x.argsort(0)
        ctx.mark_non_differentiable(order)
        return x.sum(1), x * x, order

    @staticmethod
    def backward(ctx, total, square, _):
        x, = ctx.saved_tensors
        return total.unsqueeze(1).expand_as(x) + 2 * x * square


class _DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


class _Cube(torch.autograd.Function):
    """With the newer form of the context."""

    @staticmethod
    def forward(x, scale):
        return x ** 3 * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * 3 * x * x * ctx.scale, None


def _functions():
    dense = [normal(5, 6), normal(6, seed=1)]
    return [
        ("scale", _Scale.apply, dense),
        ("scale by position", lambda x, w: _Scale.apply(x, w, 3.0), dense),
        ("beside a plain tensor", lambda x: _Scale.apply(x, torch.arange(6.0).double()), dense[:1]),
        ("several", _SumAndSquare.apply, dense[:1]),
        ("in place", lambda x: _DoubleInPlace.apply(x * 1.5) + 1, dense[:1]),
        ("cube", lambda x: _Cube.apply(x, 0.5) * 2, dense[:1]),
        ("chain", lambda x, w: _Cube.apply(_Scale.apply(x, w), 1.0).sum(), dense),
    ]


def _compare_all(functions, mesh, ways):
    failures = Failures()
    for name, function, dense in functions:
        for seed, way in enumerate(ways):
            # The second operand has one dim.
            other = [Shard(0) if p == Shard(1) else p for p in ways[(seed * 2 + 1) % len(ways)]]
            placements = [way, other][:len(dense)]
            failures.run(partial(compare, function, dense, mesh, placements, seed), name,
                         str(placements))
    failures.report()


def test_a_function_without_a_rule_sees_whole_plain_tensors():
    with pytest.warns(UserWarning, match="'_Scale' has no sharding rule"):
        _Scale.apply(*(spread(dense, _mesh(), [Shard(0)]) for dense in (normal(5, 6), normal(6))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compare_all(_functions(), _mesh(), WAYS)
        _compare_all(_functions(), _plane(), [
            [Shard(0), Shard(1)], [Partial(), Shard(0)], [Shard(0), Shard(0)]])


def test_a_function_with_a_rule_runs_on_parts():
    register_rule(_Scale.apply, "... d, d -> ... d", terms=((0, 1),))
    register_rule(_SumAndSquare.apply, "a b -> a, a b, a b", whole="a b")
    register_rule("_DoubleInPlace", "... -> ...", terms=((0,),))
    register_rule(_Cube.apply, "... -> ...")
    try:
        _compare_all(_functions(), _mesh(), WAYS)
        _compare_all(_functions(), _plane(), [
            [Shard(0), Shard(1)], [Partial(), Shard(0)], [Shard(0), Shard(0)]])
        x, w = spread(normal(5, 6), _mesh(), [Shard(0)]), spread(normal(6), _mesh(), [Replicate()])
        assert _Scale.apply(x, w).placements == (Shard(0),)
        assert _Cube.apply(x, 2.0).placements == (Shard(0),)
        assert _Scale.apply(spread(normal(5, 6), _mesh(), [Partial()]), w).placements == (
            Partial(),)
    finally:
        for function in (_Scale.apply, _SumAndSquare.apply, "_DoubleInPlace", _Cube.apply):
            register_rule(function, None)


def test_a_custom_operator():
    @torch.library.custom_op("hyper_parallel_tests::halve", mutates_args=())
    def halve(x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        return x / 2 + shift

    halve.register_autograd(lambda ctx, grad: (grad / 2, None))
    operator = torch.ops.hyper_parallel_tests.halve
    register_rule(operator, "... -> ...")
    for way in WAYS:
        compare(lambda x: operator(x, shift=1.0), [normal(5, 3)], _mesh(), [way])
        compare(halve, [normal(5, 3)], _mesh(), [way])
    x = spread(normal(5, 3), _mesh(), [Shard(0)])
    assert operator(x).placements == (Shard(0),) == halve(x, 1.0).placements


def _block(x, w):
    return F.gelu(x @ w).softmax(-1) * x


def _forms(form):
    """Uses of checkpoint in one of its forms, which ``form`` is."""
    return [
        lambda x, w: form(_block, x, w),
        lambda x, w: form(_block, form(_block, x, w), w),
        lambda x, w: form(lambda a, b: form(_block, a, b) * 2, x, w),
        lambda x, w: form(lambda a, b: (a @ b, a.sum(0)), x, w),
        lambda x, w: form(_block, x * 1, w).sum() * 3,
    ]


def test_checkpoint_in_both_forms():
    failures = Failures()
    tensors = [normal(4, 6), normal(6, 6, seed=1)]
    for reentrant in (True, False):
        forms = _forms(partial(checkpoint, use_reentrant=reentrant))
        if not reentrant:  # where a closure may hold a tensor that needs a gradient
            forms.append(lambda x, w: checkpoint(lambda a: checkpoint(
                _block, a, w, use_reentrant=False) * 2, x, use_reentrant=False))
        for index, function in enumerate(forms):
            for seed, way in enumerate(WAYS):
                other = ([Shard(0)], [Replicate()], [Shard(1)])[(seed + index) % 3]
                failures.run(partial(compare, function, tensors, _mesh(), [way, other], seed),
                             f"{index} {reentrant}", f"{way} {other}")
            plane = [[Shard(0), Replicate()], [Replicate(), Shard(1)]]
            failures.run(partial(compare, function, tensors, _plane(), plane),
                         f"{index} {reentrant}", "on two axes")
    failures.report()


def test_checkpoint_beside_hooks_on_saved_tensors():
    def function(x, w):
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(_block, x, w, use_reentrant=False)

    for way in WAYS:
        compare(function, [normal(4, 6), normal(6, 6, seed=1)], _mesh(), [way, [Shard(0)]])


def test_checkpoint_keeps_keyword_arguments_and_early_stop():
    def function(x, *, scale, shift=None):
        return (x * scale).exp() + (0 if shift is None else shift)

    compare(lambda x, s: checkpoint(function, x, scale=2.0, shift=s, use_reentrant=False),
            [normal(5, 3), normal(3)], _mesh(), [[Shard(0)], [Shard(0)]])


def test_checkpoint_draws_the_same_dropout_again():
    mesh = _mesh()
    for reentrant in (True, False):
        for way in ([Shard(0)], [Replicate()]):
            torch.manual_seed(11 + mesh.rank)
            x = spread(torch.ones(40, 10, dtype=torch.float64).requires_grad_(), mesh, way)
            result = checkpoint(lambda a: F.dropout(a, 0.5) * F.dropout(a, 0.25), x,
                                use_reentrant=reentrant, preserve_rng_state=True)
            result.sum().backward()
            # d/dx (m1 x)(m2 x) = 2 m1 m2 x, and the value at x = 1 is m1 m2.
            assert torch.allclose(x.grad.full_tensor(), 2 * result.full_tensor())
            kept = result.full_tensor() != 0
            assert 0.2 < kept.double().mean() < 0.55

"""Rules for a user's own operators: keywords, writes in place, several results; on four ranks."""
import itertools
import warnings

import pytest
import torch

from hyper_parallel import DTensor, Shard, init_device_mesh, register_rule
from tests.torch.against_dense import kinds, normal, spread

NPROC = 4


@torch.library.custom_op("own::scale", mutates_args=())
def scale(x: torch.Tensor, factors: torch.Tensor, power: int = 1) -> torch.Tensor:
    """Rows times powers of factors."""
    return x * factors[:, None] ** power


@torch.library.custom_op("own::accumulate", mutates_args=("total",))
def accumulate(x: torch.Tensor, total: torch.Tensor, times: float = 1.0) -> None:
    """``total += times * x``; the argument that is written to comes second."""
    total.add_(x, alpha=times)


@torch.library.custom_op("own::moments", mutates_args=())
def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row sums and squares."""
    return x.sum(1), x * x


@torch.library.custom_op("own::sum_and_count", mutates_args=("count",))
def sum_and_count(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Row sums; counts the rows' elements in place."""
    count.add_(x.shape[1])
    return x.sum(1)


scale.register_fake(lambda x, factors, power=1: torch.empty_like(x))
moments.register_fake(lambda x: (x.new_empty(x.shape[0]), torch.empty_like(x)))
sum_and_count.register_fake(lambda x, count: x.new_empty(x.shape[0]))
OWN = torch.ops.own
RULES = (("scale", "row col, row -> row col", {}), ("accumulate", "..., ... -> ...", {}),
         ("moments", "row col -> row, row col", {"whole": "col"}),
         ("sum_and_count", "row col, row -> row, row", {"whole": "col"}))


def _meshes():
    return init_device_mesh((4,), ("x",)), init_device_mesh((2, 2), ("a", "b"))


def _dense(*shape):
    return normal(*shape, seed=len(shape)).detach()


def _ways(mesh, ndim):
    """Placements of a matrix and of a tensor of ``ndim`` dims: on two axes every fifth pair."""
    pairs = itertools.product(itertools.product(kinds(2), repeat=mesh.ndim),
                              itertools.product(kinds(ndim), repeat=mesh.ndim))
    return list(pairs)[::5 if mesh.ndim > 1 else 1]


def _check_calls(mesh):
    x, row, total = _dense(5, 3), _dense(5), normal(5, 3, seed=9).detach()
    for first, second in _ways(mesh, 2):
        a, b = spread(x, mesh, first), spread(total, mesh, second)
        assert OWN.accumulate(a, b, 2.0) is None and b.placements == second
        assert OWN.accumulate(total=b, x=a) is None and b.placements == second
        assert torch.allclose(b.full_tensor(), total + 3 * x)
        accumulate(a, b, times=-3.0)
        assert torch.allclose(b.full_tensor(), total)
    for first, second in _ways(mesh, 1):
        a, f = spread(x, mesh, first), spread(row, mesh, second)
        for result in (OWN.scale(a, f, 2), OWN.scale(factors=f, power=2, x=a),
                       OWN.scale(a, power=2, factors=f), OWN.scale.default(a, f, 2)):
            assert torch.allclose(result.full_tensor(), x * row[:, None] ** 2)
        total_rows = OWN.sum_and_count(count=f, x=a)
        assert torch.allclose(total_rows.full_tensor(), x.sum(1))
        assert f.placements == second and torch.allclose(f.full_tensor(), row + 3)
        sums, squares = OWN.moments(a)
        assert torch.allclose(sums.full_tensor(), x.sum(1))
        assert torch.allclose(squares.full_tensor(), x * x)


def test_with_and_without_a_rule():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check_calls(_meshes()[0])
    for name, notation, options in RULES:
        register_rule(getattr(OWN, name), notation, **options)
    try:
        for mesh in _meshes():
            _check_calls(mesh)
        mesh = _meshes()[0]
        a, f = spread(_dense(5, 3), mesh, [Shard(0)]), spread(_dense(5), mesh, [Shard(0)])
        assert OWN.scale(factors=f, x=a).placements == (Shard(0),)
        assert [one.placements for one in OWN.moments(a)] == [(Shard(0),)] * 2
        assert OWN.sum_and_count(a, f).placements == (Shard(0),)
        with pytest.raises(ValueError, match="'own::accumulate' returns 0 results and writes to 1"):
            register_rule(OWN.accumulate, "... d, ... d -> ... d, d")
            OWN.accumulate(a, spread(_dense(5, 3), mesh, [Shard(0)]))
    finally:
        for name, _, _ in RULES:
            register_rule(getattr(OWN, name), None)


def _keep_all(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _saved(ctx, products, _):
    x, w, _, signs = ctx.saved_tensors
    assert not any(isinstance(one, DTensor) for one in (x, w, signs, products))
    return products * w * signs, (products * x * signs).sum(0)


@torch.library.custom_op("own::signed", mutates_args=())
def signed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute products and, without a gradient, their signs."""
    return (x * w).abs(), (x * w).sign().long()


signed.register_autograd(_saved, setup_context=_keep_all)


class _Signed(torch.autograd.Function):
    """The same as a Function."""

    @staticmethod
    def forward(ctx, x, w):
        """Both results are saved."""
        results = (x * w).abs(), (x * w).sign().long()
        ctx.mark_non_differentiable(results[1])
        _keep_all(ctx, (x, w), results)
        return results

    backward = staticmethod(_saved)


def test_what_was_saved_for_the_backward_is_plain():
    """Leaves and results without a gradient, which are saved as the very tensors that they are."""
    mesh = _meshes()[0]
    for rule in (None, "row col, col -> row col, row col"):
        register_rule(OWN.signed, rule)
        register_rule(_Signed.apply, rule)
        for way, other in _ways(mesh, 1):
            for function in (signed, OWN.signed, _Signed.apply):
                dense = normal(5, 3), normal(3, seed=4)
                leaves = spread(dense[0], mesh, way), spread(dense[1], mesh, other)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*has no sharding rule")
                    products, signs = function(*leaves)
                assert isinstance(signs, DTensor)
                products.sin().sum().backward()
                function(*dense)[0].sin().sum().backward()
                for leaf, whole in zip(leaves, dense):
                    assert torch.allclose(leaf.grad.full_tensor(), whole.grad)
    register_rule(OWN.signed, None)
    register_rule(_Signed.apply, None)


class _Both(torch.autograd.Function):
    """Two results."""

    @staticmethod
    def forward(ctx, x, w):
        """Products, and row sums."""
        ctx.save_for_backward(x, w)
        return x * w, x.sum(1)

    @staticmethod
    def backward(ctx, products, sums):
        """The gradients."""
        x, w = ctx.saved_tensors
        return products * w + sums[:, None], (products * x).sum(0)


def _check_function(mesh):
    for way, other in _ways(mesh, 1):
        dense = normal(5, 3), normal(3, seed=4)
        leaves = spread(dense[0], mesh, way), spread(dense[1], mesh, other)
        for x, w in (leaves, dense):
            products, sums = _Both.apply(x, w)
            (products.sin().sum() + sums.cos().sum()).backward()
        for leaf, whole in zip(leaves, dense):
            assert torch.allclose(leaf.grad.full_tensor(), whole.grad)


def test_an_autograd_function_with_two_results():
    with pytest.warns(UserWarning, match="'_Both' has no sharding rule"):
        _check_function(_meshes()[0])
    register_rule(_Both.apply, "row col, col -> row col, row", whole="col")
    for mesh in _meshes():
        _check_function(mesh)
    register_rule(_Both.apply, None)

"""Random operators: equal on ranks that hold the same piece, different elsewhere."""
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tests.torch.against_dense import normal, spread

NPROC = 4


def _line():
    return init_device_mesh((4,), ("x",))


def _plane():
    return init_device_mesh((2, 2), ("dp", "tp"))


def _on_every_rank(tensor):
    """A row for each rank."""
    found = [torch.empty_like(tensor.contiguous()) for _ in range(4)]
    torch.distributed.all_gather(found, tensor.contiguous())
    return found


def _assert_same_generators():
    states = _on_every_rank(torch.get_rng_state())
    assert all(torch.equal(states[0], state) for state in states)


def _ones(mesh, placements, *shape):
    return distribute_tensor(torch.ones(shape or (16, 64), dtype=torch.float64), mesh, placements)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5), "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "rand_like": torch.rand_like, "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 10), "alpha_dropout":
    lambda x: F.alpha_dropout(x, 0.5, training=True), "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(1, 2),
    "exponential_": lambda x: x.clone().exponential_(),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
}


def test_replicas_draw_the_same_whatever_the_seeds():
    for name, draw in DRAWS.items():
        for mesh, placements in ((_line(), [Replicate()]), (_plane(), [Replicate(), Replicate()])):
            torch.manual_seed(100 + mesh.rank)
            result = draw(_ones(mesh, placements))
            found = _on_every_rank(result.to_local())
            assert all(torch.equal(found[0], other) for other in found), name
            assert result.placements == tuple(placements)
            _assert_same_generators()


def test_shards_draw_differently():
    for name, draw in DRAWS.items():
        for placement in (Shard(0), Shard(1)):
            torch.manual_seed(5)
            result = draw(_ones(_line(), [placement]))
            found = _on_every_rank(result.to_local())
            assert result.placements == (placement,), name
            for one in range(4):
                for other in range(one):
                    assert not torch.equal(found[one], found[other]), name
            _assert_same_generators()


def test_a_generator_of_the_users_own():
    """As the default one: ranks agree on it, shards differ, and it goes on alike everywhere."""
    for placement in (Replicate(), Shard(0), Shard(1)):
        own = torch.Generator().manual_seed(4 + _line().rank)
        before = torch.get_rng_state()
        x = _ones(_line(), [placement])
        result = x.clone().normal_(generator=own)
        found = _on_every_rank(result.to_local())
        alike = [torch.equal(found[0], other) for other in found[1:]]
        assert alike == [placement == Replicate()] * 3
        torch.bernoulli(x * 0.5, generator=own)
        states = _on_every_rank(own.get_state())
        assert all(torch.equal(states[0], state) for state in states)
        assert torch.equal(torch.get_rng_state(), before)


def test_what_draws_inside_of_a_kernel_draws_alike():
    """The weights are plain and equal; each operator runs on whole copies."""
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4, 2, dropout=0.5).double()
    x = torch.rand(5, 6, 4, generator=torch.Generator().manual_seed(1)).double() + 0.5
    for draw in (lambda a: lstm(a)[0], lambda a: torch.svd_lowrank(a[0], 2)[1].abs(),
                 lambda a: F.fractional_max_pool2d(a, 2, output_size=3)):
        torch.manual_seed(3 + _line().rank)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*has no sharding rule")
            found = _on_every_rank(draw(distribute_tensor(x, _line(), [Replicate()])).to_local())
        assert all(torch.equal(found[0], other) for other in found)
        _assert_same_generators()


def test_a_checkpoint_with_dropout_where_a_rank_has_nothing():
    """It is recomputed on every rank, since all of them agree on the random state there again."""
    for reentrant in (False, True):
        x = _ones(_line(), [Shard(1)], 8, 6).requires_grad_()
        torch.manual_seed(11)
        y = checkpoint(lambda v: F.dropout(v * 2, 0.5), x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(x.grad.full_tensor(), y.full_tensor().detach())
    before = x.full_tensor()
    assert F.dropout(x.detach(), 0.5).sum().requires_grad is False
    F.dropout(x, 0.5).detach().zero_()
    assert torch.equal(x.full_tensor(), before)


def test_ranks_of_one_piece_draw_alike_on_two_axes():
    for placements, alike in (([Shard(0), Replicate()], [(0, 1), (2, 3)]),
                              ([Replicate(), Shard(0)], [(0, 2), (1, 3)])):
        torch.manual_seed(5 + _plane().rank)
        found = _on_every_rank(F.dropout(_ones(_plane(), placements), 0.5).to_local())
        for one in range(4):
            for other in range(one):
                same = torch.equal(found[one], found[other])
                assert same == ((other, one) in alike), placements


def test_a_seed_gives_the_same_numbers_again():
    for placements in ([Replicate()], [Shard(0)]):
        torch.manual_seed(7)
        x = _ones(_line(), placements)
        first = [F.dropout(x, 0.5).full_tensor() for _ in range(3)]
        torch.manual_seed(7)
        again = [F.dropout(x, 0.5).full_tensor() for _ in range(3)]
        assert all(map(torch.equal, first, again))
        assert not torch.equal(first[0], first[1])
        state = torch.get_rng_state()
        one = F.dropout(x, 0.5).full_tensor()
        torch.set_rng_state(state)
        assert torch.equal(F.dropout(x, 0.5).full_tensor(), one)


def test_a_replica_draws_what_one_process_would():
    torch.manual_seed(7)
    got = F.dropout(_ones(_line(), [Replicate()]), 0.5).full_tensor()
    torch.manual_seed(7)
    assert torch.equal(got, F.dropout(torch.ones(16, 64, dtype=torch.float64), 0.5))


def test_seeds_may_change_on_some_ranks_only_in_value():
    """Rank 0 keeps its seed where the others take new ones: whether to agree is no rank's own."""
    mesh = _line()
    for seed in (7, 7 + mesh.rank, 7, 7 + 2 * mesh.rank):
        torch.manual_seed(seed)
        found = _on_every_rank(F.dropout(_ones(mesh, [Replicate()]), 0.5).to_local())
        assert all(torch.equal(found[0], other) for other in found)


def test_meshes_and_their_parts_take_turns():
    plane = _plane()
    torch.manual_seed(3 + plane.rank)
    for mesh, placements in ((plane["tp"], [Replicate()]), (plane, [Replicate()] * 2),
                             (plane["dp"], [Replicate()]), (plane["tp"], [Shard(0)]),
                             (plane, [Shard(0), Replicate()]), (_line(), [Replicate()])):
        local = F.dropout(_ones(mesh, placements), 0.5).to_local()
        if mesh.ndim == 2 or mesh is _line():
            found = _on_every_rank(local)
            assert torch.equal(found[0], found[1])
        else:
            _on_every_rank(local)
    _assert_same_generators()


def test_dropout_scales_and_has_its_gradient():
    for placements in ([Replicate()], [Shard(0)], [Shard(1)], [Partial()]):
        x = spread(torch.ones(40, 50, dtype=torch.float64).requires_grad_(), _line(), placements)
        y = F.dropout(x, 0.25)
        whole = y.full_tensor().detach()
        assert torch.minimum(whole.abs(), (whole - 4 / 3).abs()).max() < 1e-9  # 0 or 1 / 0.75
        assert 0.65 < (whole.abs() > 0.5).double().mean() < 0.85
        y.sum().backward()
        assert torch.allclose(x.grad.full_tensor(), whole, atol=1e-9)
        assert torch.equal(F.dropout(x, 0.5, training=False).full_tensor(), x.full_tensor())
        assert not F.dropout(x, 1.0).full_tensor().any()
    module = nn.Dropout(0.5)
    x = spread(normal(4, 6), _line(), [Shard(0)])
    assert not torch.equal(module(x).full_tensor(), x.full_tensor())
    assert torch.equal(module.eval()(x).full_tensor(), x.full_tensor())
    with pytest.raises(ValueError, match="probability"):
        F.dropout(x, 1.5)


def test_attention_with_dropout():
    q = spread(normal(4, 4, 6, 8), _line(), [Shard(1)])
    torch.manual_seed(3 + _line().rank)
    result = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert result.placements == (Shard(1),)
    assert not torch.equal(result.full_tensor(),
                           F.scaled_dot_product_attention(q, q, q).full_tensor())
    q = spread(normal(4, 4, 6, 8), _line(), [Replicate()])
    found = _on_every_rank(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).to_local())
    assert all(torch.equal(found[0], other) for other in found)
    _assert_same_generators()


def test_initialisation_in_place():
    for placements in ([Replicate()], [Shard(0)], [Shard(1)]):
        torch.manual_seed(9 + _line().rank)
        w = nn.Parameter(_ones(_line(), placements, 64, 64))
        for init in (nn.init.normal_, nn.init.uniform_, nn.init.xavier_uniform_,
                     nn.init.kaiming_normal_, nn.init.trunc_normal_):
            assert init(w) is w
            whole = w.full_tensor().detach()
            assert whole.unique().numel() > 4000
            assert all(torch.equal(whole, other) for other in _on_every_rank(whole))
        nn.init.constant_(w, 3.0)
        assert (w.full_tensor() == 3.0).all()
        nn.init.zeros_(w)
        assert not w.full_tensor().any()

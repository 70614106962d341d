"""Placements: their spelling, equality, questions and errors."""
import copy
import pickle

import pytest

from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.core.placement_types import REDUCE_OPS, Placement


def test_their_repr_is_pytorchs():
    assert repr(Shard(1)) == "Shard(dim=1)" and repr(Shard(dim=-2)) == "Shard(dim=-2)"
    assert repr(Replicate()) == "Replicate()"
    assert repr(Partial()) == "Partial(sum)" and repr(Partial("max")) == "Partial(max)"


def test_they_are_values():
    assert Shard(1) == Shard(1) != Shard(0) and Replicate() == Replicate()
    assert Partial() == Partial("sum") != Partial("avg")
    assert len({Shard(0), Shard(0), Shard(1), Replicate(), Replicate(), Partial()}) == 4
    assert Shard(0) != 0 and Replicate() != "Replicate()" and Partial() != Replicate()
    for placement in (Shard(2), Replicate(), Partial("min")):
        assert isinstance(placement, Placement)
        assert copy.deepcopy(placement) == placement
        assert pickle.loads(pickle.dumps(placement)) == placement


def test_they_are_frozen():
    for placement, field, value in ((Shard(0), "dim", 1), (Partial(), "reduce_op", "max")):
        with pytest.raises(AttributeError):
            setattr(placement, field, value)


def test_they_answer_what_they_are():
    shard, replicate, partial = Shard(1), Replicate(), Partial("avg")
    assert shard.is_shard() and shard.is_shard(1) and not shard.is_shard(0)
    assert not shard.is_replicate() and not shard.is_partial()
    assert replicate.is_replicate() and not replicate.is_shard() and not replicate.is_partial()
    assert partial.is_partial() and partial.is_partial("avg") and not partial.is_partial("sum")
    assert not partial.is_shard() and not partial.is_replicate()


@pytest.mark.parametrize("dim", ["0", 1.0, None, True, (0,)])
def test_a_dim_is_an_int(dim):
    with pytest.raises(TypeError, match=r"tensor dim as an int, but got .*Shard\(0\)"):
        Shard(dim)


def test_a_reduce_op_is_one_of_five():
    assert {Partial(op).reduce_op for op in REDUCE_OPS} == {"sum", "avg", "max", "min", "product"}
    with pytest.raises(ValueError, match="sum, avg, max, min, product, but got 'mean'"):
        Partial("mean")
    for op in (None, 3, sum):
        with pytest.raises(TypeError, match="name of a reduce op"):
            Partial(op)

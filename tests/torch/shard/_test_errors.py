"""Errors speak of whole tensors, come on every rank alike, and leave everything as it was."""
import pytest
import torch
import torch.nn.functional as F
from torch import distributed

from hyper_parallel import (
    DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, register_rule)
from tests.torch.against_dense import normal, spread

NPROC = 2
WHOLE, ROWS, COLUMNS = [Replicate()], [Shard(0)], [Shard(1)]


def _line():
    return init_device_mesh((2,), ("x",))


def _of(placements, *shape):
    return spread(normal(*shape).detach(), _line(), placements)


def _indices(*values):
    return distribute_tensor(torch.tensor(values), _line(), ROWS)


@torch.library.custom_op("wrong::add", mutates_args=())
def _own(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _ruled(rule, **options):
    """A call of the user's operator with a rule."""
    register_rule(torch.ops.wrong.add, rule, **options)
    try:
        return torch.ops.wrong.add(_of(ROWS, 4, 5), _of(ROWS, 3, 5))
    finally:
        register_rule(torch.ops.wrong.add, None)


# The parts of these fit together on some ranks and not on others.
SIZES = {
    "add": (lambda: _of(ROWS, 6) + _of(ROWS, 5), "6.*5|5.*6"),
    "add one": (lambda: _of(ROWS, 4) + _of(ROWS, 3), "4.*3|3.*4"),
    "where": (lambda: torch.where(_of(ROWS, 4) > 0, _of(ROWS, 3), _of(ROWS, 4)), "4.*3|3.*4"),
    "matmul": (lambda: _of(COLUMNS, 6, 7) @ _of(ROWS, 8, 4), r"6, 7\].*8, 4\]"),
    "linear": (lambda: F.linear(_of(COLUMNS, 6, 7), _of(COLUMNS, 4, 8)), r"6, 7\].*8, 4\]"),
    "bmm": (lambda: torch.bmm(_of(ROWS, 2, 3, 4), _of(ROWS, 3, 4, 5)), r"\[2, 4\].*\[3, 4"),
    "stack": (lambda: torch.stack([_of(ROWS, 4, 5), _of(ROWS, 3, 5)]), "4, 5.* at entry 0"),
    "expand": (lambda: _of(ROWS, 6, 8).expand(5, 8), r"\(5\).*\(6\)"),
    "mse_loss": (lambda: F.mse_loss(_of(ROWS, 6), _of(ROWS, 5)), "6.*5|5.*6"),
    "cross_entropy": (lambda: F.cross_entropy(_of(ROWS, 6, 5), _indices(*[0] * 7)),
                      r"\(6\).*\(7\)"),
    "foreach": (lambda: torch._foreach_add([_of(ROWS, 6)], [_of(ROWS, 5)]), "5.*6"),
    "copy_": (lambda: _of(ROWS, 6).copy_(_of(ROWS, 5)), "6.*5|5.*6"),
    "masked_fill": (lambda: _of(ROWS, 4).masked_fill(_of(ROWS, 3) > 0, 1.0), "4.*3|3.*4"),
}
# The framework would speak of this rank's parts.
PARTS = {
    "split": (lambda: _of(ROWS, 8, 4).split([2, 2]), r"exactly to 8"),
    "layer_norm": (lambda: F.layer_norm(_of(ROWS, 8, 4), (7,)), r"\[8, 4\]"),
    "view": (lambda: _of(ROWS, 8, 6).view(5, -1), r"'\[5, -1\]' is invalid for input of size 48"),
    "attention": (lambda: F.scaled_dot_product_attention(
        _of(ROWS, 4, 2, 4, 8), _of(ROWS, 4, 2, 4, 6), _of(ROWS, 4, 2, 4, 6)), r"\[8, 8\].*\[8, 6"),
    "gather": (lambda: _of(ROWS, 8, 4).gather(0, torch.full((2, 4), 9)), "size 8.*9 to 9"),
    "embedding": (lambda: F.embedding(torch.tensor([99]), _of(ROWS, 8, 4)), "size 8.*99 to 99"),
    "einsum": (lambda: torch.einsum("ij,jk->iq", _of(ROWS, 4, 5), _of(ROWS, 5, 7)), "subscript q"),
    "widening": (lambda: _of(ROWS, 8).add_(_of(ROWS, 4, 8)), r"\[8\].*\(4, 8\)"),
    "out": (lambda: torch.add(_of(ROWS, 8, 4), 1, out=_of(ROWS, 3)), r"\(3,\).*\(8, 4\)"),
    "backward": (lambda: _of(ROWS, 8, 4).requires_grad_().sin().backward(torch.ones(3)),
                 r"\(8, 4\).*\(3,\)"),
    "dim": (lambda: _of(ROWS, 8, 4).sum(5), "dim 5 is out of range"),
    "mesh first": (lambda: _of(ROWS, 8).redistribute(WHOLE), "redistribute.placements="),
}
RULES = {
    "sizes": (lambda: _ruled("a b, a b -> a b"), ValueError, "dim 0 of argument 0 .* size 4"),
    "results": (lambda: _ruled("a b, c b -> a b, b"), ValueError, "returns 1 results"),
    "unknown factor": (lambda: _ruled("a b, c b -> a q"), ValueError, "the size of q"),
    "characters": (lambda: _ruled("a b, c b -> a+b"), ValueError, r"'\+'"),
    "no arrow": (lambda: _ruled("a b"), ValueError, "reads 'operands -> results'"),
    "option": (lambda: _ruled("a b, c b -> a b", hole=1), TypeError, "no option 'hole'"),
    "whole": (lambda: _ruled("a b, c b -> a b", whole="z"), ValueError, "factor 'z'"),
    "reduced": (lambda: _ruled("a b, c b -> a b", reduced={"z": "sum"}), ValueError, "factor 'z'"),
    "no rule": (lambda: _ruled(lambda call: "a"), TypeError, "returned 'a'"),
}


def _everybody(name, failed):
    """Whether all ranks raise, since one that goes on would wait for the others."""
    found = [None] * NPROC
    distributed.all_gather_object(found, failed)
    assert all(found), f"{name}: ranks with an error: {found}"


def _check(name, call, kind, words):
    error = None
    try:
        call()
    except Exception as caught:
        error = caught
    _everybody(name, error is not None)
    with pytest.raises(kind, match=words):
        raise error
    return error


def test_sizes_that_differ_are_refused_on_every_rank():
    for name, (call, words) in SIZES.items():
        error = _check(name, call, (RuntimeError, ValueError), words)
        note = getattr(error, "__notes__")[0]
        assert "In the operator " in note and "Layout(x=Shard(dim=0))" in note or \
            "Layout(x=Shard(dim=1))" in note, note


def test_words_about_parts_become_words_about_the_whole():
    for name, (call, words) in PARTS.items():
        _check(name, call, (IndexError, RuntimeError, TypeError, ValueError), words)


def test_rules_that_do_not_fit():
    for name, (call, kind, words) in RULES.items():
        _check(name, call, kind, words)


def _writes(x, other, outs):
    """Writes that must not begin."""
    return (lambda: x.add_(_of(ROWS, 8, 5)), lambda: x.unsqueeze_(3),
            lambda: x.copy_(torch.ones(7)), lambda: x.__setitem__(9, 1.0),
            lambda: x.__setitem__(0, torch.ones(3)), lambda: x.masked_fill_(other, 1.0),
            lambda: torch.max(x, 0, out=outs))


def test_an_error_leaves_everything_as_it_was():
    for placements in (WHOLE, ROWS, COLUMNS, [Partial()]):
        x, other = _of(placements, 8, 6), _of(ROWS, 6)
        outs = _of(WHOLE, 6), _of(WHOLE, 5).long()
        before = [tensor.full_tensor() for tensor in (x, other, outs[0])]
        for write in _writes(x, other, outs):
            with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)):
                write()
        after = [tensor.full_tensor() for tensor in (x, other, outs[0])]
        assert all(map(torch.equal, before, after))
        assert x.placements == tuple(placements) and type(x) is DTensor

"""Values of the collectives on four ranks: groups, orders, dims, strides, dtypes, empty tensors."""
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.platform.torch.platform import TorchPlatform as platform
from tests.torch.platform.teams import Team, teams

NPROC = 4

REAL = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
ODD = [torch.uint16, torch.uint32, torch.float8_e4m3fn]  # torch can do little with them itself
EVERY = [torch.bool, *REAL, *COMPLEX, *ODD]


def exact(got: Tensor, wanted: Tensor) -> None:
    """Equal in shape, dtype and every value."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, (got, wanted)
    if got.dtype in ODD:
        got, wanted = got.to(torch.float64), wanted.to(torch.float64)
    assert torch.equal(got, wanted), (got, wanted)


def kept(function: Callable[[Tensor], Tensor], data: Tensor) -> Tensor:
    """The result of ``function``, which must leave ``data`` alone and share no memory with it."""
    before = data.clone()
    result = function(data)
    exact(data, before)
    assert result.untyped_storage().data_ptr() != data.untyped_storage().data_ptr() \
        or not data.numel() or result.numel() == 0
    return result


def several() -> list[Team]:
    """The teams of more than one member."""
    return [team for team in teams() if team.size > 1]


def gather(team: Team, dim: int) -> Callable[[Tensor], Tensor]:
    """The call under test, all but its data."""
    return partial(platform.differentiable_all_gather_concat, group=team.group,
                   concat_size=team.size, concat_dim=dim)


def reduce(team: Team, op: str) -> Callable[[Tensor], Tensor]:
    """Likewise."""
    return partial(platform.differentiable_all_reduce, op=op, group=team.group)


def reduce_scatter(team: Team, axis: int, op: str) -> Callable[[Tensor], Tensor]:
    """Likewise."""
    return partial(platform.differentiable_reduce_scatter, dev_num=team.size, axis=axis, op=op,
                   group=team.group)


# ---- all-gather ----

def test_all_gather_joins_in_the_order_of_the_group() -> None:
    """Along every dim, counted from either end."""
    for team in several():
        pieces = team.data((2, 3, 4))
        for dim in range(-3, 3):
            exact(kept(gather(team, dim), pieces[team.position]), torch.cat(pieces, dim))


def test_all_gather_where_leading_dims_are_one() -> None:
    """The case that needs no copy after the exchange."""
    for team in several():
        pieces = team.data((1, 1, 3, 2))
        for dim in range(4):
            exact(kept(gather(team, dim), pieces[team.position]), torch.cat(pieces, dim))


def test_all_gather_of_strided_and_empty_tensors() -> None:
    """Transposed, expanded, sliced, and without elements."""
    for team in several():
        for make in (Tensor.t, lambda x: x[:, ::2], lambda x: x[:1].expand(3, 4),
                     lambda x: x[:, :0]):
            pieces = [make(piece) for piece in team.data((3, 4))]
            for dim in (0, 1):
                exact(gather(team, dim)(pieces[team.position]), torch.cat(pieces, dim))


def test_all_gather_of_every_dtype() -> None:
    """Bytes arrive as they were sent, also those that the backend does not know."""
    for team in several():
        for dtype in EVERY:
            pieces = team.data((3, 2), dtype)
            wanted = torch.cat([piece.to(torch.complex128) for piece in pieces], 1)
            got = kept(gather(team, 1), pieces[team.position])
            assert got.dtype == dtype and torch.equal(got.to(torch.complex128), wanted)


def test_all_gather_of_a_pending_conjugate() -> None:
    """torch conjugates and negates lazily; what is sent is the value."""
    for team in several():
        pieces = [piece.conj() for piece in team.data((3, 2), torch.complex64)]
        exact(gather(team, 0)(pieces[team.position]), torch.cat(pieces))
        imaginary = [piece.imag for piece in pieces]
        assert imaginary[0].is_neg()
        exact(gather(team, 1)(imaginary[team.position]), torch.cat(imaginary, 1))


# ---- all-reduce ----

def combined(op: str, operands: list[Tensor]) -> Tensor:
    """The dense result, in the dtype of the operands."""
    dtype = operands[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([operand.to(wide) for operand in operands])
    if op == "avg":
        return stacked.mean(dim=0).to(dtype)
    result = {"sum": lambda: stacked.sum(0), "product": lambda: stacked.prod(0),
              "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0)}[op]()
    return result.to(dtype)


def reductions(dtype: torch.dtype) -> list[str]:
    """The operations that exist for a dtype."""
    if dtype.is_complex:
        return ["sum", "avg", "product"]
    return ["sum", "max", "min", "product"] + ["avg"] * dtype.is_floating_point


def test_all_reduce_of_every_dtype() -> None:
    """Each operation that exists; a sum of bools is "or", their product "and"."""
    for team in several():
        for dtype in EVERY:
            operands = team.data((3, 2), dtype)
            for op in reductions(dtype):
                got = kept(reduce(team, op), operands[team.position])
                if op == "avg" and team.size == 3:  # a third is rounded, once here and once there
                    torch.testing.assert_close(
                        got.to(torch.complex128), combined(op, operands).to(torch.complex128),
                        rtol=torch.finfo(dtype).eps, atol=0.0)
                else:
                    exact(got, combined(op, operands))


def test_all_reduce_of_bools_leaves_clean_bools() -> None:
    """A True is the byte 1 on every rank, however many ranks were True."""
    for team in several():
        total = platform.differentiable_all_reduce(torch.tensor([True]), "sum", team.group)
        assert total.view(torch.uint8).item() == 1


def test_all_reduce_wraps_as_torch_does() -> None:
    """Small whole numbers overflow within their own width, though they travel wider."""
    for team in several():
        full = torch.tensor([2 ** 15 - 1], dtype=torch.int16)
        total = platform.differentiable_all_reduce(full, "sum", team.group)
        exact(total, (full.long() * team.size).to(torch.int16))


def test_all_reduce_of_any_shape() -> None:
    """No dims, no elements, strides."""
    for team in several():
        for make in (lambda x: x[0, 0], lambda x: x[:, :0], Tensor.t,
                     lambda x: x[:1].expand(3, 4), lambda x: (x * 1j).conj()):
            operands = [make(operand) for operand in team.data((3, 4))]
            exact(kept(reduce(team, "sum"), operands[team.position]),
                  sum(operands).resolve_conj())


# ---- reduce-scatter ----

def test_reduce_scatter_keeps_the_own_piece() -> None:
    """By every operation and along every dim; pieces are counted in the order of the group."""
    for team in several():
        operands = team.data((12, 12, 24))
        for op in reductions(torch.float64):
            for axis in range(-3, 3):
                wanted = combined(op, operands).chunk(team.size, axis)[team.position]
                exact(kept(reduce_scatter(team, axis, op), operands[team.position]), wanted)


def test_reduce_scatter_of_every_dtype() -> None:
    """As the all-reduce does it."""
    for team in several():
        for dtype in [torch.bool, *REAL, *COMPLEX]:
            operands = team.data((12, 2), dtype)
            for op in reductions(dtype):
                got = reduce_scatter(team, 0, op)(operands[team.position])
                whole = reduce(team, op)(operands[team.position])
                exact(got, whole.chunk(team.size)[team.position])


def test_reduce_scatter_of_strided_and_empty_tensors() -> None:
    """Transposed, sliced, without elements in one dim or the other."""
    for team in several():
        for make in (Tensor.t, lambda x: x[:, ::2], lambda x: x[:, :0], lambda x: x[:0]):
            operands = [make(operand) for operand in team.data((24, 12))]
            got = reduce_scatter(team, 0, "sum")(operands[team.position])
            exact(got, sum(operands).chunk(team.size)[team.position] if operands[0].shape[0]
                  else sum(operands))


def test_what_cannot_be_scattered_evenly() -> None:
    """ValueError on every rank before anything is sent; so with the even exchange."""
    for team in several():
        odd = torch.ones(team.size + 1, 2)
        with pytest.raises(ValueError, match=f"{team.size} ranks do not divide its length"):
            platform.differentiable_reduce_scatter(odd, team.size, 0, "sum", team.group)
        with pytest.raises(ValueError, match=f"{team.size} ranks do not divide"):
            platform.differentiable_all_to_all(odd, odd.shape, team.group)
        with pytest.raises(ValueError, match="input_splits=None splits dim 0 evenly"):
            platform.differentiable_all_to_all_single(odd, None, None, team.group)
        with pytest.raises(ValueError, match=f"one length >= 0 for each of the {team.size}"):
            platform.differentiable_all_to_all_single(odd, [1] * (team.size + 1), None,
                                                      team.group)
        with pytest.raises(ValueError, match="dev_num must be the size of the group"):
            platform.differentiable_reduce_scatter(odd, team.size + 1, 0, "sum", team.group)
    platform.differentiable_all_reduce(torch.ones(1), "sum", None)  # nobody is left behind


# ---- all-to-all ----

def test_all_to_all() -> None:
    """Piece i goes to position i; the result takes any shape of as many elements."""
    for team in several():
        for make in (lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[:, :, :0]):
            sent = [make(tensor) for tensor in team.data((12, 12, 2))]
            wanted = torch.cat([tensor.chunk(team.size)[team.position] for tensor in sent])
            for shape in (wanted.shape, (wanted.numel(),), (wanted.numel(), 1)):
                call = partial(platform.differentiable_all_to_all, output_shape=shape,
                               group=team.group)
                exact(kept(call, sent[team.position]), wanted.reshape(shape))


def splits(team: Team) -> list[list[int]]:
    """How many rows position i sends to position j: uneven, and nothing from some to some."""
    return [[(3 * i + 2 * j) % 4 for j in range(team.size)] for i in range(team.size)]


def test_all_to_all_single_of_uneven_pieces_and_every_dtype() -> None:
    """Also empty ones; and even ones without lengths."""
    for team in several():
        lengths, me = splits(team), team.position
        for dtype in EVERY:
            sent = [tensor[:sum(row)] for tensor, row in zip(team.data((12, 3), dtype), lengths)]
            parts = [tensor.split(row) for tensor, row in zip(sent, lengths)]
            call = partial(platform.differentiable_all_to_all_single, input_splits=lengths[me],
                           output_splits=[row[me] for row in lengths], group=team.group)
            got = kept(call, sent[me])
            wanted = torch.cat([part[me].to(torch.complex128) for part in parts])
            assert got.dtype == dtype and torch.equal(got.to(torch.complex128), wanted)
        even = team.data((12, 2))
        got = platform.differentiable_all_to_all_single(even[me], None, None, team.group)
        exact(got, torch.cat([tensor.chunk(team.size)[me] for tensor in even]))
        even_out = [12 // team.size] * team.size
        exact(platform.differentiable_all_to_all_single(even[me].t().contiguous().t(), even_out,
                                                        None, team.group), got)


def test_the_asynchronous_call_does_not_wait() -> None:
    """It returns before the others have come; the data is there after the wait."""
    store = dist.distributed_c10d._get_default_store()
    for number, team in enumerate(several()):
        key = f"rank {team.ranks[0]} has returned {number}"
        sent, me = team.data((12, 2)), team.position
        if me:
            store.wait([key])
        output, work = platform.differentiable_all_to_all_single_async(sent[me], None, None,
                                                                       team.group)
        if not me:
            store.set(key, "")
        work.wait()
        exact(output, torch.cat([tensor.chunk(team.size)[me] for tensor in sent]))


def test_asynchronous_calls_in_flight_together() -> None:
    """Uneven pieces, a dtype that travels as bytes, a strided input that is gone meanwhile."""
    for team in several():
        lengths, me = splits(team), team.position
        rows = [row[me] for row in lengths]
        calls = []
        for dtype in (torch.int16, torch.bool, torch.float64):
            sent = [tensor.t()[:sum(row)] for tensor, row in zip(team.data((3, 12), dtype),
                                                                 lengths)]
            wanted = torch.cat([tensor.split(row)[me] for tensor, row in zip(sent, lengths)])
            calls.append((wanted, *platform.differentiable_all_to_all_single_async(
                sent[me], lengths[me], rows, team.group)))
            del sent
        for wanted, output, work in calls:
            work.wait()
            exact(output, wanted)


# ---- broadcast and scatter ----

def test_broadcast_in_place() -> None:
    """From every position, into strided tensors, parameters and every dtype."""
    for team in several():
        for source in range(team.size):
            for dtype in EVERY:
                tensors = team.data((3, 2), dtype)
                mine = tensors[team.position].t().contiguous().t()
                assert platform.broadcast(mine, source, team.group) is mine
                exact(mine, tensors[source])
        parameter = torch.nn.Parameter(team.data((2,))[team.position])
        platform.broadcast(parameter, team.size - 1, team.group)
        exact(parameter.detach(), team.data((2,))[-1])
        with pytest.raises(ValueError, match=f"0 to {team.size - 1}, got {team.size}"):
            platform.broadcast(parameter, team.size, team.group)


def test_scatter_in_place() -> None:
    """The source's pieces, strided ones too; what others pass is ignored."""
    for team in several():
        for source in range(team.size):
            for dtype in EVERY:
                pieces = [piece.t() for piece in team.data((3, 2), dtype)]
                output = torch.zeros(3, 2).to(dtype).t()
                passed = pieces if team.position in (source, 0) else None
                assert platform.scatter(output, passed, source, team.group) is output
                exact(output, pieces[team.position])
                exact(pieces[0], team.data((3, 2), dtype)[0].t())


# ---- groups that are not ours ----

def test_the_default_group_and_torchs_own_groups() -> None:
    """None is the world; a group made by torch is taken in its own order."""
    rank = platform.get_rank()
    exact(platform.differentiable_all_gather_concat(torch.tensor([rank]), None, 4, 0),
          torch.tensor([0, 1, 2, 3]))
    sorted_group = dist.new_group([2, 1, 0])  # torch sorts the ranks
    if rank < 3:
        assert platform.get_group_ranks(sorted_group) == (0, 1, 2)
        exact(platform.differentiable_all_gather_concat(torch.tensor([rank]), sorted_group, 3, 0),
              torch.tensor([0, 1, 2]))
    dist.barrier()


def test_no_warnings() -> None:
    """The deprecated names of torch are not used where the new ones exist."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.ones(4)
        platform.differentiable_all_gather_concat(x, None, 4, 0)
        platform.differentiable_reduce_scatter(x, 4, 0, "avg", None)
        platform.differentiable_all_to_all(x, (4,), None)

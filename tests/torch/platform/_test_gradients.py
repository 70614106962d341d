"""First and second derivatives of the collectives on four ranks, exact against one process.

The dense side holds every member's data as leaves of one graph. Its loss counts a value that is
equal on all ranks once, and adds up values that differ: this is what the types of DESIGN.md say.
"""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hyper_parallel.platform.torch.platform import TorchPlatform as platform
from tests.torch.platform.teams import Team, numbers, teams

NPROC = 4

Spread = Callable[[Tensor, Team], Tensor]
Dense = Callable[[list[Tensor]], list[Tensor]]


def derivatives(leaves: list[Tensor], results: list[Tensor], seeds: tuple[int, int],
                equal: tuple[bool, bool]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Gradients of a loss of the results, and gradients of a function of those.

    The loss is a cube, so that the second derivative still depends on the data.

    Args:
        leaves: the data of each rank.
        results: the result of each rank.
        seeds: of the first rank's weights of the results and of the gradients.
        equal: whether all ranks have the same results, and the same gradients; then one of them
            counts, else their sum.
    """
    weights = [numbers(tuple(result.shape), seeds[0] if equal[0] else seeds[0] + i)
               for i, result in enumerate(results)]
    terms = [(weight * result ** 3).sum() for weight, result in zip(weights, results)]
    first = torch.autograd.grad(terms[0] if equal[0] else sum(terms), leaves, create_graph=True)
    weights = [numbers(tuple(leaf.shape), seeds[1] if equal[1] else seeds[1] + i)
               for i, leaf in enumerate(leaves)]
    terms = [(weight * gradient).sum() for weight, gradient in zip(weights, first)]
    return first, torch.autograd.grad(terms[0] if equal[1] else sum(terms), leaves)


def check(team: Team, spread: Spread, dense: Dense, shape: Sequence[int], *,
          equal: tuple[bool, bool], strided: bool = False, rounding: float = 0.0) -> None:
    """Compare value, gradient and gradient of the gradient with the dense computation.

    Args:
        team: the ranks.
        spread: the collective, from this rank's data to its result.
        dense: the same from everybody's data to everybody's results.
        shape: of the data.
        equal: whether all ranks get the same result, and the same gradient.
        strided: whether the data lies in memory column by column.
        rounding: relative difference to allow where a gradient is divided by three.
    """
    leaves = [(data + 1).requires_grad_() for data in team.data(tuple(shape))]
    me = team.position
    results = dense(leaves)
    x = leaves[me].detach().clone().requires_grad_()
    y = spread(x.transpose(0, -1).contiguous().transpose(0, -1) if strided else x, team)
    assert torch.equal(y, results[me])

    wanted = derivatives(leaves, results, (70, 90), equal)
    got = derivatives([x], [y], (70 if equal[0] else 70 + me, 90 if equal[1] else 90 + me), equal)
    for order in (0, 1):
        torch.testing.assert_close(got[order][0], wanted[order][me], rtol=rounding, atol=0.0)
    if equal[1]:
        assert all(torch.equal(got[0][0], gradient_of_other) for gradient_of_other in wanted[0])


def several() -> list[Team]:
    """The teams of more than one member."""
    return [team for team in teams() if team.size > 1]


# ---- one collective after the other ----

def test_all_gather() -> None:
    """The gradient is the own slice, the gradient of that is gathered."""
    for team in several():
        for dim in (0, 1, -1):
            for strided in (False, True):
                check(team, lambda x, t, dim=dim: platform.differentiable_all_gather_concat(
                    x, t.group, t.size, dim),
                    lambda xs, dim=dim: [torch.cat(xs, dim)] * len(xs), (2, 3, 4),
                    equal=(True, False), strided=strided)


def reduced(op: str, xs: list[Tensor]) -> Tensor:
    """The dense combination."""
    stacked = torch.stack(xs)
    return {"sum": lambda: stacked.sum(0), "avg": lambda: stacked.mean(0),
            "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0),
            "product": lambda: stacked.prod(0)}[op]()


def test_all_reduce() -> None:
    """Sum and average hand the whole gradient on; the others to whom it belongs."""
    for team in several():
        for op in ("sum", "max", "min", "product"):
            check(team, lambda x, t, op=op: platform.differentiable_all_reduce(x, op, t.group),
                  lambda xs, op=op: [reduced(op, xs)] * len(xs), (3, 4),
                  equal=(True, op == "sum"), strided=True,
                  rounding=1e-14 if op in ("max", "min") else 0.0)
        if team.size in (2, 4):  # a third is not exact
            check(team, lambda x, t: platform.differentiable_all_reduce(x, "avg", t.group),
                  lambda xs: [reduced("avg", xs)] * len(xs), (3, 4),
                  equal=(True, True))


def test_reduce_scatter() -> None:
    """By every operation, along both ends."""
    for team in several():
        for axis in (0, -1):
            for op in ("sum", "max", "min", "product"):
                check(team, lambda x, t, op=op, axis=axis: platform.differentiable_reduce_scatter(
                    x, t.size, axis, op, t.group),
                    lambda xs, op=op, axis=axis: list(reduced(op, xs).chunk(len(xs), axis)),
                    (12, 2, 12), equal=(False, op == "sum"), strided=True,
                    rounding=1e-14 if op in ("max", "min") else 0.0)
        if team.size in (2, 4):
            check(team, lambda x, t: platform.differentiable_reduce_scatter(
                x, t.size, 0, "avg", t.group),
                lambda xs: list(reduced("avg", xs).chunk(len(xs))), (4, 3),
                equal=(False, True))


def exchanged(xs: list[Tensor]) -> list[Tensor]:
    """Everybody's even pieces, sent."""
    return [torch.cat([x.chunk(len(xs))[i] for x in xs]) for i in range(len(xs))]


def test_all_to_all() -> None:
    """The gradient goes back the way the data came, through a result of another shape too."""
    for team in several():
        check(team, lambda x, t: platform.differentiable_all_to_all(x, x.shape, t.group),
              exchanged, (12, 3), equal=(False, False), strided=True)
        check(team, lambda x, t: platform.differentiable_all_to_all(x, (6, 6), t.group),
              lambda xs: [x.reshape(6, 6) for x in exchanged(xs)], (12, 3),
              equal=(False, False))


def test_all_to_all_single() -> None:
    """Uneven pieces, some of them empty, with the call that waits and the one that does not."""
    for team in several():
        size, me = team.size, team.position
        rows = [[(i + 1) * (j + 1) % 4 for j in range(size)] for i in range(size)]
        longest = max(map(sum, rows))
        sends = [row + [] for row in rows]
        for row in sends:  # everybody holds as many rows: the rest stays at home
            row[sends.index(row)] += longest - sum(row)
        lengths = sends[me], [row[me] for row in sends]

        def asynchronous(x: Tensor, t: Team, lengths=lengths) -> Tensor:
            output, work = platform.differentiable_all_to_all_single_async(x, *lengths, t.group)
            work.wait()
            return output

        def sent(xs: list[Tensor], sends=sends) -> list[Tensor]:
            parts = [x.split(row) for x, row in zip(xs, sends)]
            return [torch.cat([part[i] for part in parts]) for i in range(len(xs))]

        for call in (lambda x, t, lengths=lengths: platform.differentiable_all_to_all_single(
                x, *lengths, t.group), asynchronous):
            check(team, call, sent, (longest, 2), equal=(False, False),
                  strided=True)
        check(team, lambda x, t: platform.differentiable_all_to_all_single(x, None, None, t.group),
              exchanged, (12, 2), equal=(False, False))


# ---- particular values ----

def gradient(x: Tensor, op: str, team: Team) -> list[float]:
    """Gradient of the weighted all-reduce of ``x``."""
    x = x.clone().requires_grad_()
    y = platform.differentiable_all_reduce(x, op, team.group)
    (y * torch.arange(1.0, len(x) + 1)).sum().backward()
    return x.grad.tolist()


def test_ties_of_max_and_min_share_evenly() -> None:
    """All equal: each gets its part; one alone: it gets all."""
    for team in several():
        part = 1 / team.size
        for op, sign in (("max", 1.0), ("min", -1.0)):
            first = sign * (team.position == 0)
            assert gradient(torch.tensor([5.0, first]), op, team) == [
                torch.tensor(part).item(), 2.0 * (team.position == 0)]


def test_products_with_zeros() -> None:
    """One zero: its rank gets the product of the others; two zeros: nobody gets anything."""
    for team in several():
        last = team.size - 1
        x = torch.tensor([0.0 if team.position == 0 else 2.0,
                          0.0 if team.position in (0, last) else 2.0])
        assert gradient(x, "product", team) == [
            2.0 ** last if team.position == 0 else 0.0,
            0.0 if team.size > 2 or team.position not in (0, last) else 0.0]


def test_products_of_complex_numbers() -> None:
    """As the dense product, conjugates included."""
    for team in several():
        leaves = [x.requires_grad_() for x in team.data((3,), torch.complex128)]
        x = leaves[team.position].detach().clone().requires_grad_()
        platform.differentiable_all_reduce(x, "product", team.group).abs().pow(2).sum().backward()
        torch.stack(leaves).prod(0).abs().pow(2).sum().backward()
        torch.testing.assert_close(x.grad, leaves[team.position].grad, rtol=1e-12, atol=1e-9)


def test_a_product_whose_operand_was_changed() -> None:
    """RuntimeError instead of a wrong gradient."""
    for team in several():
        leaf = torch.ones(2, requires_grad=True)
        x = leaf * 1
        y = platform.differentiable_all_reduce(x, "product", team.group)
        x.add_(1)
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert "modified in place before its gradient" in str(error)
        else:
            raise AssertionError("the change went unnoticed")


def test_results_can_be_changed_in_place() -> None:
    """They are fresh tensors: the gradient is that of the value before."""
    for team in several():
        for op in ("sum", "max", "min"):
            x = (team.data((2, 2))[team.position]).requires_grad_()
            y = platform.differentiable_all_reduce(x, op, team.group)
            y.mul_(3)
            y.sum().backward()
            untouched = x.detach().clone().requires_grad_()
            (platform.differentiable_all_reduce(untouched, op, team.group) * 3).sum().backward()
            assert torch.equal(x.grad, untouched.grad)


def test_the_gradient_of_a_gather_owns_its_memory() -> None:
    """It does not keep the gathered gradient, size times as large, alive."""
    for team in several():
        x = torch.ones(4, 2, requires_grad=True)
        platform.differentiable_all_gather_concat(x, team.group, team.size, 0).sum().backward()
        assert x.grad.untyped_storage().nbytes() == x.numel() * x.element_size()


# ---- who is called ----

COLLECTIVES = [name for name in vars(platform) if name.startswith("differentiable_")]


def called(function: Callable[[], object]) -> list[str]:
    """The collectives that run while ``function`` does, found as a tracer finds them."""
    names = []
    originals = {name: vars(platform)[name] for name in COLLECTIVES}

    def watched(name: str) -> staticmethod:
        def wrapper(*args: object, **kwargs: object) -> object:
            names.append(name.removeprefix("differentiable_"))
            return originals[name].__func__(*args, **kwargs)
        return staticmethod(wrapper)

    for name in COLLECTIVES:
        setattr(platform, name, watched(name))
    try:
        function()
    finally:
        for name, original in originals.items():
            setattr(platform, name, original)
    return names


def test_every_collective_goes_through_its_method() -> None:
    """One call in the forward pass, and in the backward pass exactly the table's."""
    group = platform.create_group([3, 1, 2, 0])
    expected = {
        "all_gather_concat": (lambda x: platform.differentiable_all_gather_concat(
            x, group, 4, 0), []),
        "all_to_all": (lambda x: platform.differentiable_all_to_all(x, (16,), group),
                       ["all_to_all"]),
        "all_reduce": (lambda x: platform.differentiable_all_reduce(x, "sum", group), []),
        "reduce_scatter": (lambda x: platform.differentiable_reduce_scatter(
            x, 4, 0, "sum", group), ["all_gather_concat"]),
        "all_to_all_single": (lambda x: platform.differentiable_all_to_all_single(
            x, None, None, group), ["all_to_all_single"]),
        "all_to_all_single_async": (lambda x: waited(
            platform.differentiable_all_to_all_single_async(x, None, None, group)),
            ["all_to_all_single"]),
    }
    assert {f"differentiable_{name}" for name in expected} == set(COLLECTIVES)
    for name, (call, backward) in expected.items():
        x = torch.ones(4, 4, requires_grad=True)
        results: list[Tensor] = []
        assert called(lambda call=call, x=x, results=results: results.append(call(x))) == [name]
        assert called(lambda results=results: results[0].sum().backward()) == backward, name
    for op in ("max", "product"):
        x = torch.ones(4, requires_grad=True)
        assert called(lambda op=op, x=x: platform.differentiable_reduce_scatter(
            x, 4, 0, op, group)) == ["reduce_scatter"]
        y = platform.differentiable_all_reduce(x, op, group)
        assert called(lambda y=y: y.sum().backward()) == [
            {"max": "all_reduce", "product": "all_gather_concat"}[op]]


def waited(started: tuple) -> Tensor:
    """The output of an asynchronous call after its wait."""
    output, work = started
    work.wait()
    return output


def test_nothing_is_recorded_for_plain_data() -> None:
    """Data that needs no gradient gives a result without a graph."""
    x = torch.ones(4)
    for y in (platform.differentiable_all_reduce(x, "max", None),
              platform.differentiable_reduce_scatter(x, 4, 0, "min", None),
              platform.differentiable_all_gather_concat(x, None, 4, 0)):
        assert not y.requires_grad and y.grad_fn is None
    with torch.no_grad():
        x = torch.ones(4, requires_grad=True)
        assert not platform.differentiable_all_reduce(x, "sum", None).requires_grad

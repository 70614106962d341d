"""The solver's choices, from descriptions alone."""
import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard
from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._rule import rule_from_notation
from hyper_parallel.core.shard._solver import solve

R, P = Replicate(), Partial()
S0, S1 = Shard(0), Shard(1)


def _mesh(*shape):
    count = torch.Size(shape).numel()
    return DeviceMesh(torch.arange(count).reshape(shape), ("dp", "cp", "tp")[-len(shape):])


LINE, PLANE = _mesh(4), _mesh(2, 2)


def _specs(mesh, *tensors):
    return [TensorSpec(Layout(mesh, placements, order[0] if order else None), shape)
            for shape, placements, *order in tensors]


def _solve(notation, mesh, *tensors, in_place=False, **options):
    specs = _specs(mesh, *tensors)
    rule = rule_from_notation(notation, [spec.shape for spec in specs], **options)
    return solve(rule, specs, mesh, in_place)


def _placements(solution):
    return [list(layout.placements) for layout in solution.operands], \
        [list(spec.layout.placements) for spec in solution.results]


LINEAR = {"notation": "... i, o i, o -> ... o", "reduced": {"i": "sum"},
          "terms": ((0, 1), (2,))}


def _linear(x, weight, bias=None):
    tensors = [((8, 16), x), ((32, 16), weight)] + ([((32,), bias)] if bias else [])
    options = {**LINEAR, "terms": LINEAR["terms"][:1 + bool(bias)]}
    return _placements(_solve(options.pop("notation"), LINE, *tensors, **options))


def test_linear_in_the_ways_of_tensor_parallelism():
    # Column-wise: the weight's rows are sharded, so are the results.
    assert _linear([R], [S0], [S0]) == ([[R], [S0], [S0]], [[S1]])
    # Row-wise: what is summed over is sharded, the result is a summand; so must the bias be.
    assert _linear([S1], [S1], [P]) == ([[S1], [S1], [P]], [[P]])
    assert _linear([S1], [S1], [R]) == ([[S1], [S1], [P]], [[P]])
    # Data parallel: rows stay, the weight is whole.
    assert _linear([S0], [R], [R]) == ([[S0], [R], [R]], [[S0]])
    # A Partial input passes through a whole weight; the bias is counted once.
    assert _linear([P], [R], [R]) == ([[P], [R], [P]], [[P]])
    assert _linear([R], [R]) == ([[R], [R]], [[R]])


def test_what_nobody_sharded_is_not_sharded():
    for x, weight in itertools.product(([R], [P]), repeat=2):
        operands, results = _linear(x, weight)
        assert not any(p.is_shard() for layout in operands + results for p in layout)


def test_a_summand_becomes_a_shard_only_beside_a_shard():
    # relu does not let a Partial pass, and nobody is sharded: it is made whole.
    assert _placements(_solve("... -> ...", LINE, ((8, 4), [P]))) == ([[R]], [[R]])
    both = _placements(_solve("..., ... -> ...", LINE, ((8, 4), [P]), ((8, 4), [S0])))
    assert both == ([[S0], [S0]], [[S0]])


def test_the_larger_operand_stays_where_it_is():
    solution = _solve("..., ... -> ...", LINE, ((8, 4), [S0]), ((4,), [S0]))
    assert _placements(solution)[1] == [[S0]]
    solution = _solve("... m i, ... i n -> ... m n", LINE, ((4, 8), [S0]), ((8, 512), [S1]),
                      reduced={"i": "sum"}, terms=((0, 1),))
    assert _placements(solution) == ([[R], [S1]], [[S1]])


def test_factors_that_must_be_whole():
    whole = _placements(_solve("... d -> ... d", LINE, ((8, 4), [S1]), whole="d"))
    assert whole == ([[R]], [[R]])
    assert _placements(_solve("... d -> ... d", LINE, ((8, 4), [S0]), whole="d"))[1] == [[S0]]


def test_compound_dims_are_cut_at_their_major_factor():
    options = {"terms": ((0,),), "moves": True}
    split = _solve("b (h d), h -> b h d", LINE, ((2, 24), [S1]), ((8,), [R]), unread=frozenset({1}),
                   **options)
    assert _placements(split)[1] == [[S1]]
    # Six heads do not divide among four ranks: the dim is made whole.
    uneven = _solve("b (h d), h -> b h d", LINE, ((2, 24), [S1]), ((6,), [R]),
                    unread=frozenset({1}), **options)
    assert _placements(uneven)[1] == [[R]]
    merged = _solve("b h d -> b (h d)", LINE, ((2, 8, 3), [Shard(2)]), **options)
    assert _placements(merged) == ([[R]], [[R]])


def test_summands_pass_linear_operators_only():
    assert _placements(_solve("... -> ...", LINE, ((4,), [P]), terms=((0,),)))[1] == [[P]]
    maximum = Partial("max")
    assert _placements(_solve("... -> ...", LINE, ((4,), [maximum]), terms=((0,),)))[1] == [[R]]
    moved = _placements(_solve("a b -> b a", LINE, ((4, 2), [maximum]), terms=((0,),), moves=True))
    assert moved[1] == [[maximum]]
    # A sum of terms: each has to be a summand.
    assert _placements(_solve("..., ... -> ...", LINE, ((4,), [P]), ((4,), [R]),
                              terms=((0,), (1,)))) == ([[P], [P]], [[P]])
    # A product: one of them is.
    assert _placements(_solve("..., ... -> ...", LINE, ((4,), [P]), ((4,), [R]),
                              terms=((0, 1),))) == ([[P], [R]], [[P]])
    one = _placements(_solve("..., ... -> ...", LINE, ((4,), [P]), ((4,), [P]), terms=((0, 1),)))
    assert sorted(map(str, one[0])) == sorted(map(str, [[P], [R]])) and one[1] == [[P]]


def test_where_gradients_vary():
    solution = _solve("..., ... -> ...", LINE, ((8, 4), [S0]), ((4,), [R]))
    assert solution.varying == ((), (0,))
    solution = _solve("..., ... -> ...", PLANE, ((8, 4), [S0, R]), ((4,), [R, R]))
    assert solution.varying == ((), (0,))
    assert _solve("..., ... -> ...", LINE, ((4,), [R]), ((4,), [R])).varying == ((), ())
    alone = _mesh(1)
    assert _solve("..., ... -> ...", alone, ((8, 4), [S0]), ((4,), [R])).varying == ((), ())


def test_in_place_keeps_the_target():
    kept = _solve("..., ... -> ...", LINE, ((8, 4), [S0]), ((8, 4), [S1]), in_place=True)
    assert _placements(kept) == ([[S0], [S0]], [[S0]])
    assert _placements(_solve("..., ... -> ...", LINE, ((8, 4), [R]), ((8, 4), [S1]),
                              in_place=True)) == ([[R], [R]], [[R]])
    assert _solve("..., ... -> ...", LINE, ((8, 4), [P]), ((8, 4), [R]), in_place=True) is None
    turned = _solve("a b -> b a", LINE, ((8, 4), [S0]), terms=((0,),), moves=True, in_place=True)
    assert _placements(turned) == ([[S0]], [[S1]])


def test_orders_follow_the_largest_operand():
    order = {0: ("tp", "cp")}
    solution = _solve("..., ... -> ...", PLANE, ((8, 4), [S0, S0], order), ((8, 1), [R, R]))
    assert solution.results[0].layout.axes_of(0) == (1, 0) == solution.operands[1].axes_of(0)
    solution = _solve("a b -> b a", PLANE, ((8, 4), [S0, S0], order), terms=((0,),), moves=True)
    assert solution.results[0].layout.axes_of(1) == (1, 0)


@st.composite
def _two_operands(draw):
    mesh = draw(st.sampled_from([LINE, PLANE, _mesh(2, 2, 2)]))
    shapes = draw(st.sampled_from([((8, 4), (8, 4)), ((8, 4), (4,)), ((8, 1), (1, 4)),
                                   ((8, 4), ()), ((1,), (8, 4))]))
    specs = []
    for shape in shapes:
        kinds = [R, P, *map(Shard, range(len(shape)))]
        placements = draw(st.lists(st.sampled_from(kinds), min_size=mesh.ndim, max_size=mesh.ndim))
        specs.append(TensorSpec(Layout(mesh, placements), shape))
    terms = draw(st.sampled_from([(), ((0,), (1,)), ((0, 1),)]))
    return mesh, specs, terms


@given(_two_operands())
@settings(max_examples=300, deadline=None)
def test_results_on_an_axis_are_all_replicated_or_none(case):
    """What holds of every solution, whatever the operands."""
    mesh, specs, terms = case
    rule = rule_from_notation("..., ... -> ...", [spec.shape for spec in specs], terms=terms)
    solution = solve(rule, specs, mesh)
    result = solution.results[0]
    assert result.shape == torch.broadcast_shapes(*(spec.shape for spec in specs))
    for axis in range(mesh.ndim):
        after = result.layout.placements[axis]
        inputs = [layout.placements[axis] for layout in solution.operands]
        before = [spec.layout.placements[axis] for spec in specs]
        if after.is_shard():
            # Somebody was sharded along that very dim, aligned at the right.
            assert any(p.is_shard() and p.dim - len(spec.shape) == after.dim - len(result.shape)
                       for p, spec in zip(before, specs))
            assert not any(p.is_partial() for p in inputs)
        elif after.is_partial():
            assert terms and P in before and P in inputs
            assert all(p in (P, R) for p in inputs)
        else:
            assert inputs == [R, R]
        for index, placement in enumerate(inputs):
            varies = not after.is_replicate() and placement.is_replicate()
            assert (axis in solution.varying[index]) == varies


def test_a_rule_without_a_choice_replicates():
    solution = _solve("a b -> a", LINE, ((8, 4), [S1]))
    assert _placements(solution) == ([[R]], [[R]])
    with pytest.raises(ValueError):
        _solve("a b c -> a", LINE, ((8, 4), [S1]))

"""The notation of rules, bound to shapes."""
import pytest

from hyper_parallel import DeviceMesh, Layout, Replicate
from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import add_notation, find_maker, register_rule
from hyper_parallel.core.shard._rule import (
    Call, Rule, named_dims, positive_dim, positive_dims, rule_from_notation)


def test_linear():
    rule = rule_from_notation("... i, o i, o -> ... o", [(2, 5, 6), (7, 6), (7,)],
                              reduced={"i": "sum"})
    assert rule.operands == ((("...1",), ("...0",), ("i",)), (("o",), ("i",)), (("o",),))
    assert rule.results == ((("...1",), ("...0",), ("o",)),)
    assert rule.sizes == {"...1": 2, "...0": 5, "i": 6, "o": 7}
    assert rule.result_shape(0) == (2, 5, 7) and rule.reduced == {"i": "sum"}


def test_operands_may_be_absent():
    rule = rule_from_notation("... i, o i, o -> ... o", [(5, 6), (7, 6)])
    assert len(rule.operands) == 2 and rule.result_shape(0) == (5, 7)
    swapped = rule_from_notation("... i, o i, o -> ... o", [(7,), (7, 6), (5, 6)], (2, 1, 0))
    assert swapped.operands == ((("o",),), (("o",), ("i",)), (("...0",), ("i",)))


def test_broadcasting_aligns_at_the_right():
    rule = rule_from_notation("..., ... -> ...", [(5, 1), (3, 1, 7)])
    assert rule.operands == ((("...1",), ()), (("...2",), (), ("...0",)))
    assert rule.result_shape(0) == (3, 5, 7)
    # A dim of size 1 that nothing stretches keeps its factor: it may stay sharded.
    rule = rule_from_notation("..., ... -> ...", [(5, 1), (5, 1)])
    assert rule.operands[0] == (("...1",), ("...0",)) and rule.sizes["...0"] == 1
    assert rule_from_notation("..., ... -> ...", [(), (4,)]).result_shape(0) == (4,)


def test_compound_dims():
    rule = rule_from_notation("b (h d), h -> b h d", [(2, 12), (3,)])
    assert rule.operands[0] == (("b",), ("h", "d")) and rule.sizes["d"] == 4
    assert rule.result_shape(0) == (2, 3, 4)
    merged = rule_from_notation("b h d -> b (h d)", [(2, 3, 4)])
    assert merged.results == ((("b",), ("h", "d")),) and merged.result_shape(0) == (2, 12)
    with pytest.raises(ValueError, match="a dim of size 12 cannot be split"):
        rule_from_notation("b (h d) -> b h d", [(2, 12)])
    with pytest.raises(ValueError, match="a dim of size 12 cannot be split"):
        rule_from_notation("b (h d), h -> b h d", [(2, 12), (5,)])


def test_several_results_and_numbers_as_results():
    rule = rule_from_notation("a b -> a, b a", [(2, 3)])
    assert rule.result_shape(0) == (2,) and rule.result_shape(1) == (3, 2)
    assert rule_from_notation("a b ->", [(2, 3)], reduced={"a": "sum", "b": "sum"}).results == ((),)


def test_tensors_that_the_notation_does_not_know_stay_whole():
    rule = rule_from_notation("... -> ...", [(4,), (2, 3)])
    assert len(rule.operands) == 2 and len(rule.whole) == 2
    assert set(rule.whole) == {factors[0] for factors in rule.operands[1]}


@pytest.mark.parametrize("notation, shapes, message", [
    ("a b", [(2, 3)], "reads 'operands -> results', but got 'a b'"),
    ("a b -> a", [(2,)], r"shape \(2,\) does not fit 'a b -> a'"),
    ("... a b -> a", [(2,)], r"shape \(2,\) does not fit"),
    ("a -> a", [(2, 3)], r"shape \(2, 3\) does not fit"),
])
def test_notations_that_do_not_fit(notation, shapes, message):
    with pytest.raises(ValueError, match=message):
        rule_from_notation(notation, shapes)


def test_result_shapes_may_be_given():
    dims, sizes = named_dims((4, 5))
    rule = Rule((dims,), (dims,), sizes, result_shapes=((4, 9),))
    assert rule.result_shape(0) == (4, 9)


def test_dims_counted_from_the_front():
    assert [positive_dim(dim, 3) for dim in (0, 2, -1, -3)] == [0, 2, 2, 0]
    assert positive_dim(-1, 0) == 0 == positive_dim(0, 0)
    for dim in (3, -4):
        with pytest.raises(IndexError, match=r"dim -?\d is out of range for a tensor of 3 dims"):
            positive_dim(dim, 3)
    assert positive_dims(None, 3) == (0, 1, 2) == positive_dims([], 3)
    assert positive_dims(-1, 3) == (2,) and positive_dims((2, -3), 3) == (0, 2)
    assert positive_dims(-1, 0) == ()


def _call(*args, **kwargs):
    spec = TensorSpec(Layout(DeviceMesh([0], ("x",)), [Replicate()]), (2,))
    paths = [(0,), ("weight",), (2, 1)]
    return Call("f", len, args, kwargs, [spec] * 3, paths)


def test_arguments_are_found_by_position_or_name():
    call = _call("x", 1, ["a", "b"], weight="w", flag=True)
    assert call.argument(1, "dim") == 1 and call.argument(3, "flag") is True
    assert call.argument(4, "other", 7) == 7
    assert call.operand(0, "input") == 0 and call.operand(1, "weight") == 1
    assert call.operand(2, "list") is None
    assert call.arguments_from(1, "size") == (1, ["a", "b"])
    assert _call("x", [1, 2]).arguments_from(1, "size") == [1, 2]
    assert _call("x", size=(3, 4)).arguments_from(1, "size") == (3, 4)


def test_rules_come_and_go_by_name():
    add_notation("rule_test_one rule_test_two", "... a -> ...", reduced={"a": "sum"})
    for name in ("rule_test_one", "rule_test_two"):
        assert find_maker(name) is not None
        register_rule(name, None)
        assert find_maker(name) is None

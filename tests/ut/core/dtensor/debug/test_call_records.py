"""The records: their text, their order, and what a level hides."""
from hyper_parallel.core.dtensor.debug._call_records import (
    AnnotateCall,
    CollectiveCall,
    OpCall,
    RedistributeCall,
    TensorInfo,
    walk,
)
from hyper_parallel.core.placement_types import Partial, Replicate, Shard


def test_op_shows_plain_tensors_as_such():
    dtensor = TensorInfo((2,), "torch.float32", True, (Shard(0),), (2,))
    record = OpCall("add", [TensorInfo((2,), "torch.int64"), dtensor], [dtensor])
    assert record._render_self() == "Op(add) inputs=[Tensor[2], DTensor[2]] outputs=[DTensor[2]]"


def test_collective_names_the_backward_phase():
    record = CollectiveCall("differentiable_all_reduce", 2, (4,), None, phase="backward")
    assert record._render_self() == ("Collective(differentiable_all_reduce) group_size=2 "
                                     "input_shape=(4,) output_shape=None phase=backward")


def test_redistribute_text():
    one = RedistributeCall((Partial(),), (Replicate(),), (4, 16))
    two = RedistributeCall((Shard(0), Partial()), (Replicate(), Replicate()), (4,), "backward")
    assert one._render_self() == "Redistribute(Partial(sum) -> Replicate()) tensor_shape=(4, 16)"
    assert two._render_self() == ("Redistribute((Shard(dim=0), Partial(sum)) -> (Replicate(), "
                                  "Replicate())) tensor_shape=(4,) phase=backward")


def test_module_boundary_text():
    assert AnnotateCall("fc1")._render_self() == "Module(fc1) [enter]"
    assert AnnotateCall(module_fqn="fc1", event_type="exit")._render_self() == (
        "Module(fc1) [exit]")


def test_timestamps_follow_the_clock():
    first, second = OpCall("mm"), OpCall("mm")
    assert 1.6e9 < first.timestamp <= second.timestamp


def test_walk_keeps_order_and_only_hidden_operators_indent():
    module, op, move = AnnotateCall("fc"), OpCall("mm"), RedistributeCall((), (), ())
    first, second, last = (CollectiveCall(name) for name in "abc")
    module.children += [op, last]
    op.children += [move, second]
    move.children.append(first)
    by_level = {level: list(walk([module], level)) for level in (None, 0, 1, 2, 3)}
    assert by_level[0] == [(1, first), (1, second), (0, last)]
    assert by_level[1] == [(0, op), (1, first), (1, second), (0, last)]
    assert by_level[2] == [(0, module), (1, op), (2, first), (2, second), (1, last)]
    assert by_level[3] == by_level[None] == [
        (0, module), (1, op), (2, move), (3, first), (2, second), (1, last)]


def test_very_deep_trees_are_no_recursion():
    root = record = OpCall("mm")
    for _ in range(5000):
        record.children.append(OpCall("mm"))
        record = record.children[0]
    assert len(root.render().split("\n")) == 5001

"""CommDebugMode in one process, without a backend: the seven groups of the specification."""
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyper_parallel.core.dtensor.debug import CommDebugMode
from hyper_parallel.core.dtensor.debug._call_records import (
    CollectiveCall,
    DebugCall,
    OpCall,
    TensorInfo,
)
from hyper_parallel.core.dtensor.debug._collective_tracer import (
    COLLECTIVE_METHODS,
    CollectiveTracer,
)
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer
from hyper_parallel.platform import get_platform

RULE = "-" * 80
ALL_REDUCE = "differentiable_all_reduce"
ALL_GATHER = "differentiable_all_gather_concat"


class Group:
    """Stands for a process group: all that a trace asks of one is its size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        """Number of ranks."""
        return self._size


def info(*shape: int) -> TensorInfo:
    """A DTensor of two ranks."""
    return TensorInfo(shape, "torch.float32", True, (Replicate(),), (2,))


def all_reduce_record(call_depth: int = 0) -> CollectiveCall:
    """The all-reduce of the specification's tables."""
    return CollectiveCall(collective_type=ALL_REDUCE, group_size=2, input_shape=(4, 16),
                          output_shape=(4, 16), input_dtype="torch.float32",
                          call_depth=call_depth)


def record_mlp(mode: CommDebugMode) -> None:
    """Tell a mode what the specification's MLP does on one rank of two."""
    x, hidden, out = torch.zeros(4, 16), torch.zeros(4, 32), torch.zeros(4, 16)
    with mode:
        mode._on_module_event("(root)", "enter")
        mode._on_module_event("fc1", "enter")
        mode._on_op_dispatch_enter("linear", None, (x, torch.zeros(32, 16)), {})
        mode._on_op_dispatch_exit("linear", hidden)
        mode._on_module_event("fc1", "exit")
        mode._on_op_dispatch_enter("gelu", None, (hidden,), {})
        mode._on_op_dispatch_exit("gelu", hidden)
        mode._on_module_event("fc2", "enter")
        mode._on_op_dispatch_enter("linear", None, (hidden, torch.zeros(16, 32)), {})
        mode._on_collective_call(ALL_REDUCE, (out, "sum", Group(2)), {}, out)
        mode._on_op_dispatch_exit("linear", out)
        mode._on_module_event("fc2", "exit")
        mode._on_module_event("(root)", "exit")


class TestCallRecords:
    """Group 1: the records and their text."""

    def test_op_call_render_self(self):
        record = OpCall(op_name="linear", input_infos=[info(4, 16), info(32, 16)],
                        output_infos=[info(4, 32)])
        assert record._render_self() == (
            "Op(linear) inputs=[DTensor[4, 16], DTensor[32, 16]] outputs=[DTensor[4, 32]]")
        assert record.call_depth == 0 and record.children == []

    def test_collective_call_render_self(self):
        assert all_reduce_record()._render_self() == (
            "Collective(differentiable_all_reduce) group_size=2 "
            "input_shape=(4, 16) output_shape=(4, 16)")

    def test_debug_call_render_nests(self):
        root = DebugCall(call_depth=0)
        op = OpCall("mm", call_depth=1)
        op.children.append(all_reduce_record(call_depth=2))
        root.children += [op, OpCall("gelu", call_depth=1)]
        assert root._render_self() == "DebugCall"
        assert root.render(indent=1).split("\n") == [
            "  DebugCall",
            "    Op(mm) inputs=[] outputs=[]",
            f"      {all_reduce_record()._render_self()}",
            "    Op(gelu) inputs=[] outputs=[]",
        ]


class TestCollectiveTracer:
    """Group 2: the patch comes and goes without a trace, and its callback harms nobody."""

    @pytest.fixture
    def cls(self) -> type:
        """A platform class that has one of the six methods, and another one."""

        class FakePlatform:
            """Adds where a platform would reduce."""

            @staticmethod
            def differentiable_all_reduce(data: int, op: str, group: Any) -> int:
                """Doubles."""
                del op, group
                return 2 * data

            @staticmethod
            def broadcast(tensor: int) -> int:
                """Is none of the six."""
                return tensor

        return FakePlatform

    def test_uninstall_restores_the_very_descriptors(self, cls):
        before = dict(cls.__dict__)
        tracer = CollectiveTracer(lambda *call: None, cls)
        tracer.install()
        changed = {name for name, value in before.items() if cls.__dict__[name] is not value}
        assert changed == {ALL_REDUCE}
        tracer.uninstall()
        assert cls.__dict__.keys() == before.keys()
        assert all(cls.__dict__[name] is value for name, value in before.items())

    def test_callback_is_told_call_and_result(self, cls):
        calls = []
        tracer = CollectiveTracer(lambda *call: calls.append(call), platform_cls=cls)
        tracer.install()
        assert cls.differentiable_all_reduce(3, "sum", group="g") == 6
        assert cls().differentiable_all_reduce(4, "sum", None) == 8
        cls.broadcast(1)
        tracer.uninstall()
        cls.differentiable_all_reduce(5, "sum", None)
        assert calls == [(ALL_REDUCE, (3, "sum"), {"group": "g"}, 6),
                         (ALL_REDUCE, (4, "sum", None), {}, 8)]

    def test_callback_error_does_not_reach_the_caller(self, cls, caplog):

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("of the callback")

        tracer = CollectiveTracer(fail, cls)
        tracer.install()
        with caplog.at_level(logging.WARNING):
            assert cls.differentiable_all_reduce(3, "sum", None) == 6
            assert cls.differentiable_all_reduce(3, "sum", None) == 6
        tracer.uninstall()
        assert [record.getMessage() for record in caplog.records] == [
            "A callback on collectives failed, the program goes on: "
            "ZeroDivisionError: of the callback"]


class TestCommDebugModeContextManager:
    """Group 3: what entry sets up, exit takes down."""

    def test_variable_holds_the_mode_inside_only(self):
        assert _debug_mode_observer.get() is None
        with CommDebugMode() as mode:
            assert _debug_mode_observer.get() is mode
        assert _debug_mode_observer.get() is None

    def test_nested_modes(self):
        with CommDebugMode() as outer:
            with CommDebugMode() as inner:
                assert _debug_mode_observer.get() is inner
            assert _debug_mode_observer.get() is outer
        assert _debug_mode_observer.get() is None

    def test_platform_methods_are_restored(self):
        cls = type(get_platform())
        before = {name: cls.__dict__[name] for name in COLLECTIVE_METHODS}
        with CommDebugMode():
            with CommDebugMode():
                pass
            assert all(cls.__dict__[name] is not old for name, old in before.items())
        assert all(cls.__dict__[name] is old for name, old in before.items())

    def test_restored_after_an_error(self):
        cls = type(get_platform())
        original = cls.__dict__[ALL_REDUCE]
        with pytest.raises(ZeroDivisionError):
            with CommDebugMode():
                raise ZeroDivisionError
        assert _debug_mode_observer.get() is None
        assert cls.__dict__[ALL_REDUCE] is original

    def test_empty_trace(self):
        with CommDebugMode() as mode:
            pass
        assert mode.generate_comm_debug_tracing_table() == "(no operations recorded)"
        assert mode.get_comm_counts() == {} and mode.get_total_counts() == 0
        assert mode.get_parameter_info() == {} and mode.get_sharding_info() == {}

    def test_entering_again_clears(self):
        mode = CommDebugMode()
        record_mlp(mode)
        assert mode.get_total_counts() == 1
        with mode:
            assert mode._root_records == [] and mode.get_total_counts() == 0

    def test_entering_while_active_raises_and_loses_nothing(self):
        with CommDebugMode() as mode:
            mode.on_op_dispatch_enter("mm")
            with pytest.raises(RuntimeError, match="active already"):
                mode.__enter__()
            mode.on_op_dispatch_exit("mm")
            assert [record.op_name for record in mode._root_records] == ["mm"]
            assert _debug_mode_observer.get() is mode
        assert _debug_mode_observer.get() is None

    def test_exit_without_entry_raises(self):
        with pytest.raises(RuntimeError, match="not active"):
            CommDebugMode().__exit__(None, None, None)

    def test_module_of_a_wrong_type_raises(self):
        with pytest.raises(TypeError, match=r"traces a module .* but got 3 \(int\)"):
            CommDebugMode(module=3)


class TestObserverHooks:
    """Group 4: events become a tree."""

    def test_dispatch_makes_an_op_call(self):
        x = torch.zeros(2, 3)
        with CommDebugMode() as mode:
            mode._on_op_dispatch_enter("relu", torch.relu, (x,), {})
            assert [record.op_name for record in mode._call_stack] == ["relu"]
            mode._on_op_dispatch_exit("relu", x)
            assert mode._call_stack == []
        (record,) = mode._root_records
        assert record.input_infos == record.output_infos == [TensorInfo((2, 3), "torch.float32")]

    def test_operator_that_raised_has_no_outputs(self):
        with CommDebugMode() as mode:
            mode._on_op_dispatch_enter("relu", None, (torch.zeros(1),), {})
            mode._on_op_dispatch_exit("relu", None)
        assert mode._root_records[0].output_infos == []

    def test_operators_nest(self):
        with CommDebugMode() as mode:
            mode.on_op_dispatch_enter("outer")
            mode.on_op_dispatch_enter("inner")
            mode.on_op_dispatch_exit("inner")
            mode.on_op_dispatch_exit("outer")
            mode.on_op_dispatch_enter("next")
            mode.on_op_dispatch_exit("next")
        outer, following = mode._root_records
        assert (outer.op_name, following.op_name) == ("outer", "next")
        assert [(child.op_name, child.call_depth) for child in outer.children] == [("inner", 1)]

    def test_exit_closes_what_was_left_open_inside(self):
        with CommDebugMode() as mode:
            mode.on_op_dispatch_enter("outer")
            mode.on_op_dispatch_enter("inner")
            mode.on_op_dispatch_exit("outer")
            mode.on_op_dispatch_exit("never entered")
            assert mode._call_stack == []

    def test_collectives_are_counted(self):
        x = torch.zeros(2)
        with CommDebugMode() as mode:
            for _ in range(2):
                mode._on_collective_call(ALL_REDUCE, (x, "sum", Group(2)), {}, x)
            mode._on_collective_call(ALL_GATHER, (x, Group(2), 2, 0), {}, torch.zeros(4))
        assert mode._comm_counts == {ALL_REDUCE: 2, ALL_GATHER: 1}
        assert mode.get_comm_counts() == mode._comm_counts
        assert mode.get_total_counts() == 3 == len(mode._root_records)

    def test_collective_nested_under_op(self):
        x, whole = torch.zeros(2, 8), torch.zeros(4, 8)
        with CommDebugMode() as mode:
            mode.on_op_dispatch_enter("redistribute", None, (x,), {})
            mode._on_collective_call(ALL_GATHER, (x, Group(2), 2, 0), {}, whole)
            mode.on_op_dispatch_exit("redistribute", whole)
        (record,) = mode._root_records[0].children
        assert isinstance(record, CollectiveCall)
        assert (record.group_size, record.input_shape, record.output_shape) == (2, (2, 8), (4, 8))
        assert (record.input_dtype, record.phase, record.call_depth) == (
            "torch.float32", "forward", 1)

    @pytest.mark.parametrize("args, kwargs", [
        ((torch.zeros(2), Group(3), 3, 0), {}),
        ((), {"concat_size": 3, "data": torch.zeros(2), "concat_dim": 0, "group": Group(3)}),
        ((torch.zeros(2), 3, 0, Group(3)), {}),
        ((torch.zeros(2), types.SimpleNamespace(size=lambda: 3)), {}),
    ])
    def test_group_is_found_wherever_it_stands(self, args, kwargs):
        with CommDebugMode() as mode:
            mode._on_collective_call(ALL_GATHER, args, kwargs, torch.zeros(6))
        assert mode._root_records[0].group_size == 3

    def test_no_group_is_the_default_group(self):
        with CommDebugMode() as mode:
            mode._on_collective_call(ALL_REDUCE, (torch.zeros(2), "sum", None), {}, None)
            mode._on_collective_call(ALL_REDUCE, (torch.zeros(2),), {}, None)
        world = get_platform().get_world_size()
        assert [record.group_size for record in mode._root_records] == [world, 0]

    def test_result_of_an_async_collective(self):
        x = torch.zeros(4)
        with CommDebugMode() as mode:
            mode._on_collective_call("differentiable_all_to_all_single_async",
                                     (x, None, None, Group(2)), {}, (torch.zeros(6), object()))
        assert mode._root_records[0].output_shape == (6,)

    def test_modules_nest(self):
        mode = CommDebugMode()
        record_mlp(mode)
        (root,) = mode._root_records
        assert [child._render_self().split("(")[0] for child in root.children] == [
            "Module", "Op", "Module"]
        assert mode._call_stack == []

    def test_error_while_recording_is_kept_out_of_the_program(self, caplog):
        class Hostile(torch.Tensor):
            """A tensor whose dtype cannot be read."""

            dtype = property(lambda self: 1 / 0)

        with CommDebugMode() as mode, caplog.at_level(logging.WARNING):
            for _ in range(2):
                mode.on_op_dispatch_enter("relu", None, (torch.zeros(1).as_subclass(Hostile),), {})
                mode.on_op_dispatch_exit("relu")
        assert [record.op_name for record in mode._root_records] == ["relu", "relu"]
        assert mode.incomplete == "ZeroDivisionError: division by zero"
        assert mode.generate_tracing_table().endswith(
            "\n(incomplete: ZeroDivisionError: division by zero)")
        assert len(caplog.records) == 1


class TestDebugOutput:
    """Group 5: the tables of section 3.5, to the character."""

    MLP_0 = ("  Collective         Collective(differentiable_all_reduce) group_size=2 "
             "input_shape=(4, 16) output_shape=(4, 16)")

    @pytest.fixture
    def mode(self) -> CommDebugMode:
        """A mode that has seen the MLP."""
        mode = CommDebugMode(module=torch.nn.Module())
        record_mlp(mode)
        return mode

    def test_table_holds_the_hierarchy(self, mode):
        assert mode.generate_comm_debug_tracing_table(noise_level=2) == "\n".join([
            "Type                 Detail",
            RULE,
            "Module               Module((root)) [enter]",
            "  Module             Module(fc1) [enter]",
            "    Op               Op(linear) inputs=[Tensor[4, 16], Tensor[32, 16]] "
            "outputs=[Tensor[4, 32]]",
            "  Op                 Op(gelu) inputs=[Tensor[4, 32]] outputs=[Tensor[4, 32]]",
            "  Module             Module(fc2) [enter]",
            "    Op               Op(linear) inputs=[Tensor[4, 32], Tensor[16, 32]] "
            "outputs=[Tensor[4, 16]]",
            f"    {self.MLP_0}".replace("     Collective(", " Collective("),
        ])

    def test_tracing_table_noise_level_0(self, mode):
        table = mode.generate_tracing_table(noise_level=0)
        assert table == "\n".join(["Type                 Detail", RULE, self.MLP_0])
        assert "linear" not in table

    def test_tracing_table_noise_level_1(self, mode):
        assert mode.generate_tracing_table(noise_level=1) == "\n".join([
            "Type                 Detail",
            RULE,
            "Op                   Op(linear) inputs=[Tensor[4, 16], Tensor[32, 16]] "
            "outputs=[Tensor[4, 32]]",
            "Op                   Op(gelu) inputs=[Tensor[4, 32]] outputs=[Tensor[4, 32]]",
            "Op                   Op(linear) inputs=[Tensor[4, 32], Tensor[16, 32]] "
            "outputs=[Tensor[4, 16]]",
            self.MLP_0,
        ])

    def test_default_level_is_1(self, mode):
        assert mode.generate_tracing_table() == mode.generate_tracing_table(noise_level=1)
        assert mode.generate_comm_debug_tracing_table(None) == mode.generate_tracing_table(1)

    @pytest.mark.parametrize("level", [2, 3])
    def test_module_level_without_module_warns_and_adds_nothing(self, level, caplog):
        mode = CommDebugMode()
        with mode:
            mode.on_op_dispatch_enter("mm")
            mode.on_op_dispatch_exit("mm")
        with caplog.at_level(logging.WARNING):
            plain = mode.generate_tracing_table(1)
            assert not caplog.records
            assert mode.generate_tracing_table(level) == plain
        assert "CommDebugMode(module=model)" in caplog.records[0].getMessage()

    def test_module_level_with_module_does_not_warn(self, mode, caplog):
        with caplog.at_level(logging.WARNING):
            mode.generate_tracing_table(2)
        assert not caplog.records

    def test_repr(self, mode):
        assert repr(mode) == "CommDebugMode(get_total_counts()=1)"


class TestTensorInfoExtraction:
    """Group 6: what is read out of arguments."""

    extract: Callable = staticmethod(CommDebugMode._extract_tensor_infos)

    def test_plain_tensor(self):
        expected = TensorInfo((2, 3), "torch.bfloat16", False, None, None)
        assert self.extract(torch.zeros(2, 3, dtype=torch.bfloat16)) == [expected]
        assert self.extract((torch.zeros(2, 3, dtype=torch.bfloat16),)) == [expected]

    def test_nested_tuple(self):
        a, b, c, d = (torch.zeros(n) for n in (1, 2, 3, 4))
        infos = self.extract((a, (b, [c, "text"])), {"key": {"inner": d}})
        assert [one.shape for one in infos] == [(1,), (2,), (3,), (4,)]

    def test_no_tensors(self):
        assert self.extract((1, 2.5, "text", None, object()), {}) == []
        assert self.extract(None) == []

    def test_parameter_and_scalar(self):
        assert self.extract(torch.nn.Parameter(torch.ones(2)), torch.tensor(1)) == [
            TensorInfo((2,), "torch.float32"), TensorInfo((), "torch.int64")]


class TestZeroOverhead:
    """Group 7: off means off."""

    def test_no_observer_by_default(self):
        assert _debug_mode_observer.get() is None

    def test_making_a_mode_installs_nothing(self):
        cls = type(get_platform())
        before = {name: cls.__dict__[name] for name in COLLECTIVE_METHODS}
        mode = CommDebugMode()
        assert _debug_mode_observer.get() is None
        assert all(cls.__dict__[name] is old for name, old in before.items())
        assert mode.get_total_counts() == 0

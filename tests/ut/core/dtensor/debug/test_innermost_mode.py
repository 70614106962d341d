"""Which mode receives an event: nesting, any order of exit, threads, gradients."""
import gc
import itertools
import threading
import weakref
from types import SimpleNamespace
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyper_parallel.core.dtensor import tensor_redistribution
from hyper_parallel.core.dtensor.debug import CommDebugMode
from hyper_parallel.core.dtensor.debug._call_records import CollectiveCall, RedistributeCall
from hyper_parallel.core.placement_types import Partial, Replicate
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer
from hyper_parallel.platform import get_platform

ALL_REDUCE = "differentiable_all_reduce"
PAIR = SimpleNamespace(size=lambda: 2)
PAIR_MESH = SimpleNamespace(alias_name=("tp",))
SUMMANDS = SimpleNamespace(placements=(Partial(),), device_mesh=PAIR_MESH)
WHOLE = SimpleNamespace(placements=(Replicate(),), device_mesh=PAIR_MESH)
STEPS = ("a step",)


@pytest.fixture(name="platform")
def fixture_platform(monkeypatch: pytest.MonkeyPatch) -> type:
    """The platform's class with an all-reduce that needs no other rank."""
    cls = type(get_platform())
    monkeypatch.setattr(cls, ALL_REDUCE, staticmethod(lambda data, op, group: data))
    return cls


def dispatch(name: str, work: Callable[[], Any] = lambda: None) -> None:
    """What ``OpDispatcher.dispatch`` does with an observer."""
    observer = _debug_mode_observer.get()
    if observer is not None:
        observer._on_op_dispatch_enter(name, None, (), {})
    try:
        work()
    finally:
        if observer is not None:
            observer._on_op_dispatch_exit(name, None)


def all_reduce(platform: type) -> None:
    """One collective among two ranks."""
    platform.differentiable_all_reduce(torch.zeros(2), "sum", PAIR)


def on_thread(work: Callable[[], Any]) -> None:
    """Run work on a new thread, to its end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and not errors, errors


def names(mode: CommDebugMode) -> list[str]:
    """The operators at the root of a trace."""
    return [record.op_name for record in mode._root_records]


def test_inner_mode_alone_receives(platform):
    with CommDebugMode() as outer:
        dispatch("first", lambda: all_reduce(platform))
        with CommDebugMode() as inner:
            dispatch("second", lambda: all_reduce(platform))
        dispatch("third", lambda: all_reduce(platform))
    assert names(outer) == ["first", "third"] and outer.get_comm_counts() == {ALL_REDUCE: 2}
    assert names(inner) == ["second"] and inner.get_comm_counts() == {ALL_REDUCE: 1}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_exit_in_any_order(platform, order):
    original = platform.__dict__[ALL_REDUCE]
    modes = [CommDebugMode() for _ in range(3)]
    for mode in modes:
        mode.__enter__()
    still_open = list(modes)
    for index in order:
        innermost = still_open[-1]
        assert _debug_mode_observer.get() is innermost
        before = {mode: mode.get_total_counts() for mode in modes}
        dispatch("op", lambda: all_reduce(platform))
        for mode in modes:
            assert mode.get_total_counts() - before[mode] == (mode is innermost)
        modes[index].__exit__(None, None, None)
        still_open.remove(modes[index])
    assert _debug_mode_observer.get() is None
    assert platform.__dict__[ALL_REDUCE] is original
    assert tensor_redistribution._redistribute_observer is None


def test_exit_on_another_thread(platform):
    original = platform.__dict__[ALL_REDUCE]
    with CommDebugMode() as outer:
        inner = CommDebugMode()
        inner.__enter__()
        on_thread(lambda: inner.__exit__(None, None, None))
        all_reduce(platform)
        dispatch("op", lambda: all_reduce(platform))
        assert _debug_mode_observer.get() is outer and outer._call_stack == []
        last = CommDebugMode()
        last.__enter__()
        on_thread(lambda: last.__exit__(None, None, None))
    assert inner._root_records == []
    assert isinstance(outer._root_records[0], CollectiveCall)
    assert outer._root_records[1].op_name == "op" and outer.get_total_counts() == 2
    assert platform.__dict__[ALL_REDUCE] is original
    # This thread's variable still names `last`; the next operator clears it, unseen.
    dispatch("op")
    assert _debug_mode_observer.get() is None and outer.get_total_counts() == 2


def test_entering_over_a_mode_that_exited_elsewhere():
    stale = CommDebugMode()
    stale.__enter__()
    on_thread(lambda: stale.__exit__(None, None, None))
    with CommDebugMode() as mode:
        dispatch("op")
    assert names(mode) == ["op"] and stale._root_records == []
    assert _debug_mode_observer.get() is None


def test_each_thread_has_its_own_mode(platform):
    barrier = threading.Barrier(3, timeout=30)
    modes = [CommDebugMode() for _ in range(3)]

    def work(index: int) -> None:
        with modes[index]:
            barrier.wait()
            for _ in range(200):
                dispatch(f"op{index}", lambda: all_reduce(platform))
            barrier.wait()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for index, mode in enumerate(modes):
        assert names(mode) == [f"op{index}"] * 200
        assert mode.get_total_counts() == 200
        assert all(len(record.children) == 1 for record in mode._root_records)


def test_counts_of_one_mode_from_many_threads_are_exact(platform):
    with CommDebugMode() as mode:
        threads = [threading.Thread(target=lambda: [all_reduce(platform) for _ in range(500)])
                   for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert mode.get_total_counts() == len(mode._root_records) == 2000


def test_a_thread_without_a_mode_works_for_the_last_one_entered(platform):
    with CommDebugMode() as outer, CommDebugMode() as inner:
        on_thread(lambda: all_reduce(platform))
    assert (outer.get_total_counts(), inner.get_total_counts()) == (0, 1)


def test_a_group_of_one_does_not_communicate(platform):
    with CommDebugMode() as mode:
        platform.differentiable_all_reduce(torch.zeros(2), "sum", SimpleNamespace(size=lambda: 1))
    assert mode.get_total_counts() == 0 and mode._root_records == []


class TestMoves:
    """Redistributions, told through the slot in ``tensor_redistribution``."""

    @staticmethod
    def forward(platform: type, steps: tuple = STEPS, tensor: Any = None) -> Any:
        """Move a tensor; returns what the library keeps for the gradient."""
        observer = tensor_redistribution._redistribute_observer
        token = observer.begin(tensor, SUMMANDS, WHOLE, (4,), steps)
        try:
            if steps:
                all_reduce(platform)
        finally:
            observer.end(token)
        return token

    @staticmethod
    def backward(platform: type, origin: Any) -> None:
        """Move its gradient."""
        observer = tensor_redistribution._redistribute_observer
        token = observer.begin_backward(origin, WHOLE, SUMMANDS, (4,), STEPS)
        try:
            all_reduce(platform)
        finally:
            observer.end(token)

    def test_no_observer_without_a_mode(self):
        assert tensor_redistribution._redistribute_observer is None

    def test_stands_between_operator_and_collective(self, platform):
        with CommDebugMode() as mode:
            dispatch("linear", lambda: self.forward(platform))
        (op,) = mode._root_records
        (move,) = op.children
        (collective,) = move.children
        assert isinstance(move, RedistributeCall) and isinstance(collective, CollectiveCall)
        assert (move.src_placements, move.dst_placements) == ((Partial(),), (Replicate(),))
        assert (move.tensor_shape, move.phase, move.call_depth) == ((4,), "forward", 1)
        assert (collective.phase, collective.call_depth) == ("forward", 2)

    @pytest.mark.parametrize("run", [lambda work: work(), on_thread])
    def test_gradient_belongs_to_the_forward_operator(self, platform, run):
        tokens: list[Any] = []
        with CommDebugMode() as mode:
            dispatch("linear", lambda: tokens.append(self.forward(platform, steps=())))
            dispatch("gelu")
            dispatch("linear", lambda: tokens.append(self.forward(platform)))
            for token in reversed(tokens):
                run(lambda origin=token: self.backward(platform, origin))
            assert mode._call_stack == []
        first, gelu, last = mode._root_records
        assert [[move.phase for move in op.children] for op in (first, gelu, last)] == [
            ["backward"], [], ["forward", "backward"]]
        assert [move.children[0].phase for move in (*first.children, *last.children)] == [
            "backward", "forward", "backward"]
        assert mode.get_comm_counts() == {ALL_REDUCE: 3}

    def test_gradient_of_an_unseen_forward_is_at_the_root(self, platform):
        with CommDebugMode() as mode:
            dispatch("other", lambda: self.backward(platform, None))
        other, move = mode._root_records
        assert other.children == [] and move.children[0].phase == "backward"

    def test_gradient_after_the_mode_is_not_counted(self, platform):
        with CommDebugMode() as first:
            token = self.forward(platform)
        assert tensor_redistribution._redistribute_observer is None
        with CommDebugMode() as second:
            self.backward(platform, token)
        assert first.get_total_counts() == 1 and len(first._root_records) == 1
        assert second._root_records[0].phase == "backward" and second.get_total_counts() == 1

    def test_gradient_for_an_earlier_run_of_the_same_mode(self, platform):
        mode = CommDebugMode()
        tokens: list[Any] = []
        with mode:
            dispatch("linear", lambda: tokens.append(self.forward(platform)))
        with mode:
            self.backward(platform, tokens[0])
        assert [record.phase for record in mode._root_records] == ["backward"]
        assert mode.get_total_counts() == 1

    def test_gradient_on_a_thread_finds_the_mode_of_its_forward(self, platform):
        tokens: list[Any] = []
        with CommDebugMode() as outer:
            dispatch("linear", lambda: tokens.append(self.forward(platform)))
            other = CommDebugMode()
            on_thread(other.__enter__)
            on_thread(lambda: self.backward(platform, tokens[0]))
            with CommDebugMode() as inner:
                on_thread(lambda: self.backward(platform, tokens[0]))
            other.__exit__(None, None, None)
        assert [move.phase for move in outer._root_records[0].children] == ["forward", "backward"]
        assert [record.phase for record in inner._root_records] == ["backward"]
        assert other._root_records == []

    def test_error_in_a_move_leaves_nothing_open(self, platform):
        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        with CommDebugMode() as mode:
            with pytest.raises(ZeroDivisionError):
                dispatch("linear", lambda: self.forward(SimpleNamespace(
                    differentiable_all_reduce=fail)))
            all_reduce(platform)
        assert [type(record).__name__ for record in mode._root_records] == [
            "OpCall", "CollectiveCall"]

    def test_error_of_the_recorder_does_not_stop_the_move(self, platform):
        with CommDebugMode() as mode:
            observer = tensor_redistribution._redistribute_observer
            token = observer.begin(None, object(), object(), (4,), STEPS)
            all_reduce(platform)
            observer.end(token)
        assert "device_mesh" in mode.incomplete
        assert mode.get_total_counts() == 1


def test_nothing_is_kept_alive_after_exit(platform):
    module = torch.nn.Linear(2, 2)
    x = torch.zeros(2, 2)
    with CommDebugMode(module=module) as mode:
        dispatch("op", lambda: platform.differentiable_all_reduce(x, "sum", PAIR))
        mode._on_op_dispatch_enter("linear", None, (x, module.weight), {})
        mode._on_op_dispatch_exit("linear", x)
        module(x)
    held = [weakref.ref(one) for one in (module, x, module.weight)]
    del module, x
    gc.collect()
    assert [reference() for reference in held] == [None, None, None]
    assert mode.get_total_counts() == 1
    with pytest.raises(RuntimeError, match="no longer exists"):
        mode.__enter__()
    assert _debug_mode_observer.get() is None

"""KeyboardInterrupt, wherever it strikes: the tree stays right and nothing is left behind."""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.core.dtensor import tensor_redistribution
from hyper_parallel.core.dtensor.debug import CommDebugMode
from hyper_parallel.core.dtensor.debug._call_records import walk
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer
from hyper_parallel.platform import get_platform

ALL_REDUCE = "differentiable_all_reduce"
PAIR = SimpleNamespace(size=lambda: 2)
X = torch.ones(2)


def interrupt(*_: Any, **_named: Any) -> Any:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


@pytest.fixture(name="all_reduce", autouse=True)
def fixture_all_reduce(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """An all-reduce of the platform that needs no other rank."""
    cls = type(get_platform())
    monkeypatch.setattr(cls, ALL_REDUCE, staticmethod(lambda data, op, group: data))
    return lambda x: cls.differentiable_all_reduce(x, "sum", PAIR)


@pytest.fixture(autouse=True)
def fixture_nothing_left(all_reduce: Any) -> Any:
    """After each test: no patch, no observer, torch's own module call."""
    del all_reduce
    cls = type(get_platform())
    method, call = cls.__dict__[ALL_REDUCE], vars(nn.Module)["_call_impl"]
    yield
    assert cls.__dict__[ALL_REDUCE] is method and vars(nn.Module)["_call_impl"] is call
    assert _debug_mode_observer.get() is None
    assert tensor_redistribution._redistribute_observer is None


def outline(mode: CommDebugMode) -> list[str]:
    """The tree, one line a record."""
    return [f"{'  ' * depth}{getattr(record, 'module_fqn', record.label)}"
            for depth, record in walk(mode._root_records)]


def dispatch(work: Callable[[], Any]) -> None:
    """What ``OpDispatcher.dispatch`` does with an observer."""
    observer = _debug_mode_observer.get()
    observer._on_op_dispatch_enter("linear", None, (X,), {})
    try:
        work()
    finally:
        observer._on_op_dispatch_exit("linear", None)


class Child(nn.Module):
    """Communicates and does something more, in a module of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work
        self.inner = Reduce()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One all-reduce, and the work."""
        x = self.inner(x)
        self.work()
        return x


class Reduce(nn.Module):
    """Communicates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One all-reduce."""
        return type(get_platform()).differentiable_all_reduce(x, "sum", PAIR)


class Parent(nn.Module):
    """Goes on when its first child is interrupted."""

    def __init__(self, work: Callable[[], Any], error: type[BaseException]) -> None:
        super().__init__()
        self.bad, self.good, self.error = Child(work), Reduce(), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The children's composition, an all-reduce of its own between them."""
        try:
            x = self.bad(x)
        except self.error:
            x = type(get_platform()).differentiable_all_reduce(x, "sum", PAIR)
        return self.good(x)


WHOLE = ["(root)", "  bad", "    bad.inner", "      Collective", "  Collective", "  good",
         "    Collective"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_child_that_is_interrupted_owns_nothing_more(error: type[BaseException]) -> None:
    def stop() -> None:
        raise error

    model = Parent(stop, error)
    for _ in range(2):
        with CommDebugMode(module=model) as mode:
            model(X)
            assert mode._call_stack == []
        assert outline(mode) == WHOLE
    assert all(not module._forward_hooks and not module._forward_pre_hooks
               and not module._forward_hooks_always_called for module in model.modules())


def test_modes_in_each_other_share_the_watch() -> None:
    model = Parent(interrupt, KeyboardInterrupt)
    with CommDebugMode(module=model) as outer:
        with CommDebugMode(module=model) as inner:
            model(X)
        model(X)
    assert outline(outer) == outline(inner) == WHOLE


def test_inside_an_operator(all_reduce: Any) -> None:
    with CommDebugMode() as mode:
        with pytest.raises(KeyboardInterrupt):
            dispatch(interrupt)
        all_reduce(X)
    assert outline(mode) == ["Op", "Collective"] and mode.incomplete is None


def test_while_an_operator_is_recorded(all_reduce: Any) -> None:
    class Slow(torch.Tensor):
        """Its shape takes long."""

        shape = property(interrupt)

    with CommDebugMode() as mode:
        observer = _debug_mode_observer.get()
        with pytest.raises(KeyboardInterrupt):
            observer._on_op_dispatch_enter("linear", None, (X.as_subclass(Slow),), {})
        all_reduce(X)
        dispatch(lambda: all_reduce(X))
    assert outline(mode) == ["Op", "Collective", "Op", "  Collective"]


def test_inside_a_collective(all_reduce: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(get_platform())
    with monkeypatch.context() as patch:
        patch.setattr(cls, ALL_REDUCE, staticmethod(interrupt))
        with CommDebugMode() as mode:
            with pytest.raises(KeyboardInterrupt):
                dispatch(lambda: all_reduce(X))
            cls.broadcast(X, 0, get_platform().self_group())
            dispatch(lambda: None)
    assert outline(mode) == ["Op", "Op"] and mode.get_total_counts() == 0


def test_inside_the_recorder_of_a_collective(all_reduce: Any,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    with CommDebugMode() as mode:
        with monkeypatch.context() as patch:
            patch.setattr(mode, "_place", interrupt)
            with pytest.raises(KeyboardInterrupt):
                all_reduce(X)
        all_reduce(X)
    assert mode.get_total_counts() == 1 and outline(mode) == ["Collective"]


def test_while_a_mode_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Parent(interrupt, KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(model.good, "register_forward_hook", interrupt)
        with pytest.raises(KeyboardInterrupt):
            CommDebugMode(module=model).__enter__()
    assert all(not module._forward_hooks for module in model.modules())

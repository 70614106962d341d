"""Module boundaries: calls, errors, shared modules, and hooks that leave no trace."""
import copy
from types import SimpleNamespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.core.dtensor.debug import CommDebugMode
from hyper_parallel.core.dtensor.debug._call_records import AnnotateCall, walk
from hyper_parallel.core.dtensor.debug._module_tracker import ModuleTracker
from hyper_parallel.platform import get_platform

ALL_REDUCE = "differentiable_all_reduce"
PAIR = SimpleNamespace(size=lambda: 2)


@pytest.fixture(name="all_reduce", autouse=True)
def fixture_all_reduce(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """An all-reduce of the platform that needs no other rank."""
    cls = type(get_platform())
    monkeypatch.setattr(cls, ALL_REDUCE, staticmethod(lambda data, op, group: data))
    return lambda x: cls.differentiable_all_reduce(x, "sum", PAIR)


class Reduce(nn.Module):
    """Communicates, and then raises if told so."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One all-reduce."""
        x = type(get_platform()).differentiable_all_reduce(x, "sum", PAIR)
        if self.error is not None:
            raise self.error("of the module")
        return x


class Parent(nn.Module):
    """Calls its children in order; errors of theirs are caught if ``patient``."""

    def __init__(self, patient: bool = False, **children: nn.Module) -> None:
        super().__init__()
        self.patient = patient
        self.order = list(children)
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The children's composition."""
        for name in self.order:
            try:
                x = getattr(self, name)(x)
            except ValueError:
                if not self.patient:
                    raise
        return x


def hook_tables(model: nn.Module) -> list[Any]:
    """All that registering a hook may change."""
    return [(name, {key: list(value.items()) for key, value in vars(module).items()
                    if "hook" in key and isinstance(value, dict)})
            for name, module in model.named_modules()]


def outline(mode: CommDebugMode) -> list[str]:
    """The tree, one line a record."""
    return [f"{'  ' * depth}{getattr(record, 'module_fqn', record.label)}"
            for depth, record in walk(mode._root_records)]


X = torch.ones(2)


def test_module_called_twice():
    model = Parent(fc=Reduce())
    model.order *= 2
    before = hook_tables(model)
    with CommDebugMode(module=model) as mode:
        model(X)
    assert outline(mode) == ["(root)", "  fc", "    Collective", "  fc", "    Collective"]
    assert mode.get_total_counts() == 2
    assert hook_tables(model) == before


def test_hooks_are_there_inside_only():
    model = Parent(fc=Reduce())
    model.fc.register_forward_hook(lambda *_: None)
    model.fc.register_forward_pre_hook(lambda *_: None)
    before = hook_tables(model)
    with CommDebugMode(module=model):
        assert hook_tables(model) != before
    assert hook_tables(model) == before


def test_child_that_raises_and_is_caught_does_not_own_its_sibling():
    model = Parent(patient=True, bad=Parent(deep=Reduce(ValueError)), good=Reduce())
    before = hook_tables(model)
    with CommDebugMode(module=model) as mode:
        model(X)
        assert mode._call_stack == []
    assert outline(mode) == ["(root)", "  bad", "    bad.deep", "      Collective",
                             "  good", "    Collective"]
    assert hook_tables(model) == before


def test_pre_hook_that_raises_leaves_the_module_closed():
    model = Parent(patient=True, bad=Reduce(), good=Reduce())

    def refuse(*_: Any) -> None:
        raise ValueError

    model.bad.register_forward_pre_hook(refuse)
    with CommDebugMode(module=model) as mode:
        model(X)
    assert outline(mode) == ["(root)", "  bad", "  good", "    Collective"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_that_is_not_caught_restores_everything(error):
    model = Parent(bad=Reduce(error))
    before = hook_tables(model)
    original = type(get_platform()).__dict__[ALL_REDUCE]
    mode = CommDebugMode(module=model)
    with pytest.raises(error, match="of the module"):
        with mode:
            model(X)
    assert hook_tables(model) == before
    assert type(get_platform()).__dict__[ALL_REDUCE] is original
    assert outline(mode) == ["(root)", "  bad", "    Collective"]
    model.bad.error = None
    with mode:
        model(X)
    assert outline(mode) == ["(root)", "  bad", "    Collective"] and mode.get_total_counts() == 1


def test_module_shared_under_two_names():
    shared = Reduce()
    model = Parent(one=shared, two=shared)
    before = hook_tables(model)
    with CommDebugMode(module=model) as mode:
        model(X)
    assert outline(mode) == ["(root)", "  one", "    Collective", "  one", "    Collective"]
    assert hook_tables(model) == before


def test_work_of_other_hooks_belongs_to_the_module(all_reduce):
    model = Parent(fc=nn.Identity())
    model.fc.register_forward_pre_hook(lambda _, args: all_reduce(args[0]))
    model.fc.register_forward_hook(lambda _, args, result: all_reduce(result))
    with CommDebugMode(module=model) as mode:
        model(X)
    assert outline(mode) == ["(root)", "  fc", "    Collective", "    Collective"]


def test_module_that_calls_itself():
    class Twice(Reduce):
        """Runs once inside itself."""

        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            if again:
                self(x, again=False)
            return super().forward(x)

    with CommDebugMode(module=Twice()) as mode:
        mode._get_module()(X)
    assert outline(mode) == ["(root)", "  (root)", "    Collective", "  Collective"]


def test_outer_mode_is_not_told_while_an_inner_one_is_active():
    model = Parent(fc=Reduce())
    with CommDebugMode(module=model) as outer:
        with CommDebugMode(module=model.fc) as inner:
            model(X)
        assert outer._call_stack == []
    assert outline(outer) == []
    assert outline(inner) == ["(root)", "  Collective"]


def test_inner_mode_inside_a_forward():
    class Watched(nn.Module):
        """Watches one of its two calls."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Reduce(), Reduce()
            self.mode = CommDebugMode()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Both calls."""
            with self.mode:
                x = self.first(x)
            return self.second(x)

    model = Watched()
    with CommDebugMode(module=model) as outer:
        model(X)
    assert outline(outer) == ["(root)", "  second", "    Collective"]
    assert outline(model.mode) == ["Collective"]


def test_mode_entered_and_left_inside_the_forward_it_traces():
    class Late(Reduce):
        """Is traced from its middle on."""

        mode: CommDebugMode | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mode is None:
                self.mode = CommDebugMode(module=self)
                self.mode.__enter__()
            return super().forward(x)

    model = Late()
    model.register_forward_hook(lambda *_: None)  # without any hook torch looks for none
    model(X)
    model(X)
    model.mode.__exit__(None, None, None)
    assert outline(model.mode) == ["Collective", "(root)", "  Collective"]


def test_copy_made_inside_does_not_report():
    model = Parent(fc=Reduce())
    with CommDebugMode(module=model) as mode:
        twin = copy.deepcopy(model)
    twin(X)
    with mode:
        twin(X)
    assert outline(mode) == ["Collective"]


def test_failed_installation_leaves_no_hook():
    class Refusing(nn.Module):
        """Takes no hook after its forward."""

        def register_forward_hook(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

    model = Parent(fc=Reduce(), bad=Refusing())
    before = hook_tables(model)
    original = type(get_platform()).__dict__[ALL_REDUCE]
    mode = CommDebugMode(module=model)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            mode.__enter__()
    assert hook_tables(model) == before
    assert type(get_platform()).__dict__[ALL_REDUCE] is original


def test_tracker_alone():
    events = []
    model = Parent(fc=Reduce())
    tracker = ModuleTracker(model, lambda name, kind: events.append((name, kind)))
    tracker.install()
    model(X)
    tracker.uninstall()
    model(X)
    assert events == [("(root)", "enter"), ("fc", "enter"), ("fc", "exit"), ("(root)", "exit")]


def test_parameters_as_they_were_at_entry():
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    with CommDebugMode(module=model) as mode:
        model[0].weight.requires_grad_(False)
    assert mode.get_parameter_info() == {"0.weight": {
        "shape": (2, 3), "dtype": "torch.float32", "requires_grad": True, "is_dtensor": False,
        "placements": None, "mesh_shape": None}}
    assert mode.get_sharding_info() == {}
    mode.get_parameter_info()["0.weight"].clear()
    assert mode.get_parameter_info()["0.weight"]["shape"] == (2, 3)


def test_annotate_records_are_entries():
    model = Parent(fc=Reduce())
    with CommDebugMode(module=model) as mode:
        model(X)
    events = [record.event_type for _, record in walk(mode._root_records)
              if isinstance(record, AnnotateCall)]
    assert events == ["enter", "enter"]

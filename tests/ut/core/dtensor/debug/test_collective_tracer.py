"""The tracer's patch: what counts as one call, and who may come and go in which order."""
import gc
import weakref
from typing import Any

import pytest

from hyper_parallel.core.dtensor.debug._collective_tracer import (
    COLLECTIVE_METHODS,
    CollectiveTracer,
)
from hyper_parallel.platform import get_platform

ALL_REDUCE = "differentiable_all_reduce"
ALL_TO_ALL = "differentiable_all_to_all"


@pytest.fixture(name="cls")
def fixture_cls() -> type:
    """A platform class that has two of the six methods."""

    class FakePlatform:
        """Adds where a platform would reduce."""

        @staticmethod
        def differentiable_all_reduce(data: int, op: str, group: Any) -> int:
            """Doubles."""
            del op, group
            return 2 * data

        @staticmethod
        def differentiable_all_to_all(input_data: int, output_shape: Any, group: Any) -> int:
            """Goes through another collective, as an adapter may."""
            del output_shape
            return FakePlatform.differentiable_all_reduce(input_data, "sum", group) + 1

    return FakePlatform


@pytest.fixture(name="names")
def fixture_names(cls: type) -> list[str]:
    """The methods that a tracer on the class was told of."""
    names: list[str] = []
    tracer = CollectiveTracer(lambda name, *_: names.append(name), cls)
    tracer.install()
    yield names
    tracer.uninstall()


def test_methods_that_a_class_lacks_are_skipped(cls, names):
    assert [name for name in COLLECTIVE_METHODS if name in cls.__dict__] == [
        ALL_TO_ALL, ALL_REDUCE]
    cls.differentiable_all_reduce(1, "sum", None)
    assert names == [ALL_REDUCE]


def test_collective_inside_a_collective_is_part_of_it(cls, names):
    assert cls.differentiable_all_to_all(3, (3,), None) == 7
    assert names == [ALL_TO_ALL]


def test_error_of_the_collective_reaches_the_caller_and_is_no_call(cls, names):
    with pytest.raises(TypeError, match="missing 1 required"):
        cls.differentiable_all_reduce(3, "sum")
    cls.differentiable_all_reduce(3, "sum", None)
    assert names == [ALL_REDUCE]


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_tracers_in_any_order(cls, first_out):
    original = cls.__dict__[ALL_REDUCE]
    heard: list[list[int]] = [[], []]
    tracers = [CollectiveTracer(lambda *call, out=out: out.append(call[3]), cls) for out in heard]
    for tracer in tracers:
        tracer.install()
        tracer.install()
    cls.differentiable_all_reduce(1, "sum", None)
    tracers[first_out].uninstall()
    cls.differentiable_all_reduce(2, "sum", None)
    tracers[1 - first_out].uninstall()
    tracers[first_out].uninstall()
    assert heard[first_out] == [2] and heard[1 - first_out] == [2, 4]
    assert cls.__dict__[ALL_REDUCE] is original


def test_a_tracer_may_be_installed_again(cls):
    heard: list[int] = []
    tracer = CollectiveTracer(lambda *call: heard.append(call[3]), cls)
    for data in (1, 2):
        tracer.install()
        cls.differentiable_all_reduce(data, "sum", None)
        tracer.uninstall()
        cls.differentiable_all_reduce(0, "sum", None)
    assert heard == [2, 4]


def test_keyboard_interrupt_of_the_callback_is_no_error(cls):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    tracer = CollectiveTracer(interrupt, cls)
    tracer.install()
    with pytest.raises(KeyboardInterrupt):
        cls.differentiable_all_reduce(1, "sum", None)
    tracer.uninstall()


def test_class_is_not_kept_alive():
    class Passing:
        """A platform that nobody else knows."""

        @staticmethod
        def differentiable_all_reduce(data: int, op: str, group: Any) -> int:
            """Does nothing."""
            del op, group
            return data

    tracer = CollectiveTracer(lambda *call: None, Passing)
    tracer.install()
    tracer.uninstall()
    reference = weakref.ref(Passing)
    del Passing, tracer
    gc.collect()
    assert reference() is None


def test_by_default_the_class_of_the_platform():
    cls = type(get_platform())
    before = {name: cls.__dict__[name] for name in COLLECTIVE_METHODS}
    tracer = CollectiveTracer(lambda *call: None)
    tracer.install()
    assert all(cls.__dict__[name] is not old for name, old in before.items())
    assert all(isinstance(cls.__dict__[name], staticmethod) for name in before)
    tracer.uninstall()
    assert all(cls.__dict__[name] is old for name, old in before.items())

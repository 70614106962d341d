"""Which framework get_platform() chooses, and what it says when it cannot."""
import importlib.util
import inspect
from typing import Any

import pytest

from hyper_parallel.platform import Platform, choice, get_platform
from hyper_parallel.platform.torch.platform import TorchPlatform

VARIABLE = "HYPER_PARALLEL_PLATFORM"
COLLECTIVES = (
    "differentiable_all_gather_concat", "differentiable_all_to_all",
    "differentiable_all_reduce", "differentiable_reduce_scatter",
    "differentiable_all_to_all_single", "differentiable_all_to_all_single_async")


def choose() -> Platform:
    """A fresh choice, without the one that is remembered."""
    return get_platform.__wrapped__()


@pytest.fixture(name="installed")
def _installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The frameworks that seem to be installed; tests change the set."""
    names = {"torch", "mindspore"}
    real = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        known = name not in ("torch", "mindspore")
        return real(name, *rest) if known else (object() if name in names else None)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return names


def test_one_instance() -> None:
    """Everybody gets the same object."""
    assert get_platform() is get_platform()
    assert isinstance(get_platform(), TorchPlatform)


@pytest.mark.parametrize("value", [None, "", "torch", " Torch "])
def test_torch_is_the_default(monkeypatch: pytest.MonkeyPatch, installed: set[str],
                              value: str | None) -> None:
    """When it is installed, or when it is named in any spelling."""
    assert installed == {"torch", "mindspore"}
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert type(choose()) is TorchPlatform


def test_mindspore_is_taken_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch,
                                                   installed: set[str]) -> None:
    """The adapter that the table names is loaded."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(choice._ADAPTERS, "mindspore", choice._ADAPTERS["torch"])
    installed.discard("torch")
    assert type(choose()) is TorchPlatform


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """ValueError: what may stand there, what stands there, what to do."""
    monkeypatch.setenv(VARIABLE, "jax")
    with pytest.raises(ValueError, match="must be one of torch, mindspore, got 'jax'; correct"):
        choose()


@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, installed: set[str],
                                           name: str) -> None:
    """RuntimeError that names it."""
    installed.discard(name)
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(RuntimeError, match=f"asks for {name}, which is not installed"):
        choose()


def test_no_framework_at_all(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> None:
    """RuntimeError that says what to install."""
    installed.clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="one of torch, mindspore, but none is installed"):
        choose()


def test_a_release_without_the_adapter(monkeypatch: pytest.MonkeyPatch,
                                       installed: set[str]) -> None:
    """RuntimeError, though the framework itself is installed."""
    assert "mindspore" in installed
    monkeypatch.setenv(VARIABLE, "mindspore")
    monkeypatch.setitem(choice._ADAPTERS, "mindspore",
                        ("hyper_parallel.platform.absent.platform", "Absent"))
    with pytest.raises(RuntimeError, match="no adapter for mindspore: set .*=torch"):
        choose()


def test_the_adapter_defines_every_method_itself() -> None:
    """As a staticmethod in its own class body, where a tracer finds and replaces it."""
    own = vars(TorchPlatform)
    for name, member in vars(Platform).items():
        if isinstance(member, staticmethod):
            assert isinstance(own.get(name), staticmethod), name
            assert inspect.signature(own[name]) is not None
    assert set(COLLECTIVES) <= set(own)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_signatures_of_the_collectives(name: str) -> None:
    """As the specification fixes them, the group in its place."""
    wanted = {
        "differentiable_all_gather_concat": ["data", "group", "concat_size", "concat_dim"],
        "differentiable_all_to_all": ["input_data", "output_shape", "group"],
        "differentiable_all_reduce": ["data", "op", "group"],
        "differentiable_reduce_scatter": ["data", "dev_num", "axis", "op", "group"],
        "differentiable_all_to_all_single": ["input_tensor", "input_splits", "output_splits",
                                             "group"],
        "differentiable_all_to_all_single_async": ["input_tensor", "input_splits",
                                                   "output_splits", "group"],
    }[name]
    assert list(inspect.signature(getattr(TorchPlatform, name)).parameters) == wanted
    assert list(inspect.signature(getattr(Platform, name)).parameters) == wanted


def test_a_framework_may_lack_the_uneven_exchange() -> None:
    """The default says so; it is not in a class that does not define it."""
    with pytest.raises(NotImplementedError, match="use differentiable_all_to_all"):
        Platform.differentiable_all_to_all_single(None, None, None, None)

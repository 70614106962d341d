"""The choice of the framework."""
import functools
import importlib
import importlib.util
import os

from hyper_parallel.platform.platform import Platform

_ADAPTERS = {
    "torch": ("hyper_parallel.platform.torch.platform", "TorchPlatform"),
    "mindspore": ("hyper_parallel.platform.mindspore.platform", "MindSporePlatform"),
}
_VARIABLE = "HYPER_PARALLEL_PLATFORM"


@functools.lru_cache(maxsize=None)
def get_platform() -> Platform:
    """The adapter of the framework in use; always the same object.

    ``HYPER_PARALLEL_PLATFORM`` names it, ``torch`` or ``mindspore``; it is read once. Without
    it the choice is torch if it is installed, else mindspore.

    Raises:
        ValueError: the variable holds another name.
        RuntimeError: the framework is not installed, or this release has no adapter for it.
    """
    name = os.environ.get(_VARIABLE, "").strip().lower()
    if not name:
        name = next((known for known in _ADAPTERS if importlib.util.find_spec(known)), "")
        if not name:
            raise RuntimeError(f"this library works on one of {', '.join(_ADAPTERS)}, but none "
                               f"is installed: install one, for example torch")
    if name not in _ADAPTERS:
        raise ValueError(f"{_VARIABLE} must be one of {', '.join(_ADAPTERS)}, got {name!r}; "
                         f"correct the variable or unset it")
    if importlib.util.find_spec(name) is None:
        raise RuntimeError(f"{_VARIABLE} asks for {name}, which is not installed here: "
                           f"install it, or set {_VARIABLE} to another of "
                           f"{', '.join(_ADAPTERS)}")
    module, class_name = _ADAPTERS[name]
    if importlib.util.find_spec(module.rpartition(".")[0]) is None:
        raise RuntimeError(f"this release has no adapter for {name}: "
                           f"set {_VARIABLE}=torch and install torch")
    return getattr(importlib.import_module(module), class_name)()

"""Tells when the forward of a module begins and ends."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.debug._call_records import placements_text
from hyper_parallel.core.dtensor.debug._tensor_infos import tensor_info
from hyper_parallel.core.dtensor.debug._thread_list import ThreadList
from hyper_parallel.platform import get_platform

platform = get_platform()

ROOT_NAME = "(root)"


class ModuleTracker:
    """Calls back when the forward of a module, or of any module inside it, begins and ends.

    A module that the tree holds under several names is known by the first one.

    Args:
        module: the module.
        callback: called as ``callback(name, "enter")`` and ``callback(name, "exit")``; the name
            of ``module`` itself is ``"(root)"``. Every "enter" is followed by its "exit" on the
            same thread, also when the forward raises.
        listening: asked at each beginning; where it says no, that call is not told at all.
    """

    def __init__(self, module: Any, callback: Callable[[str, str], None],
                 listening: Callable[[], bool] = lambda: True) -> None:
        self._module = module
        self._callback = callback
        self._listening = listening
        self._handles: list[Any] = []
        # While installed: the hook of each module by its identity, and what ends the watch.
        self._post_hooks: dict[int, Callable[..., None]] = {}
        self._end_watch: Callable[[], None] = lambda: None
        # The forwards that have begun, and whether their beginning was told.
        self._open: ThreadList[tuple[str, bool]] = ThreadList()

    def install(self) -> None:
        """Put a hook before and after the forward of each module."""
        for path, module in platform.named_modules(self._module):
            if id(module) in self._post_hooks:
                continue
            name = path or ROOT_NAME
            # The first pre-hook and the last post-hook: what other hooks do, such as moving a
            # tensor to the layout that a plan asks for, then belongs to the module as well.
            self._handles.append(
                module.register_forward_pre_hook(self._make_pre_hook(name), prepend=True))
            # Without always_call a module that raised would stay open, and its siblings' calls
            # would be told as its own.
            post_hook = self._make_post_hook(name)
            self._handles.append(module.register_forward_hook(post_hook, always_call=True))
            self._post_hooks[id(module)] = post_hook
        self._end_watch = platform.watch_interrupted_calls(self._on_interrupted)

    def uninstall(self) -> None:
        """Remove the hooks."""
        self._end_watch()
        while self._handles:
            self._handles.pop().remove()
        self._post_hooks.clear()

    def _on_interrupted(self, module: Any) -> None:
        """A KeyboardInterrupt or its like ended a module's call, and no hook did run."""
        post_hook = self._post_hooks.get(id(module))
        if post_hook is not None:
            post_hook()

    def _make_pre_hook(self, name: str) -> Callable[..., None]:
        def pre_hook(*_: Any) -> None:
            told = bool(self._handles) and self._listening()
            self._open.items.append((name, told))
            if told:
                self._callback(name, "enter")

        return pre_hook

    def _make_post_hook(self, name: str) -> Callable[..., None]:
        def post_hook(*_: Any) -> None:
            calls = self._open.items
            if calls and calls[-1][0] == name:  # nearly always
                if calls.pop()[1]:
                    self._callback(name, "exit")
                return
            # The hooks may have come while this forward was running: then it never began here.
            if all(name != other for other, _ in calls):
                return
            last = None
            while last != name:
                last, told = calls.pop()
                if told:
                    self._callback(last, "exit")

        return post_hook


def parameter_info(module: Any) -> dict[str, dict[str, Any]]:
    """Shape, dtype, gradient need and layout of each parameter, by qualified name."""
    infos = {}
    for name, parameter in platform.named_parameters(module):
        info = tensor_info(parameter)
        infos[name] = {
            "shape": info.shape,
            "dtype": info.dtype,
            "requires_grad": bool(parameter.requires_grad),
            "is_dtensor": info.is_dtensor,
            "placements": info.placements,
            "mesh_shape": info.mesh_shape,
        }
    return infos


def sharding_info(parameters: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The placements of the DTensors among ``parameter_info``'s parameters, as text."""
    return {name: placements_text(info["placements"]) for name, info in parameters.items()
            if info["is_dtensor"]}


def parameters_as_data(parameters: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """``parameter_info`` as plain data for JSON; placements become strings."""
    return {name: {**info, "placements": info["placements"] and [
        str(placement) for placement in info["placements"]]} for name, info in parameters.items()}

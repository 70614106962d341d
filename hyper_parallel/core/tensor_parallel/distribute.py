"""``distribute_module``: a module whose parameters a function of the user spreads."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, distribute_tensor
from hyper_parallel.core.tensor_parallel._record import Applied, applied_to, note
from hyper_parallel.platform import get_platform

platform = get_platform()

Partition = Callable[[str, Any, DeviceMesh], None]
OnInputs = Callable[[Any, tuple, DeviceMesh], Any]
OnOutputs = Callable[[Any, Any, DeviceMesh], Any]


class _OnInputs:
    """A user's function on the inputs as a function before the forward."""

    def __init__(self, function: OnInputs, mesh: DeviceMesh) -> None:
        self._function, self._mesh = function, mesh

    def __call__(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        changed = self._function(module, args, self._mesh)
        if changed is None:  # as a forward pre-hook that returns nothing
            return args, kwargs
        return changed if isinstance(changed, tuple) else (changed,), kwargs


class _OnOutputs:
    """A user's function on the outputs as a function after the forward."""

    def __init__(self, function: OnOutputs, mesh: DeviceMesh) -> None:
        self._function, self._mesh = function, mesh

    def __call__(self, module: Any, args: tuple, output: Any) -> Any:
        changed = self._function(module, output, self._mesh)
        return output if changed is None else changed


def distribute_module(module: Any, device_mesh: DeviceMesh,
                      partition_fn: Optional[Partition] = None,
                      input_fn: Optional[OnInputs] = None,
                      output_fn: Optional[OnOutputs] = None) -> Any:
    """Make every parameter and buffer of a module a DTensor.

    Args:
        module: the module; it is changed and returned.
        device_mesh: the mesh, of any number of axes.
        partition_fn: called as ``partition_fn(path, submodule, mesh)`` for the module and each
            submodule; it registers the parameters that it spreads anew, as DTensors.  Those that
            it leaves plain are replicated.
        input_fn: called as ``input_fn(module, args, mesh)`` before each forward; returns the
            positional arguments anew.
        output_fn: called as ``output_fn(module, output, mesh)`` after each forward; returns the
            output anew.

    Raises:
        TypeError: no module, no mesh, or a function that cannot be called.
        RuntimeError: the module is distributed already.
        Exception: what ``partition_fn`` raises; parameters and buffers are as before then.
    """
    _check(module, device_mesh, partition_fn=partition_fn, input_fn=input_fn, output_fn=output_fn)
    modules: dict[int, tuple[str, Any]] = {}
    for path, part in platform.named_modules(module):
        modules.setdefault(id(part), (path, part))
    with _unchanged_on_failure([part for _, part in modules.values()]):
        for path, part in modules.values() if partition_fn is not None else ():
            partition_fn(path, part, device_mesh)
        _replicate_the_rest([part for _, part in modules.values()], device_mesh)
    platform.wrap_forward(module, input_fn and _OnInputs(input_fn, device_mesh),
                          output_fn and _OnOutputs(output_fn, device_mesh))
    for _, part in modules.values():
        names = tuple(platform.own_parameters(part))
        if names or part is module:
            note(part, Applied(distribute_module, device_mesh, names))
    return module


def _check(module: Any, mesh: DeviceMesh, **functions: Optional[Callable]) -> None:
    if not isinstance(module, platform.Module):
        raise TypeError(f"distribute_module takes a module, but got a {type(module).__name__}.")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError("distribute_module needs a DeviceMesh of hyper_parallel, but got a "
                        f"{type(mesh).__name__}; make one with init_device_mesh.")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} is a function or None, but got {function!r}.")
    if any(applied.style is distribute_module for applied in applied_to(module)):
        raise RuntimeError("the module is distributed already; distribute_module is called once.")


@contextmanager
def _unchanged_on_failure(modules: list[Any]) -> Iterator[None]:
    """A context after whose failure the modules hold the parameters and buffers of before."""
    before = [(part, platform.own_parameters(part), platform.own_buffers(part))
              for part in modules]
    try:
        yield
    except BaseException:
        for part, parameters, buffers in before:
            for name, value in parameters.items():
                platform.replace_parameter(part, name, value)
            for name, value in buffers.items():
                platform.replace_buffer(part, name, value)
        raise


def _replicate_the_rest(modules: list[Any], mesh: DeviceMesh) -> None:
    """Replicate what is plain still; what is shared stays shared."""
    spread: dict[int, Any] = {}  # by the id of the plain one, which the caller keeps
    for part in modules:
        for name, value in platform.own_parameters(part).items():
            if not isinstance(value, DTensor):
                known = spread.get(id(value))
                spread[id(value)] = platform.replace_parameter(
                    part, name, distribute_tensor(value, mesh) if known is None else known)
        for name, value in platform.own_buffers(part).items():
            if not isinstance(value, DTensor):
                platform.replace_buffer(part, name, distribute_tensor(value, mesh))

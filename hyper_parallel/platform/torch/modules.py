"""PyTorch's modules as the library sees them; see ``module_adapter.py``."""
from functools import lru_cache
from typing import Any, Iterator, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from hyper_parallel.platform.interrupted_calls import InterruptedCalls
from hyper_parallel.platform.module_adapter import AfterForward, BeforeForward

Module = nn.Module
# The function below ``Module.__call__``.
interrupted_calls = InterruptedCalls(nn.Module, "_call_impl")


def layer_kind(module: Any) -> Optional[str]:
    """What kind of layer ``module`` is."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "transposed_linear" if _is_conv1d(module) else None


def _is_conv1d(module: Any) -> bool:
    """Whether it is GPT-2's layer from transformers, which that package calls Conv1D."""
    return type(module).__name__ == "Conv1D" and isinstance(module, nn.Module) and \
        getattr(module, "nf", None) == getattr(module, "weight", _NO_WEIGHT).shape[-1]


_NO_WEIGHT = torch.empty(0)


def obstacle_to_splitting(module: Any) -> Optional[str]:
    """Why a layer cannot be split."""
    if isinstance(module, LazyModuleMixin):
        return "its sizes are not known before its first forward; run it once before"
    if isinstance(module, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                return (f"it was made with {option}, which looks at whole rows or whole batches; "
                        "make it without")
    return None


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules under all their paths."""
    return module.named_modules(remove_duplicate=False)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once."""
    return module.named_parameters()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers."""
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def replace_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Put ``value`` in the place of a buffer."""
    module.register_buffer(name, value, name not in module._non_persistent_buffers_set)


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> nn.Parameter:
    """Put ``value`` in the place of a parameter."""
    if not isinstance(value, nn.Parameter):
        old = module.get_parameter(name)
        attributes = vars(old)
        value = nn.Parameter(value, requires_grad=old.requires_grad)
        vars(value).update(attributes)
    module.register_parameter(name, value)
    return value


def wrap_forward(module: nn.Module, before: Optional[BeforeForward],
                 after: Optional[AfterForward]) -> None:
    """Put the two closest to the forward, around those that are there already.

    They go into a subclass that the module becomes an instance of, since hooks would send every
    call through the slow half of ``Module.__call__``.  A module with a forward of its own, set on
    the instance, has hooks nevertheless.
    """
    if isinstance(module, _Boundary):
        earlier, later = module._boundary
        module._boundary = (*earlier, *_some(before)), (*later, *_some(after))
    elif "forward" not in vars(module):
        module.__class__ = _with_boundary(type(module))
        module._boundary = _some(before), _some(after)
    else:
        hooks = vars(module).setdefault(_HOOKS, [])
        if before is not None:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            # Before the user's hooks, but behind what is wrapped around the forward already.
            earlier = list(module._forward_hooks)
            hooks.append(module.register_forward_hook(after))
            for key in [key for key in earlier if all(key != hook.id for hook in hooks)]:
                module._forward_hooks.move_to_end(key)


def unwrap_forward(module: nn.Module) -> None:
    """Take away all that :func:`wrap_forward` put there."""
    for hook in vars(module).pop(_HOOKS, ()):
        hook.remove()
    if isinstance(module, _Boundary):
        module.__class__ = type(module).__bases__[1]
        del module._boundary


_HOOKS = "_hyper_parallel_hooks"


def _some(function: Any) -> tuple:
    return () if function is None else (function,)


class _Boundary(nn.Module):
    """Mixin of a module class: its forward between functions."""

    _boundary: tuple[tuple[BeforeForward, ...], tuple[AfterForward, ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before, after = self._boundary
        for prepare in before:
            args, kwargs = prepare(self, args, kwargs)
        output = super().forward(*args, **kwargs)
        for finish in after:
            output = finish(self, args, output)
        return output

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # The class has no name to be found under, so it is made again.
        base = type(self).__bases__[1]
        return (_new_with_boundary, (base,), *super().__reduce_ex__(protocol)[2:])


@lru_cache(maxsize=None)
def _with_boundary(cls: type) -> type:
    return type(cls.__name__, (_Boundary, cls), {
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__})


def _new_with_boundary(base: type) -> nn.Module:
    cls = _with_boundary(base)
    return cls.__new__(cls)

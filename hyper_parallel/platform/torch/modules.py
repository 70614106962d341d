"""PyTorch's modules as the library sees them; see ``module_adapter.py``."""
from functools import lru_cache
from typing import Any, Iterator, Optional

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from hyper_parallel.platform.module_adapter import AfterForward, BeforeForward

Module = nn.Module


def layer_kind(module: Any) -> Optional[str]:
    """What kind of layer ``module`` is."""
    if isinstance(module, nn.Linear):
        return "linear"
    return "embedding" if isinstance(module, nn.Embedding) else None


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


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


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
    """Put the two closest to the forward.

    They go into a subclass that the module becomes an instance of, since hooks would send every
    call through the slow half of ``Module.__call__``.  A module with a forward of its own, set on
    the instance, has hooks nevertheless.
    """
    if "forward" not in vars(module):
        module.__class__ = _with_boundary(type(module))
        module._boundary = (before, after)
        return
    if before is not None:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if after is not None:
        module.register_forward_hook(after, prepend=True)


class _Boundary(nn.Module):
    """Mixin of a module class: its forward between two functions."""

    _boundary: tuple[Optional[BeforeForward], Optional[AfterForward]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before, after = self._boundary
        if before is not None:
            args, kwargs = before(self, args, kwargs)
        output = super().forward(*args, **kwargs)
        return output if after is None else after(self, args, output)

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

"""PyTorch's modules as the library sees them; see ``module_adapter.py``."""
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
    """Put the two closest to the forward."""
    if before is not None:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if after is not None:
        module.register_forward_hook(after, prepend=True)

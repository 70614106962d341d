"""MindSpore's cells as the library sees them; see ``module_adapter.py``."""
from __future__ import annotations

from functools import lru_cache
from typing import Any, Iterator, Optional

from mindspore import Parameter, Tensor, mint, nn

from hyper_parallel.platform.interrupted_calls import InterruptedCalls
from hyper_parallel.platform.mindspore import graph_mode
from hyper_parallel.platform.module_adapter import AfterForward, BeforeForward

Module = nn.Cell
interrupted_calls = InterruptedCalls(nn.Cell, "__call__")

# ``nn.Embedding`` calls its weight by another name, as the cells' document does.
_WEIGHT_NAMES = {"embedding_table": "weight"}


def layer_kind(module: Any) -> Optional[str]:
    """What kind of layer ``module`` is."""
    if isinstance(module, (nn.Dense, mint.nn.Linear)):
        return "linear"
    return "embedding" if isinstance(module, (nn.Embedding, mint.nn.Embedding)) else None


def obstacle_to_splitting(module: Any) -> Optional[str]:
    """Why a layer cannot be split."""
    if isinstance(module, nn.Dense) and module.activation_flag:
        return "it applies an activation to its result, which may be a summand; call it yourself"
    if isinstance(module, mint.nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(module, option, None):
                return (f"it was made with {option}, which looks at whole rows or whole batches; "
                        "make it without")
    if isinstance(module, nn.Embedding) and module.use_one_hot:
        return "it was made with use_one_hot, which multiplies by the whole table; make it without"
    return None


def named_modules(module: nn.Cell, path: str = "") -> Iterator[tuple[str, nn.Cell]]:
    """Cells under all their paths."""
    yield path, module
    for name, child in module.name_cells().items():
        yield from named_modules(child, f"{path}.{name}" if path else name)


def own_parameters(module: nn.Cell) -> dict[str, Parameter]:
    """A cell's own parameters."""
    return {_WEIGHT_NAMES.get(name, name): parameter
            for name, parameter in module._params.items() if parameter is not None}


def named_parameters(module: nn.Cell) -> Iterator[tuple[str, Parameter]]:
    """Each parameter once, by the path of its cell and its name there."""
    seen = set()
    for path, cell in named_modules(module):
        for name, parameter in cell._params.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def replace_parameter(module: nn.Cell, name: str, value: Tensor) -> Parameter:
    """Put ``value`` in the place of a parameter; its name in checkpoints stays."""
    graph_mode.forget_graphs()
    name = next((own for own, known in _WEIGHT_NAMES.items()
                 if known == name and own in module._params), name)
    if not isinstance(value, Parameter):
        old = module._params[name]
        value = Parameter(value, name=old.name, requires_grad=old.requires_grad)
    module._params[name] = value
    return value


def own_buffers(module: nn.Cell) -> dict[str, Tensor]:
    """A cell's own buffers."""
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


def replace_buffer(module: nn.Cell, name: str, value: Tensor) -> None:
    """Put ``value`` in the place of a buffer."""
    module._buffers[name] = value


def wrap_forward(module: nn.Cell, before: Optional[BeforeForward],
                 after: Optional[AfterForward]) -> None:
    """Put the two closest to ``construct``, in a subclass that the cell becomes one of."""
    graph_mode.forget_graphs()
    first, last = getattr(module, "_boundary", ((), ()))
    if not isinstance(module, _Boundary):
        object.__setattr__(module, "__class__", _with_boundary(type(module)))
    object.__setattr__(module, "_boundary", ((*first, *([before] if before else [])),
                                             (*last, *([after] if after else []))))


def unwrap_forward(module: nn.Cell) -> None:
    """Take away all that :func:`wrap_forward` put there."""
    if isinstance(module, _Boundary):
        object.__setattr__(module, "__class__", type(module).__bases__[1])
        object.__delattr__(module, "_boundary")


class _Boundary(nn.Cell):
    """Mixin of a cell's class: its ``construct`` between functions."""

    _boundary: tuple[tuple[BeforeForward, ...], tuple[AfterForward, ...]]

    __parameter__ = graph_mode.NOT_A_PARAMETER  # asked for by the graph compiler alone

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """The cell's own ``construct``, with what comes before and after."""
        before, after = self._boundary
        for prepare in before:
            args, kwargs = prepare(self, args, kwargs)
        output = super().construct(*args, **kwargs)
        for finish in after:
            output = finish(self, args, output)
        return output


@lru_cache(maxsize=None)
def _with_boundary(cls: type) -> type:
    return type(cls.__name__, (_Boundary, cls), {
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__})

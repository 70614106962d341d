"""What an error of the framework does not know: the global shapes and layouts of the arguments."""
from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform import get_platform

_Tensor = get_platform().Tensor
_BEGIN = "In the operator "


def note_arguments(error: BaseException, name: str, args: Sequence[Any],
                   kwargs: Mapping[str, Any]) -> None:
    """Add a note to an error that an operator raised; nothing before Python 3.11.

    An operator that is made of others is noted where it failed, and no second time.
    """
    add_note = getattr(error, "add_note", None)
    if add_note is None or any(note.startswith(_BEGIN)
                               for note in getattr(error, "__notes__", ())):
        return
    lines = [line for place, value in (*enumerate(args), *kwargs.items())
             for line in _describe(f"argument {place}", value)]
    add_note("\n  ".join([f"{_BEGIN}{name!r} on DTensors (global shapes; a message of the "
                          "framework may speak of this rank's parts):", *lines]))


def _describe(place: str, value: Any) -> Iterator[str]:
    if isinstance(value, DTensor):
        yield (f"{place}: {tuple(value._spec.shape)} as {value._spec.layout!r} on "
               f"{value._spec.layout.device_mesh!r}")
    elif isinstance(value, _Tensor):
        yield f"{place}: plain tensor {tuple(value.shape)}, replicated"
    elif isinstance(value, (tuple, list)) and any(isinstance(one, _Tensor) for one in value):
        for index, one in enumerate(value):
            yield from _describe(f"{place}[{index}]", one)
    elif isinstance(value, (int, float, str, tuple, list, slice)) or value is None:
        yield f"{place}: {value!r}"

"""What an error of the framework does not know: the global shapes and layouts of the arguments."""
from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping, Sequence

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform import get_platform

platform = get_platform()
_Tensor = platform.Tensor
_BEGIN = "In the operator "


def tell_globally(error: Exception, func: Callable, name: str, args: Sequence[Any],
                  kwargs: Mapping[str, Any]) -> None:
    """Have an error that an operator raised speak of the whole tensors.

    Where the framework refuses these as well, its words about them take the place of those about
    this rank's parts. A note tells the global shapes and layouts (none before Python 3.11). An
    operator that is made of others is noted where it failed, and no second time.
    """
    if any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        return
    of_parts = str(error)
    refused = platform.refusal(func, args, kwargs)
    if refused is not None and type(refused) is type(error) and str(refused) != of_parts:
        error.args = refused.args
        note_arguments(error, name, args, kwargs)
        _add(error, f"Of this rank's parts it says: {of_parts}")
    else:
        note_arguments(error, name, args, kwargs)
        if refused is None:
            _add(error, "The message may speak of this rank's parts of them.")


def note_arguments(error: BaseException, name: str, args: Sequence[Any],
                   kwargs: Mapping[str, Any]) -> None:
    """Add a note with the operator's arguments, global shapes and layouts, to an error."""
    lines = [line for place, value in (*enumerate(args), *kwargs.items())
             for line in _describe(f"argument {place}", value)]
    _add(error, "\n  ".join([f"{_BEGIN}{name!r} on DTensors of these global shapes:", *lines]))


def _add(error: BaseException, note: str) -> None:
    add_note = getattr(error, "add_note", None)
    if add_note is not None:
        add_note(note)


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

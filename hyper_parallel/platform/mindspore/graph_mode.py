"""DTensors and MindSpore's graph compilers keep apart.

A DTensor is this rank's part wearing a layout (``dtensor_base.py``). The compilers, behind ``jit``,
``GRAPH_MODE`` and ``export``, would take it for an ordinary tensor: the graph would compute with
the part as though it were the whole, and send nothing. So whoever compiles is watched, and what met
a DTensor is refused and not kept.

How it is known: a compiler asks every object that it comes across, however deep in arguments,
globals or cells, whether it has ``__parameter__``. Operators in PyNative mode do not ask, so this
costs them nothing. The classes of DTensors and of parallel cells tell of it (``PARAMETER``).
"""
from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, Callable, Iterable, Optional

from mindspore import context, nn
from mindspore.graph import api, jit_begin_end, jit_trace
from mindspore.graph._parse.parser import Parser
from mindspore.graph._utils.pijit_context import PIJitCaptureContext

_RULE = "hyper_parallel works in MindSpore's PyNative mode only"
_WHY = ("a compiled graph would compute with this rank's part of a DTensor as though it were the "
        "whole")
_TO_PYNATIVE = "call mindspore.set_context(mode=mindspore.PYNATIVE_MODE)"
_WITHOUT_JIT = "take mindspore.jit away from it, or give it plain tensors (to_local, full_tensor)"


class _Watches(threading.local):
    """What the compilers that run on a thread met first, the innermost compiler last.

    None stands for one that may meet DTensors.
    """

    def __init__(self) -> None:
        self.met: list[Optional[list[Any]]] = []


_watches = _Watches()


def compiler_met(thing: Any) -> None:
    """A compiler, if one is watched, came across a DTensor or a cell that works with some."""
    met = _watches.met[-1] if _watches.met else None
    if met is not None and not met:
        met.append(thing)


def _not_a_parameter(thing: Any) -> None:
    compiler_met(thing)
    raise AttributeError("__parameter__")


# What the classes have as ``__parameter__``: it exists for parameters, and not for others.
PARAMETER, NOT_A_PARAMETER = property(compiler_met), property(_not_a_parameter)


def graph_mode() -> bool:
    """Whether the current mode is GRAPH_MODE."""
    return context._context().get_mode() == context.GRAPH_MODE


def require_eager() -> None:
    """Raise in GRAPH_MODE; see ``Platform.require_eager``."""
    if graph_mode():
        raise RuntimeError(f"{_RULE}, but the current mode is GRAPH_MODE: {_WHY}. To mend it, "
                           f"{_TO_PYNATIVE} before you make meshes and DTensors.")


def _shown(thing: Any) -> str:
    spec = getattr(thing, "_spec", None)
    if spec is not None:
        return f"a DTensor of shape {tuple(spec.shape)}"
    return f"the parallel cell {type(thing).__name__}" if isinstance(thing, nn.Cell) else \
        f"{getattr(thing, '__name__', type(thing).__name__)} of this library"


class _Watch:
    """A context in which a compiler runs; it raises at its end if that met a DTensor.

    Args:
        compiled: what is compiled, for the error.
        forget: called before it raises; the result must not be found again.
    """

    def __init__(self, compiled: str, forget: Callable[[], None]) -> None:
        self._compiled, self._forget = compiled, forget

    def __enter__(self) -> "_Watch":
        permitted = _watches.met and _watches.met[-1] is None
        _watches.met.append(None if permitted else [])
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], _: Any) -> None:
        met = _watches.met.pop()
        if met and (error is None or isinstance(error, Exception)):
            self._forget()
            raise RuntimeError(
                f"{_RULE}, but {self._compiled} was to be compiled and uses {_shown(met[0])}: "
                f"{_WHY}. To mend it, {_TO_PYNATIVE if graph_mode() else _WITHOUT_JIT}.") from error


class Permitted:
    """A context in which graphs of local tensors are right, as an optimizer's are."""

    def __enter__(self) -> None:
        # In GRAPH_MODE the gradients that it would take cannot be, and its cell fails.
        _watches.met.append([] if graph_mode() else None)

    def __exit__(self, *error: Any) -> None:
        _watches.met.pop()


# ---- from the source: jit, and every cell in GRAPH_MODE ----

_native_compile = api._JitExecutor.compile
_native_name = Parser.get_namespace_symbol
_native_compile_cell = api._CellGraphExecutor.compile


def forget_graphs() -> None:
    """Let every function be compiled anew at its next call, since what it uses has changed."""
    api.ms_compile_cache.clear()


def _compile(executor: Any, method_name: str, *args: Any, **kwargs: Any) -> str:
    """Called for each call of a function, with or without a graph for such arguments."""
    with _Watch(executor.fn.__qualname__, forget_graphs):
        return _native_compile(executor, method_name, *args, **kwargs)


def _compile_cell(executor: Any, cell: Any, *args: Any, **kwargs: Any) -> Any:
    with _Watch(f"the cell {type(cell).__name__}", cell.compile_cache.clear):
        return _native_compile_cell(executor, cell, *args, **kwargs)


def _name_in_source(reader: Any, name: str) -> tuple[Any, ...]:
    """What a name in the source stands for: that may not be a part of the library either."""
    found = _native_name(reader, name)
    if str(getattr(found[2], "__module__", "")).startswith("hyper_parallel.core."):
        compiler_met(found[2])
    return found


# ---- from the bytecode, while the function runs ----

_native_enter = PIJitCaptureContext.__enter__
_native_exit = PIJitCaptureContext.__exit__


def _enter(capture: Any) -> None:
    function = capture.fn

    def forget() -> None:
        function.__code__ = function.__code__.replace()  # to the old one the graph belongs
        capture._init_arg = iter([capture.config])

    capture.__dict__.setdefault("_watching", []).append(
        _Watch(function.__qualname__, forget).__enter__())
    _native_enter(capture)


def _exit(capture: Any, *error: Any) -> None:
    _native_exit(capture, *error)
    capture._watching.pop().__exit__(*error)


# ---- from the operators that a function runs ----

_native_begin = jit_trace._jit_trace_begin
_native_end = jit_trace._jit_trace_end
_native_preprocess = jit_trace.TraceJitContext.args_preprocess


class _Trace(threading.local):
    """The watch over what is traced on a thread; there is one trace at most."""

    watch: Optional[_Watch] = None


_trace = _Trace()


def _begin(name: str, *args: Any, **kwargs: Any) -> bool:
    watch = _Watch(name.partition("#")[0], jit_trace._trace_compile_cache.clear)
    with watch:
        _ask(args)  # before anything is begun
    if _trace.watch is not None:  # a trace that never came to its end
        _watches.met.pop()
    _trace.watch = watch.__enter__()
    return _native_begin(name, *args, **kwargs)


def _ask(things: Iterable[Any]) -> None:
    for thing in things:
        if isinstance(thing, (tuple, list, dict)):
            _ask(thing.values() if isinstance(thing, dict) else thing)
        else:
            hasattr(thing, "__parameter__")


def _preprocess(trace: Any, name: str, result: Any, *args: Any) -> Any:
    _ask(args)  # the operands of each operator in turn
    return _native_preprocess(trace, name, result, *args)


def _end(*outputs: Any, **kwargs: Any) -> Any:
    watch, _trace.watch = _trace.watch, None
    with ExitStack() as at_end:
        at_end.push(watch)
        return _native_end(*outputs, **kwargs)


def install() -> None:
    """Watch MindSpore's compilers."""
    api._JitExecutor.compile = _compile
    api._CellGraphExecutor.compile = _compile_cell
    Parser.get_namespace_symbol = _name_in_source
    PIJitCaptureContext.__enter__ = _enter
    PIJitCaptureContext.__exit__ = _exit
    jit_trace.TraceJitContext.args_preprocess = _preprocess
    for module in (jit_trace, jit_begin_end):
        module._jit_trace_begin, module._jit_trace_end = _begin, _end

"""``CommDebugMode``: which module and which operator caused which collective.

How an event arrives:

* ``OpDispatcher.dispatch`` reads ``_debug_mode_observer`` and tells the mode in it when an
  operator begins and ends;
* redistribution and the platform's collectives tell the ``EventRouter``, which hands on to the
  innermost mode;
* ``ModuleTracker`` tells the mode that made it when a module's forward begins and ends.

``Recorder`` turns them into a tree of records, and this class adds entry and exit, the questions
one may ask, and the output.
"""
from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from hyper_parallel.core.dtensor.debug._module_tracker import (
    ModuleLike,
    ModuleTracker,
    parameter_info,
    sharding_info,
)
from hyper_parallel.core.dtensor.debug._call_tree import CallTree
from hyper_parallel.core.dtensor.debug._recorder import Recorder
from hyper_parallel.core.dtensor.debug._render import (
    records_as_data,
    tracing_table,
    without_ansi,
    write_text,
)
from hyper_parallel.core.dtensor.debug._router import router
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer

logger = logging.getLogger(__name__)

_TABLE_LEVEL = 1
_MODULE_LEVEL = 2

FileName = str | os.PathLike


class CommDebugMode(Recorder):
    """Records every operator the dispatcher handles and every collective the platform issues.

    ::

        with CommDebugMode(module=model) as mode:
            model(x).sum().backward()
        print(mode.get_comm_counts())            # {'differentiable_all_reduce': 2}
        print(mode.generate_comm_debug_tracing_table(noise_level=2))

    Where modes are nested only the innermost receives events. Modes may exit in any order and on
    any thread. A mode may be used again after its exit; entering clears what it held. Collectives
    of the backward pass are recorded under the forward operator whose gradient needs them.
    Recording communicates nothing, changes no result, and after the exit no tensor, parameter or
    module is held.

    Args:
        module: a module whose forward calls, and those of the modules inside it, are recorded as
            the boundaries that ``noise_level=2`` shows.

    Raises:
        TypeError: ``module`` is no module.
    """

    def __init__(self, module: ModuleLike | None = None) -> None:
        super().__init__()
        if module is not None and not isinstance(module, ModuleLike):
            raise TypeError(
                f"CommDebugMode traces a module (such as torch.nn.Module), but got {module!r} "
                f"({type(module).__name__}); leave it out to trace operators and collectives only.")
        # Strong until the first exit, weak from then on.
        self._get_module: Callable[[], ModuleLike | None] | None = (
            None if module is None else lambda: module)
        self._parameters: dict[str, dict[str, Any]] = {}
        self._undo: ExitStack | None = None

    def __enter__(self) -> CommDebugMode:
        """Clear what was recorded and begin to record.

        Raises:
            RuntimeError: this object is active already, or its module is gone.
        """
        if self._undo is not None:
            raise RuntimeError(
                "this CommDebugMode is active already, and entering it again would clear what it "
                "has recorded; make another CommDebugMode() for the inner block.")
        module = self._get_module and self._get_module()
        if module is None and self._get_module is not None:
            raise RuntimeError(
                "the module of this CommDebugMode no longer exists, and a mode keeps none alive "
                "after its exit; make a CommDebugMode(module=...) for the new one.")
        outer = _debug_mode_observer.get()
        self._enclosing = (outer, *outer._enclosing) if isinstance(outer, Recorder) else ()
        self._tree = CallTree()
        self._failure = None
        self._parameters = {} if module is None else parameter_info(module)
        with ExitStack() as undo:
            self._closed = False
            undo.callback(self._close)
            _debug_mode_observer.set(self)
            router.enter(self)
            undo.callback(router.leave, self)
            if module is not None:
                tracker = ModuleTracker(module, self._on_module_event,
                                        lambda: router.receiver() is self)
                undo.callback(tracker.uninstall)
                tracker.install()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Stop recording and leave no hook, patch or variable behind.

        Raises:
            RuntimeError: the mode is not active.
        """
        if self._undo is None:
            raise RuntimeError("this CommDebugMode is not active; enter it with a `with` block.")
        undo, self._undo = self._undo, None
        undo.close()
        if self._get_module is not None:
            self._get_module = weakref.ref(self._get_module())

    def _close(self) -> None:
        """Receive no more, and give the variable to whoever is innermost now.

        A token of the variable would restore what was there at the entry, which may be a mode
        that has exited since.
        """
        self._closed = True
        self._tree.makers.forget_all()
        if _debug_mode_observer.get() is self:
            _debug_mode_observer.set(self.still_open())

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    @property
    def incomplete(self) -> str | None:
        """The first error that happened while recording, or None for a complete trace."""
        return self._failure

    def get_comm_counts(self) -> dict[str, int]:
        """Number of collectives by name of the platform's method, forward and backward."""
        return dict(self._comm_counts)

    def get_total_counts(self) -> int:
        """Number of collectives."""
        return sum(self._comm_counts.values())

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """The module's parameters as they were at the entry, by qualified name.

        Each one has ``shape`` (global for a DTensor), ``dtype``, ``requires_grad``,
        ``is_dtensor``, ``placements`` and ``mesh_shape`` (None for a plain one). Empty without a
        module.
        """
        return {name: dict(info) for name, info in self._parameters.items()}

    def get_sharding_info(self) -> dict[str, Any]:
        """The placements of the module's DTensor parameters at the entry, by qualified name.

        ``"Shard(dim=1)"`` on a mesh of one axis, ``"(Shard(dim=0), Replicate())"`` on more. Empty
        without a module.
        """
        return dict(sharding_info(self._parameters))

    def generate_comm_debug_tracing_table(self, noise_level: int | None = None) -> str:
        """The trace as a table of text.

        Args:
            noise_level: 0 shows collectives, 1 (the default) operators too, 2 the boundaries of
                modules too (this needs ``module``, else a warning is logged), 3 redistributions
                too.

        Raises:
            TypeError: the level is no int.
            ValueError: the level is negative.
        """
        level = self._checked_level(noise_level, _TABLE_LEVEL)
        table = tracing_table(self._root_records, level)
        return table if self._failure is None else f"{table}\n(incomplete: {self._failure})"

    generate_tracing_table = generate_comm_debug_tracing_table

    def log_comm_debug_tracing_table_to_file(self, file_name: FileName = "comm_mode_log.txt",
                                             noise_level: int | None = None) -> None:
        """Write the table to a file, without terminal escape sequences.

        Raises:
            OSError: the file cannot be written; what it held before is still there.
        """
        table = self.generate_comm_debug_tracing_table(noise_level)
        write_text(file_name, without_ansi(table) + "\n")

    def generate_json_dump(self, file_name: FileName = "comm_mode_log.json",
                           noise_level: int | None = None) -> None:
        """Write the trace as JSON.

        The object has ``comm_counts``, ``total_counts``, ``sharding_info`` and ``records``, a
        nested list; and ``incomplete``, the error, when one happened while recording.

        Args:
            file_name: the file.
            noise_level: as for the table, but 2 by default. What stands inside a record that the
                level hides moves up.

        Raises:
            OSError: the file cannot be written; what it held before is still there.
        """
        level = self._checked_level(noise_level, _MODULE_LEVEL)
        data = {
            "comm_counts": self.get_comm_counts(),
            "total_counts": self.get_total_counts(),
            "sharding_info": self.get_sharding_info(),
            "records": records_as_data(self._root_records, level),
        }
        if self._failure is not None:
            data["incomplete"] = self._failure
        write_text(file_name, json.dumps(data, indent=2) + "\n")

    def _checked_level(self, noise_level: int | None, default: int) -> int:
        if noise_level is None:
            return default
        if not isinstance(noise_level, int) or isinstance(noise_level, bool):
            raise TypeError(f"noise_level is an int from 0 to 3 or None, but got {noise_level!r} "
                            f"({type(noise_level).__name__}).")
        if noise_level < 0:
            raise ValueError(f"noise_level is 0 or more (3 shows everything), but got "
                             f"{noise_level}.")
        if noise_level >= _MODULE_LEVEL and self._get_module is None:
            logger.warning(
                "noise_level=%d shows no module boundaries, since this CommDebugMode was made "
                "without a module; write CommDebugMode(module=model).", noise_level)
        return noise_level

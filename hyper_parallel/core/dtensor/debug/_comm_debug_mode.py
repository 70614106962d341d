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

import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from hyper_parallel.core.dtensor.debug._fingerprints import FingerprintTaker
from hyper_parallel.core.dtensor.debug._module_tracker import (
    ROOT_NAME,
    ModuleLike,
    ModuleTracker,
    parameter_info,
)
from hyper_parallel.core.dtensor.debug._call_tree import CallTree
from hyper_parallel.core.dtensor.debug._recorder import Recorder
from hyper_parallel.core.dtensor.debug._router import router
from hyper_parallel.core.shard._op_dispatch import _debug_mode_observer
from hyper_parallel.platform import get_platform

platform = get_platform()
logger = logging.getLogger(__name__)


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
        max_records: how many records to keep at most; None keeps all. Counts, bytes and summaries
            take in those that are dropped, tables and files say how many they are.

        fingerprints: whether to note the norm and combined bits of every operator's results and
            of every collective's result, of an asynchronous one when the program waits for it.
            It reads all of them, and waits for the device.

    Raises:
        TypeError: ``module`` is no module, or ``max_records`` no int.
        ValueError: ``max_records`` is negative.
    """

    def __init__(self, module: ModuleLike | None = None, *, max_records: int | None = None,
                 fingerprints: bool = False) -> None:
        super().__init__()
        self._takes_fingerprints = bool(fingerprints)
        _check_bound(max_records)
        self._max_records = max_records
        if module is not None and not isinstance(module, ModuleLike):
            raise TypeError(
                f"CommDebugMode traces a module (such as torch.nn.Module), but got {module!r} "
                f"({type(module).__name__}); leave it out to trace operators and collectives only.")
        # Strong until the first exit, weak from then on.
        self._get_module: Callable[[], ModuleLike | None] | None = (
            None if module is None else lambda: module)
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
        self._tree = CallTree(self._max_records)
        self._rank, self._world_size = platform.get_rank(), platform.get_world_size()
        self._taker = FingerprintTaker() if self._takes_fingerprints else None
        self._failure = None
        self._parameters = {} if module is None else parameter_info(module)
        self._module_of_id = {} if module is None else {
            id(parameter): name.rpartition(".")[0] or ROOT_NAME
            for name, parameter in module.named_parameters()}
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
        self._module_of_id = {}
        if _debug_mode_observer.get() is self:
            _debug_mode_observer.set(self.still_open())

    def _warn_of_level(self, noise_level: int) -> None:
        if self._get_module is None:
            logger.warning(
                "noise_level=%d shows no module boundaries, since this CommDebugMode was made "
                "without a module; write CommDebugMode(module=model).", noise_level)


def _check_bound(max_records: int | None) -> None:
    if max_records is None:
        return
    if not isinstance(max_records, int) or isinstance(max_records, bool):
        raise TypeError(f"max_records is a number of records or None, but got {max_records!r} "
                        f"({type(max_records).__name__}).")
    if max_records < 0:
        raise ValueError(f"max_records is 0 or more, but got {max_records}; None keeps all.")

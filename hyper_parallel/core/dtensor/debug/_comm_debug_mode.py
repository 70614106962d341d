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
import math
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from hyper_parallel.core.dtensor.debug._fingerprints import FingerprintTaker
from hyper_parallel.core.dtensor.debug._module_tracker import (
    ROOT_NAME,
    ModuleTracker,
    parameter_info,
)
from hyper_parallel.core.dtensor.debug._call_records import FULL_LEVEL
from hyper_parallel.core.dtensor.debug._comm_trace import CommTrace
from hyper_parallel.core.dtensor.debug._gathering import gather_texts
from hyper_parallel.core.dtensor.debug._operator_check import OperatorCheck
from hyper_parallel.core.dtensor.debug._recorder import Recorder
from hyper_parallel.core.dtensor.debug._router import router
from hyper_parallel.core.dtensor.debug._verifier import Verifier
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
        trace_native: also record what the program sends with ``torch.distributed`` itself:
            collectives, functional ones, messages between two ranks, barriers and objects, each
            once, with ``"native."`` before its name.
        verify: ``"online"`` compares, before each collective that is recorded, what the ranks of
            its group are about to do, and raises ``CollectiveMismatchError`` on all of them where
            they differ or where a rank does not come. All ranks enter such modes, in the same
            order.
        verify_timeout: seconds that a rank then waits for the others at each collective, and with
            ``check_replicas`` at each operator.
        max_records: how many records to keep at most; None keeps all. Counts, bytes and summaries
            take in those that are dropped, tables and files say how many they are.

        fingerprints: whether to note the norm and combined bits of every operator's results and
            of every collective's result, of an asynchronous one when the program waits for it.
            It reads all of them, and waits for the device.
        check_replicas: compares, before an operator runs, what the ranks hold of its arguments
            that are called replicated, plain tensors among them, and raises
            ``ReplicaMismatchError`` on all ranks where they differ; see
            :func:`~hyper_parallel.check_replicas`. All ranks enter such modes, in the same order.

    Raises:
        TypeError: ``module`` is no module, ``max_records`` no int, or ``verify_timeout`` no number.
        ValueError: ``max_records`` is negative, ``verify`` not known, or ``verify_timeout`` not
            above 0 and finite.
    """

    def __init__(self, module: Any | None = None, *, max_records: int | None = None,
                 trace_native: bool = False, verify: str | None = None,
                 verify_timeout: float = 60.0, fingerprints: bool = False,
                 check_replicas: bool = False) -> None:
        super().__init__()
        self._takes_fingerprints = bool(fingerprints)
        _check_bound(max_records)
        _check_verification(verify, verify_timeout)
        self._max_records = max_records
        self._traces_native = bool(trace_native)
        self._verify_timeout = None if verify is None else float(verify_timeout)
        self._check_timeout = float(verify_timeout) if check_replicas else None
        if module is not None and not isinstance(module, platform.Module):
            raise TypeError(
                f"CommDebugMode traces a module (such as torch.nn.Module), but got {module!r} "
                f"({type(module).__name__}); leave it out to trace operators and collectives only.")
        # Strong until the first exit, weak from then on.
        self._get_module: Callable[[], Any | None] | None = (
            None if module is None else lambda: module)
        self._undo: ExitStack | None = None
        self._has_run = False

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
        self._begin(self._max_records)
        self._has_run = True
        self._taker = FingerprintTaker() if self._takes_fingerprints else None
        self._parameters = {} if module is None else parameter_info(module)
        self._module_of_id = {} if module is None else {
            id(parameter): name.rpartition(".")[0] or ROOT_NAME
            for name, parameter in platform.named_parameters(module)}
        with ExitStack() as undo:
            if self._verify_timeout is not None:
                self._verifier = Verifier(self._verify_timeout)
            if self._check_timeout is not None:
                self._operator_check = OperatorCheck(self._check_timeout, self._parameter_path)
            undo.push(self._end_verification)
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
        undo.__exit__(kind, error, trace)
        if self._get_module is not None:
            self._get_module = weakref.ref(self._get_module())

    def gather(self, timeout: float = 60.0) -> list[CommTrace] | None:
        """The traces of all ranks, on rank 0 of the default group; None on the others.

        Every rank calls it, inside of the block or after it. It is no collective and is not
        recorded. What it gives is for ``check_traces`` or ``generate_json_dump``.

        Args:
            timeout: seconds that rank 0 waits for the others.

        Raises:
            RuntimeError: a rank never entered its mode or did not call this in time; it is named.
        """
        texts = gather_texts(self._as_json(FULL_LEVEL) if self._has_run else None, timeout)
        return texts and [CommTrace.of_text(text, f"of rank {rank}")
                          for rank, text in enumerate(texts)]

    def _close(self) -> None:
        """Receive no more, and give the variable to whoever is innermost now.

        A token of the variable would restore what was there at the entry, which may be a mode
        that has exited since.
        """
        self._closed = True
        self._tree.finish()
        self._module_of_id = {}
        if _debug_mode_observer.get() is self:
            _debug_mode_observer.set(self.still_open())

    def _end_verification(self, kind: type[BaseException] | None, error: BaseException | None,
                          trace: TracebackType | None) -> None:
        del kind, trace
        watches = self._verifier, self._operator_check
        self._verifier = self._operator_check = None
        for watch in watches:
            if watch is not None:
                with self._guard:
                    watch.leave(error)

    def _parameter_path(self, tensor: Any) -> str | None:
        """The path of a parameter of the traced module, also where ``tensor`` is its gradient."""
        module = self._get_module and self._get_module()
        if module is not None:
            for path, parameter in platform.named_parameters(module):
                if tensor is parameter:
                    return path
                if tensor is parameter.grad:
                    return f"gradient of {path}"
        return None

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


def _check_verification(verify: str | None, timeout: float) -> None:
    if verify not in (None, "online"):
        raise ValueError(f"verify is 'online' or None, but got {verify!r}.")
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise TypeError(f"verify_timeout is a number of seconds, but got {timeout!r} "
                        f"({type(timeout).__name__}).")
    if not 0 < timeout < math.inf:
        raise ValueError(f"verify_timeout is above 0 and finite, but got {timeout}.")

"""Fingerprints of tensors, and handles of what is done already."""
from __future__ import annotations

from typing import Any, Callable, Optional

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore import collectives
from hyper_parallel.platform.mindspore.dtensor_base import Undressed
from hyper_parallel.platform.mindspore.history import detach

_WORD = 8  # bytes


def fingerprint(tensor: Tensor) -> Optional[tuple[float, int]]:
    """The norm and the combined bits; see ``Platform.fingerprint``."""
    with Undressed():
        if tensor.is_meta:
            return None
        array = collectives.to_numpy(detach(tensor))
    if not array.size:
        return 0.0, 0
    wide = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    words = np.zeros(-(-data.size // _WORD), dtype=np.uint64)
    words.view(np.uint8)[:data.size] = data
    # An odd factor loses no bit, and a different one for each place tells a permutation.
    words *= np.arange(1, 2 * words.size, 2, dtype=np.uint64)
    return float(np.linalg.norm(wide)), int(np.bitwise_xor.reduce(words))


class FinishedWork:
    """The handle of a collective that is over."""

    def wait(self) -> bool:
        """Nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


class _WatchedWork(FinishedWork):
    """Another handle of the same collective."""

    def __init__(self, work: Any, callback: Callable[[], None]) -> None:
        self._work = work
        self._callback: Optional[Callable[[], None]] = callback

    def wait(self) -> bool:
        """Wait for the collective, then call back."""
        done = self._work.wait()
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
        return done


def when_waited(work: Any, callback: Callable[[], None]) -> Any:
    """A handle that calls back once; see ``Platform.when_waited``."""
    return _WatchedWork(work, callback)

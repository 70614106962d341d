"""Fingerprints of tensors, and handles that tell when somebody waited."""
from datetime import timedelta
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_WORD = 8  # bytes


def fingerprint(tensor: Tensor) -> Optional[tuple[float, int]]:
    """The norm and the combined bits; see ``Platform.fingerprint``."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.is_nested \
                or tensor.is_quantized or tensor.layout is not torch.strided:
            return None
        data = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return _norm(data), _bits(data)


def _norm(data: Tensor) -> float:
    wide = torch.complex128 if data.dtype.is_complex else torch.float64
    return torch.linalg.vector_norm(data.to(wide)).item()


def _bits(data: Tensor) -> int:
    size = data.numel() * data.element_size()
    words = torch.zeros(-(-size // _WORD), dtype=torch.int64, device=data.device)
    if not size:
        return 0
    words.view(torch.uint8)[:size] = data.view(-1).view(torch.uint8)
    # An odd factor loses no bit, and a different one for each place tells a permutation.
    words *= torch.arange(1, 2 * len(words), 2, device=data.device)
    combined = int(np.bitwise_xor.reduce(words.numpy())) if words.device.type == "cpu" else \
        xor_of(words)
    return combined % 2 ** 64


def xor_of(words: Tensor) -> int:
    """The exclusive or of 64-bit words on any device, in a number of steps like their logarithm."""
    while len(words) > 1:
        half, odd = divmod(len(words), 2)
        folded = words[:half] ^ words[half:2 * half]
        words = torch.cat((folded, words[-1:])) if odd else folded
    return int(words.item())


class _WatchedWork(dist.Work):
    """Another handle of the same collective."""

    def __init__(self, work: dist.Work, callback: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._callback: Optional[Callable[[], None]] = callback

    def __getattribute__(self, name: str) -> Any:
        # Methods of the base class would answer for this handle, which knows nothing.
        if name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_work"), name)

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Wait for the collective, then call back."""
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
        return done


_OWN = frozenset({"wait", "_work", "_callback", "__class__", "__dict__"})


def when_waited(work: dist.Work, callback: Callable[[], None]) -> dist.Work:
    """A handle that calls back once; see ``Platform.when_waited``."""
    return _WatchedWork(work, callback)

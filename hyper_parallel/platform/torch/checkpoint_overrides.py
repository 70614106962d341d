"""Where ``torch.distributed.checkpoint`` handles a tensor by its memory, not by its protocol.

Staging for an asynchronous save copies the memory of a tensor and takes its size for that of the
memory; gathering a full state dict knows only PyTorch's own distributed tensors.  :func:`install`
replaces both by functions that do as much for a DTensor.
"""
from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.distributed._state_dict_utils as utilities
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from hyper_parallel.platform.torch.dtensor_base import TorchDTensorBase, dress, undressed

_native_offload = StateDictStager._offload_tensor
_native_gather = utilities._gather_state_dict


class _Gathered(dict):
    """A state dict that gathers each DTensor when it is asked for it.

    So one that is offloaded leaves the device before the next one is gathered.
    """

    def items(self) -> Any:
        """Pairs of a name and a value that holds no DTensor."""
        for name, value in super().items():
            yield name, _gathered(value)


def _gathered(value: Any) -> Any:
    if isinstance(value, TorchDTensorBase):
        return value.full_tensor()
    if isinstance(value, dict):
        return _Gathered(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_gathered, value))
    return value


@wraps(_native_gather)
def _gather(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
    return _native_gather(_gathered(state_dict), **options)


@wraps(_native_offload)
def _offload(stager: StateDictStager, tensor: torch.Tensor, memo: dict, non_blocking: bool = False
             ) -> torch.Tensor:
    if not isinstance(tensor, TorchDTensorBase):
        return _native_offload(stager, tensor, memo, non_blocking)
    with undressed():
        copy = _native_offload(stager, tensor.detach(), memo, non_blocking)
    return dress(copy, type(tensor), tensor._spec)


def install() -> None:
    """Replace the two functions."""
    StateDictStager._offload_tensor = _offload
    utilities._gather_state_dict = state_dicts._gather_state_dict = _gather

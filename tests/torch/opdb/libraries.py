"""The two libraries that are compared: this one, and PyTorch's own DTensor."""

import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch.distributed import tensor as their
from torch.distributed.device_mesh import DeviceMesh as TheirMesh

import hyper_parallel as our
from hyper_parallel import CommDebugMode

_CLEAR = (ValueError, TypeError, RuntimeError, NotImplementedError, IndexError, KeyError)


class Library(ABC):
    """How to spread a tensor over the ranks and to see the whole of it again."""

    name: str
    dtensor: type
    _home: Path

    @abstractmethod
    def spread(self, tensor: torch.Tensor, dim: int | None) -> Any:
        """A leaf DTensor of the value ``tensor``, sharded at ``dim`` or replicated."""

    def is_clear(self, error: BaseException) -> bool:
        """Whether the library itself raised ``error``, and not a kernel or a mistake in it."""
        frames = traceback.extract_tb(error.__traceback__)
        if type(error) not in _CLEAR or not frames:
            return False
        return (frames[-1].line or "").startswith("raise ") and \
            self._home in Path(frames[-1].filename).parents

    @abstractmethod
    def gathers(self, function: Any) -> tuple[Any, int]:
        """The value of ``function()`` and how often it gathered, where that can be told."""


class Ours(Library):
    """This library, on a mesh of all ranks."""

    name = "hyper_parallel"
    dtensor = our.DTensor
    _home = Path(our.__file__).parent

    def __init__(self, ranks: int) -> None:
        self._mesh = our.init_device_mesh((ranks,), ("x",))

    def spread(self, tensor: torch.Tensor, dim: int | None) -> Any:
        placement = our.Replicate() if dim is None else our.Shard(dim)
        return our.distribute_tensor(tensor, self._mesh, [placement], src_data_rank=None)

    def is_clear(self, error: BaseException) -> bool:
        return super().is_clear(error) and "the rule of" not in str(error)

    def gathers(self, function: Any) -> tuple[Any, int]:
        with CommDebugMode() as mode:
            result = function()
        return result, mode.get_comm_counts().get("differentiable_all_gather_concat", 0)


class Theirs(Library):
    """PyTorch's DTensor."""

    name = "torch.distributed.tensor"
    dtensor = their.DTensor
    _home = Path(torch.distributed.__file__).parent

    def __init__(self, ranks: int) -> None:
        self._mesh = TheirMesh("cpu", list(range(ranks)))

    def spread(self, tensor: torch.Tensor, dim: int | None) -> Any:
        placement = their.Replicate() if dim is None else their.Shard(dim)
        value = their.distribute_tensor(tensor.detach(), self._mesh, [placement],
                                        src_data_rank=None)
        return value.detach().requires_grad_(tensor.requires_grad)

    def gathers(self, function: Any) -> tuple[Any, int]:
        return function(), 0


LIBRARIES: dict[str, type] = {library.name: library for library in (Ours, Theirs)}

"""What the library needs to take over a framework's own distributed tensors, and to give them."""
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Optional, Sequence

import numpy as np


class NativeMesh(NamedTuple):
    """A framework's own mesh.

    Attributes:
        ranks: the global ranks in a grid.
        names: one name for each axis, or None where it has none.
    """

    ranks: np.ndarray
    names: Optional[tuple[str, ...]]


class NativeTensor(NamedTuple):
    """A framework's own distributed tensor.

    Attributes:
        local: this rank's part, in the same autograd graph.
        mesh: the framework's mesh.
        placements: for each axis ``("shard", dim)``, ``("replicate", None)`` or
            ``("partial", reduce op)``.
        shape: global shape.
    """

    local: Any
    mesh: Any
    placements: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]


class TranslationAdapter(ABC):
    """The part of a platform that knows the framework's own meshes and distributed tensors."""

    @staticmethod
    @abstractmethod
    def read_native_mesh(mesh: Any) -> NativeMesh:
        """What a framework's mesh says; its process groups are used from then on.

        Raises:
            TypeError: ``mesh`` is no such mesh.
        """

    @staticmethod
    @abstractmethod
    def build_native_mesh(ranks: np.ndarray, names: tuple[str, ...], groups: Sequence[Any]) -> Any:
        """A framework's mesh of ``ranks`` that uses the group of each axis as it is.

        Raises:
            ValueError: an order of ranks that the framework's mesh does not keep.
        """

    @staticmethod
    @abstractmethod
    def read_native_tensor(tensor: Any) -> NativeTensor:
        """What a framework's distributed tensor consists of; nothing is copied.

        Raises:
            TypeError: ``tensor`` is no such tensor.
            ValueError: a placement without a counterpart.
        """

    @staticmethod
    @abstractmethod
    def build_native_tensor(parts: NativeTensor) -> Any:
        """A framework's distributed tensor of these parts; nothing is copied."""

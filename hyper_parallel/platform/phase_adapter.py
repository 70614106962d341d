"""What the library needs to know of a framework's autograd: where in a training step it is."""
from abc import ABC, abstractmethod
from typing import Any


class PhaseAdapter(ABC):
    """The part of a platform that tells forward from backward."""

    @staticmethod
    @abstractmethod
    def in_backward() -> bool:
        """Whether this thread runs a backward pass now, a forward repeated within it included."""

    @staticmethod
    @abstractmethod
    def records_gradients() -> bool:
        """Whether what is computed now is recorded for a backward pass."""

    @staticmethod
    @abstractmethod
    def mark_backward(result: Any, origin: object) -> None:
        """Remember ``origin`` in the backward of the operation that just gave ``result``."""

    @staticmethod
    @abstractmethod
    def backward_origin() -> object:
        """What :meth:`mark_backward` left in the operation whose backward runs now, or None."""

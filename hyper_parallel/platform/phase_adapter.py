"""What the library needs to know of a framework's autograd: where in a training step it is."""
from abc import ABC, abstractmethod


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

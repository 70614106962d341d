"""What the library needs to know of a framework's autograd: where in a training step it is.

The second half is what data parallelism needs: to be told when gradients are there.
"""
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterator, Optional, Sequence

_MISSING = "this platform cannot replicate a module: it does not tell when gradients are there"


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

    @staticmethod
    def require_eager() -> None:
        """Raise a RuntimeError unless operators run one by one, as DTensors need.

        It is asked where meshes, DTensors and parallel modules are made.
        """

    # ---- the gradients of parameters, as they are on this rank ----

    @staticmethod
    def on_gradient(parameter: Any, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` after each backward pass has added to the gradient of ``parameter``.

        Returns:
            What ends it.
        """
        raise NotImplementedError(f"{_MISSING} ({type(parameter).__name__}, {callback})")

    @staticmethod
    def on_backward_from(output: Any, callback: Callable[[], None]) -> None:
        """Call ``callback`` as soon as a backward pass reaches a tensor of a module's output."""
        raise NotImplementedError(f"{_MISSING} ({type(output).__name__}, {callback})")

    @staticmethod
    def at_end_of_backward(callback: Callable[[], None]) -> None:
        """Call ``callback`` when the backward pass that runs now ends, unless it fails.

        The callback is forgotten then, so a weak reference to it tells of a pass that failed.
        """
        raise NotImplementedError(f"{_MISSING} ({callback})")

    @staticmethod
    def local_gradient(parameter: Any) -> Optional[Any]:
        """This rank's part of the gradient as a plain tensor, or None."""
        raise NotImplementedError(f"{_MISSING} ({type(parameter).__name__})")

    @staticmethod
    def set_local_gradient(parameter: Any, gradient: Any) -> None:
        """Put a plain tensor in the place of this rank's part of the gradient."""
        raise NotImplementedError(f"{_MISSING} ({parameter}, {gradient})")

    @staticmethod
    def local_value(parameter: Any) -> Any:
        """This rank's part of a parameter or buffer as a plain alias, unseen by autograd."""
        raise NotImplementedError(f"{_MISSING} ({type(parameter).__name__})")

    @staticmethod
    def join_flat(tensors: Sequence[Any], extra: Sequence[float], scale: float) -> Any:
        """All elements of the tensors and the numbers ``extra``, times ``scale``, in one row.

        The tensors are of one dtype and on one device.
        """
        raise NotImplementedError(f"{_MISSING} ({len(tensors)} tensors, {extra}, {scale})")

    @staticmethod
    def tensors_within(value: Any) -> Iterator[Any]:
        """The tensors in a module's arguments or output, whatever holds them."""
        raise NotImplementedError(f"{_MISSING} ({type(value).__name__})")

    @staticmethod
    def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
        """``value`` with each tensor in it replaced by what ``function`` gives for it."""
        raise NotImplementedError(f"{_MISSING} ({function}, {type(value).__name__})")

    @staticmethod
    def all_reduce_async(data: Any, op: str, group: Any) -> tuple[Any, Any]:
        """Begin to combine ``data`` of all ranks in place; no gradient flows through it.

        Args:
            data: a contiguous tensor; it holds the result after ``work.wait()``.
            op: ``"sum"``, ``"max"`` or ``"min"``.
            group: the ranks that combine.

        Returns:
            ``(data, work)``.
        """
        raise NotImplementedError(f"{_MISSING} ({data}, {op}, {group})")

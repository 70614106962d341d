"""What the library needs to know of a tensor's place in the framework's autograd and memory."""
from abc import ABC, abstractmethod
from typing import Any, Callable, Mapping, Optional, Sequence


class Watch:
    """Whether somebody waits for the gradient of a tensor, which may be said at any time."""

    __slots__ = ("wanted",)

    def __init__(self) -> None:
        self.wanted = False


class HistoryAdapter(ABC):
    """The part of a platform that knows where tensors come from, and who waits for gradients."""

    @staticmethod
    @abstractmethod
    def needs_gradient(tensor: Any) -> bool:
        """Whether what is computed from ``tensor`` now will be differentiated."""

    @staticmethod
    @abstractmethod
    def is_leaf(tensor: Any) -> bool:
        """Whether ``tensor`` was not computed from tensors that need gradients."""

    @staticmethod
    @abstractmethod
    def is_trained(tensor: Any) -> bool:
        """Whether ``tensor`` is a leaf that needs a gradient."""

    @staticmethod
    @abstractmethod
    def is_watched(tensor: Any) -> bool:
        """Whether somebody waits for the gradient of this very tensor."""

    @staticmethod
    @abstractmethod
    def value_between(value: Any, near: Any, far: Any, gradients: Callable[
            [Any], tuple[Optional[Any], Optional[Any]]]) -> Any:
        """``value`` as one node, whose gradient goes to either of two tensors.

        Args:
            value: a tensor without a history.
            near: a tensor that was computed from ``far``.
            far: another tensor, which may be of another shape.
            gradients: maps the gradient of the result to those of ``near`` and ``far``; None
                where there is none. A platform that cannot be told of a watch late (see
                ``Watch``) passes to ``far`` alone.
        """

    @staticmethod
    @abstractmethod
    def released(received: Any) -> Any:
        """The memory of a fresh tensor, maybe a view, as one that only the caller knows.

        It is no view, so that the result of a node may be modified in place, and no backend that
        wrote to the memory holds it.
        """

    @staticmethod
    @abstractmethod
    def detach(tensor: Any) -> Any:
        """An alias of ``tensor`` without its history."""

    @staticmethod
    @abstractmethod
    def copied(tensor: Any) -> Any:
        """A copy of ``tensor``, which has no history itself or runs where none is recorded."""

    @staticmethod
    @abstractmethod
    def as_leaf(tensor: Any, like: Any) -> Any:
        """``tensor``, which has no history, itself; it needs a gradient where ``like`` does."""

    @staticmethod
    @abstractmethod
    def value_version(tensor: Any) -> Any:
        """A value that differs when ``tensor`` was modified in place since.

        It may also differ where the framework cannot tell.
        """

    @staticmethod
    @abstractmethod
    def keep_with_graph(result: Any, tensor: Any) -> None:
        """Keep ``tensor`` for as long as the autograd graph of ``result`` exists."""

    @staticmethod
    @abstractmethod
    def note_copy(memory: Any, parts: Sequence[Any], note: Any) -> None:
        """Note something of the memory of a plain tensor, for as long as any tensor uses it.

        Args:
            memory: the tensor.
            parts: tensors computed from it. Those that are no views of it are left alone.
            note: the note, which must not hold ``memory``.
        """

    @staticmethod
    @abstractmethod
    def noted_copy(tensor: Any) -> Optional[tuple[Any, Optional[Any]]]:
        """What was noted of the memory of ``tensor``, if anything.

        Returns:
            The note and, without a history, the tensor that it was noted of, with what was
            written to it since; None in its place where the platform cannot make it again.
        """

    @staticmethod
    @abstractmethod
    def shares_too_much(result: Any, func: Callable, args: Sequence[Any],
                        kwargs: Mapping[str, Any]) -> bool:
        """Whether the local result of ``func`` is a view where that on the whole tensors is none.

        A part of one row is contiguous in more orders than the whole tensor is. False where the
        platform cannot tell.
        """

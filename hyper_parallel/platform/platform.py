"""What the library needs from a framework.

Every method is a staticmethod, and a concrete class defines each one in its own body: tools that
observe collectives replace entries of ``type(get_platform()).__dict__`` and put them back.
For the same reason a method that needs another one looks it up on the class when it is called.

Words used here: a *group* is the framework's process group. Its ranks have an order, and piece
``i`` of a collective belongs to the rank in position ``i``. A group of one process never
communicates: collectives return an alias of their input.

The gradient of a collective follows the types of a tensor that is spread over ranks: a piece of
a split tensor has the same piece of the gradient as its gradient; a replicated tensor, or a
summand of a partial sum, has the whole gradient, equal on every rank.
"""
from abc import abstractmethod
from datetime import timedelta
from typing import Any, Callable, ContextManager, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from hyper_parallel.platform.history_adapter import HistoryAdapter
from hyper_parallel.platform.module_adapter import ModuleAdapter
from hyper_parallel.platform.phase_adapter import PhaseAdapter
from hyper_parallel.platform.traffic_adapter import TrafficAdapter
from hyper_parallel.platform.translation_adapter import TranslationAdapter
from hyper_parallel.platform.value_adapter import ValueAdapter


class DeclaredArguments(NamedTuple):
    """What an operator says of itself.

    Attributes:
        names: names of its parameters, in order.
        written: names of those that it writes to.
        returned: how many results it returns.
    """

    names: tuple[str, ...]
    written: tuple[str, ...]
    returned: int


class Platform(HistoryAdapter, ModuleAdapter, PhaseAdapter, TrafficAdapter, TranslationAdapter,
               ValueAdapter):
    """The operations that layers 2 to 6 may ask of a framework."""

    Tensor: type
    """The framework's tensor class."""

    Parameter: type
    """The framework's class of trainable tensors."""

    Size: type
    """The framework's type of a tensor's shape, a tuple."""

    DTensorBase: type
    """Base class of DTensor: a tensor with a spec whose functions go to a dispatcher."""

    HAS_ALL_TO_ALL_SINGLE: bool
    """Whether there is a ``differentiable_all_to_all_single``, beside the asynchronous form."""

    # ---- the seam between a DTensor and its local tensor ----

    @staticmethod
    @abstractmethod
    def dress(tensor: Any, cls: type, spec: Any) -> Any:
        """``tensor`` as a DTensor of class ``cls`` with ``spec``; it is not copied."""

    @staticmethod
    @abstractmethod
    def undress(tensor: Any) -> Any:
        """A plain alias of a DTensor's local tensor, in the same autograd graph."""

    @staticmethod
    @abstractmethod
    def run_undressed(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call ``func`` on the local tensors of all DTensors among the arguments."""

    @staticmethod
    @abstractmethod
    def run_with_own_layouts(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call ``func`` where a DTensor's ``layout`` is the library's, whoever called it."""

    @staticmethod
    @abstractmethod
    def run_and_dress(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], cls: type,
                      spec: Any) -> Any:
        """As :meth:`run_undressed`, dressing a single tensor that comes out; one call for speed."""

    @staticmethod
    @abstractmethod
    def operator_name(func: Callable) -> str:
        """The library's name of a function of the framework, one for all its spellings."""

    @staticmethod
    @abstractmethod
    def declared_arguments(func: Callable) -> Optional["DeclaredArguments"]:
        """What a user's operator declares of its arguments; None for any other function."""

    @staticmethod
    @abstractmethod
    def decomposed(func: Callable) -> Optional[Callable]:
        """``func`` such that the functions it calls are dispatched; None if it has no parts."""

    @staticmethod
    @abstractmethod
    def without_override(func: Callable) -> bool:
        """Whether ``func`` runs user code that must be given plain tensors."""

    @staticmethod
    @abstractmethod
    def abstract_results(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
                         ) -> Optional[list[Any]]:
        """The tensors ``func`` would give, whole ones without values; None where it cannot tell."""

    @staticmethod
    @abstractmethod
    def refusal(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
                ) -> Optional[Exception]:
        """The error that global shapes would raise in ``func``; None if it raises or tells none."""

    # ---- random numbers, of the default generators where the user gives none ----

    @staticmethod
    @abstractmethod
    def initial_seed(generator: Any = None) -> int:
        """The seed that the generator was last given, or the mark of an agreed state."""

    @staticmethod
    @abstractmethod
    def draw_seed(generator: Any = None) -> int:
        """The next number of the generator, from 0 to 2**62."""

    @staticmethod
    @abstractmethod
    def agree_on_random_state(group: Any, mark: int, generator: Any = None) -> None:
        """Give every rank of ``group`` the generator's state of its first rank.

        The draws go on as there, but ``initial_seed`` is ``mark``, also when the state is saved
        and restored; an accelerator's generator, which draws by its seed, has no mark.
        """

    @staticmethod
    @abstractmethod
    def seeded(seed: int, generator: Any = None) -> ContextManager[None]:
        """A context in which the generator starts from ``seed``; then it goes back."""

    # ---- processes ----

    @staticmethod
    @abstractmethod
    def get_rank() -> int:
        """Rank of this process: of the default group, else the launcher's ``RANK``, else 0."""

    @staticmethod
    @abstractmethod
    def get_world_size() -> int:
        """Number of processes: of the default group, else the launcher's, else 1."""

    @staticmethod
    @abstractmethod
    def known_world_size() -> Optional[int]:
        """Number of processes, or None where nobody said: not initialised and not launched."""

    @staticmethod
    @abstractmethod
    def is_initialized() -> bool:
        """Whether the default group exists."""

    @staticmethod
    @abstractmethod
    def init_process_group(backend: Optional[str] = None, device: Any = None,
                           timeout: Optional[timedelta] = None) -> None:
        """Make the default group of all processes.

        Without a launcher's environment this process becomes a world of size 1.

        Args:
            backend: communication backend; None takes the one that suits ``device``.
            device: device that the tensors will be on; None takes an accelerator if there is one.
            timeout: how long a collective or the making of a group may wait; None takes the
                framework's default.

        Raises:
            RuntimeError: the default group exists already.
        """

    @staticmethod
    @abstractmethod
    def destroy_process_group() -> None:
        """Destroy the default group and every group made from it; nothing if there is none."""

    @staticmethod
    @abstractmethod
    def generation() -> int:
        """How many default groups were seen to be destroyed; 0 before and during the first."""

    # ---- groups ----

    @staticmethod
    @abstractmethod
    def create_group(rank_list: Sequence[int]) -> Any:
        """The group of ``rank_list`` in that order; only its members call this.

        Members may have made any other groups before, in any order. Asking again for the same
        ranks returns the same group. All ranks of the world in order give the default group.

        Args:
            rank_list: global ranks, each once, this process among them.

        Raises:
            TypeError: something that is not a rank.
            ValueError: no rank, a rank twice, outside the world, or this process is not in it.
            RuntimeError: not initialised, or a member did not come within the default group's
                timeout (the message names the group and the missing ranks).
        """

    @staticmethod
    @abstractmethod
    def self_group() -> Any:
        """A usable group of this process alone, made without communication."""

    @staticmethod
    @abstractmethod
    def get_group_size(group: Any) -> int:
        """Number of ranks in ``group`` (None: the default group)."""

    @staticmethod
    @abstractmethod
    def get_group_rank(group: Any) -> int:
        """Position of this process in ``group`` (None: the default group)."""

    @staticmethod
    @abstractmethod
    def get_group_ranks(group: Any) -> tuple[int, ...]:
        """Global ranks of ``group`` in its order (None: the default group)."""

    # ---- numpy ----

    @staticmethod
    @abstractmethod
    def tensor_to_numpy(tensor: Any) -> np.ndarray:
        """A numpy copy of ``tensor``.

        Raises:
            ValueError: ``tensor`` has no data (meta or fake tensor).
        """

    @staticmethod
    @abstractmethod
    def tensor_from_numpy(array: np.ndarray) -> Any:
        """A CPU tensor with a copy of ``array``; it has data under any device or fake mode."""

    @staticmethod
    @abstractmethod
    def extreme_values(tensor: Any) -> tuple[Any, Any]:
        """The lowest and the highest number of the tensor's dtype, infinities included."""

    # ---- collectives with gradients ----

    @staticmethod
    @abstractmethod
    def differentiable_all_gather_concat(data: Any, group: Any, concat_size: int,
                                         concat_dim: int) -> Any:
        """Join the equal pieces of all ranks along ``concat_dim``.

        Args:
            data: this rank's piece, of the same shape on every rank.
            group: the ranks that join.
            concat_size: number of pieces: the size of the group.
            concat_dim: dim to join along.

        Returns:
            The joined tensor. Its gradient flows to the own piece, without communication.

        Raises:
            ValueError: ``concat_size`` is not the group's size, or no such dim.
        """

    @staticmethod
    @abstractmethod
    def differentiable_all_to_all(input_data: Any, output_shape: Sequence[int],
                                  group: Any) -> Any:
        """Split dim 0 evenly, send piece ``i`` to rank ``i``, join what comes along dim 0.

        Args:
            input_data: tensor whose dim 0 the group's size divides.
            output_shape: shape of the result, with as many elements as the input.
            group: the ranks that exchange.

        Returns:
            A tensor of ``output_shape``. Its gradient makes the reverse exchange.

        Raises:
            ValueError: dim 0 or ``output_shape`` does not fit.
        """

    @staticmethod
    @abstractmethod
    def differentiable_all_reduce(data: Any, op: str, group: Any) -> Any:
        """Combine the tensors of all ranks element by element.

        Args:
            data: this rank's operand, of the same shape on every rank.
            op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``. On bool tensors the
                sum is "or" and the product is "and".
            group: the ranks that combine.

        Returns:
            The combined tensor, equal on every rank. Gradient: sum, unchanged; avg, divided by
            the group's size; max and min, to the ranks that hold the result (ties share it
            evenly); product, times the product of the others.

        Raises:
            ValueError: unknown ``op``.
            TypeError: ``op`` is not defined for the tensor's dtype.
        """

    @staticmethod
    @abstractmethod
    def differentiable_reduce_scatter(data: Any, dev_num: int, axis: int, op: str,
                                      group: Any) -> Any:
        """Combine the tensors of all ranks and keep the own piece along ``axis``.

        Args:
            data: this rank's operand, of the same shape on every rank.
            dev_num: number of pieces: the size of the group.
            axis: dim to split; ``dev_num`` divides it.
            op: as for :meth:`differentiable_all_reduce`.
            group: the ranks that combine.

        Returns:
            This rank's piece. Gradient: all-gathered, then as for the all-reduce.

        Raises:
            ValueError: unknown ``op``, ``dev_num`` is not the group's size, or ``axis`` cannot
                be split evenly.
            TypeError: ``op`` is not defined for the tensor's dtype.
        """

    @staticmethod
    @abstractmethod
    def differentiable_all_to_all_single_async(
            input_tensor: Any, input_splits: Optional[Sequence[int]],
            output_splits: Optional[Sequence[int]], group: Any) -> tuple[Any, Any]:
        """As ``differentiable_all_to_all_single``, but it returns before the data is there.

        Returns:
            ``(output, work)``: read ``output`` after ``work.wait()``, and leave ``input_tensor``
            alone until then.
        """

    @staticmethod
    def differentiable_all_to_all_single(
            input_tensor: Any, input_splits: Optional[Sequence[int]],
            output_splits: Optional[Sequence[int]], group: Any) -> Any:
        """Exchange pieces of dim 0 that may differ in length. Not every framework has it.

        Args:
            input_tensor: what this rank sends, piece ``i`` to rank ``i``.
            input_splits: lengths of the pieces sent; None splits evenly.
            output_splits: lengths of the pieces received; None expects as much as is sent,
                evenly.
            group: the ranks that exchange.

        Returns:
            The received pieces joined along dim 0. Its gradient makes the reverse exchange.

        Raises:
            ValueError: splits that do not fit the tensor or the group.
            NotImplementedError: the framework has no such collective.
        """
        raise NotImplementedError("this platform has no all-to-all with uneven splits; "
                                  "use differentiable_all_to_all with even pieces")

    # ---- other communication ----

    @staticmethod
    @abstractmethod
    def broadcast(tensor: Any, src_index: int, group: Any) -> Any:
        """Overwrite ``tensor`` with that of position ``src_index`` in ``group``; returns it."""

    @staticmethod
    @abstractmethod
    def scatter(output: Any, pieces: Optional[Sequence[Any]], src_index: int,
                group: Any) -> Any:
        """Fill ``output`` with the own piece of those that position ``src_index`` holds.

        Args:
            output: tensor to fill, of the same shape on every rank.
            pieces: one tensor of that shape a rank, at the source; ignored elsewhere.
            src_index: position of the source in ``group``.
            group: the ranks that receive.

        Returns:
            ``output``.

        Raises:
            ValueError: the source's ``pieces`` do not fit, or there is no such position.
        """

    # ---- tensors ----

    @staticmethod
    @abstractmethod
    def apply_with_gradient(forward: Callable[[Any], Any], backward: Callable[[Any], Any],
                            tensor: Any) -> Any:
        """``forward(tensor)`` as one node of the autograd graph.

        Args:
            forward: gives the value; nothing it does is recorded. It may return its input, and
                then the result is an alias of it that must not be modified in place.
            backward: maps the gradient of the result to that of ``tensor``. It runs with
                gradients on when a second derivative is wanted, so it is made of
                differentiable operations.
            tensor: the input.

        Returns:
            A plain tensor.
        """

    @staticmethod
    @abstractmethod
    def narrow(tensor: Any, dim: int, start: int, length: int) -> Any:
        """A view of ``length`` entries of ``dim`` from ``start`` on."""

    @staticmethod
    @abstractmethod
    def pad_end(tensor: Any, dim: int, amount: int) -> Any:
        """``tensor`` with ``amount`` zeros added at the end of ``dim``."""

    @staticmethod
    @abstractmethod
    def concat(tensors: Sequence[Any], dim: int) -> Any:
        """The tensors joined along ``dim``."""

    @staticmethod
    @abstractmethod
    def masked_fill(tensor: Any, mask: Any, value: Any) -> Any:
        """``tensor`` with a number at the places of a mask; of a DTensor, an operator."""

    @staticmethod
    @abstractmethod
    def contiguous(tensor: Any) -> Any:
        """``tensor`` itself if it is contiguous, else a copy that is."""

    @staticmethod
    @abstractmethod
    def zeros_like(tensor: Any) -> Any:
        """Zeros of the shape, dtype and device of ``tensor``."""

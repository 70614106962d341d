"""What the arguments of collectives must be, whatever the framework."""
from __future__ import annotations

import math
import operator
from typing import Any, Callable, Optional, Sequence

REDUCTIONS = ("sum", "avg", "max", "min", "product")


def positive_dim(tensor: Any, dim: int) -> int:
    """``dim`` counted from the front.

    Raises:
        ValueError: no such dim.
    """
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim {dim} does not exist in a tensor of {tensor.ndim} dims")
    return dim % tensor.ndim


def check_size(name: str, given: int, size: int, ranks: Callable[[], Sequence[int]]) -> None:
    """Raise ValueError unless a number of pieces is the size of the group."""
    if given != size:
        raise ValueError(f"{name} must be the size of the group, which is {size} (ranks "
                         f"{list(ranks())}), got {given}")


def check_splits(tensor: Any, input_splits: Optional[Sequence[int]],
                 output_splits: Optional[Sequence[int]], size: int) -> None:
    """Raise ValueError unless the splits cover dim 0 of ``tensor``, one for each rank."""
    if tensor.ndim == 0:
        raise ValueError("an all-to-all splits dim 0, but the tensor has no dims; reshape it")
    rows = tensor.shape[0]
    for name, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
        if splits is None:
            if rows % size:
                raise ValueError(f"{name}=None splits dim 0 evenly, but {size} ranks do not "
                                 f"divide {rows} rows; give the lengths")
        elif len(splits) != size or min(splits) < 0:
            raise ValueError(f"{name} needs one length >= 0 for each of the {size} ranks, got "
                             f"{list(splits)}")
    if input_splits is not None and sum(input_splits) != rows:
        raise ValueError(f"input_splits must add up to the {rows} rows of dim 0, got "
                         f"{list(input_splits)}")


def check_elements(shape: Sequence[int], target: Sequence[int]) -> None:
    """Raise ValueError unless two shapes have as many elements."""
    if math.prod(target) != math.prod(shape):
        raise ValueError(f"output_shape must hold the {math.prod(shape)} elements of the input "
                         f"{list(shape)}, got {list(target)}")


def check_even(tensor: Any, dim: int, size: int) -> None:
    """Raise ValueError unless a reduce-scatter can split ``dim`` evenly."""
    if tensor.shape[dim] % size:
        raise ValueError(f"a reduce-scatter splits dim {dim} evenly, but {size} ranks do not "
                         f"divide its length {tensor.shape[dim]}; pad it first")


def check_source(src_index: int, size: int) -> None:
    """Raise ValueError unless a position is one of the group's."""
    if not 0 <= src_index < size:
        raise ValueError(f"src_index is a position in the group, 0 to {size - 1}, got "
                         f"{src_index}")


def check_pieces(output: Any, pieces: Optional[Sequence[Any]], size: int) -> None:
    """Raise ValueError unless the source of a scatter has a fitting piece for each rank."""
    if pieces is None or len(pieces) != size or any(
            piece.shape != output.shape or piece.dtype != output.dtype for piece in pieces):
        raise ValueError(f"the source scatters one piece of shape {list(output.shape)} and dtype "
                         f"{output.dtype} to each of the {size} ranks; got {pieces!r}")


def check_reduction(op: str, dtype: Any, is_complex: bool, is_floating: bool) -> None:
    """Raise unless ``op`` is a reduction that tensors of ``dtype`` have.

    Raises:
        ValueError: unknown ``op``.
        TypeError: average of whole numbers or bools, maximum or minimum of complex numbers.
    """
    if op not in REDUCTIONS:
        raise ValueError(f"a reduction is one of {', '.join(REDUCTIONS)}, got {op!r}")
    if op == "avg" and not (is_floating or is_complex):
        raise TypeError(f"an average needs a floating or complex dtype, got {dtype}; convert the "
                        f"tensor first, or use 'sum'")
    if op in ("max", "min") and is_complex:
        raise TypeError(f"complex numbers have no order, so {op!r} does not exist for {dtype}")


def checked_ranks(rank_list: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a new group.

    Raises:
        TypeError: something that is not a rank.
        ValueError: no rank, one below 0, or one twice.
    """
    try:
        ranks = tuple(operator.index(rank) for rank in rank_list)
    except TypeError:
        raise TypeError(f"a group is made from a list of ranks (ints), got {rank_list!r}"
                        ) from None
    if not ranks or min(ranks) < 0:
        raise ValueError(f"a group needs at least one rank and none below 0, got {list(ranks)}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"a group holds each rank once, got {shown(ranks)}")
    return ranks


def check_membership(ranks: Sequence[int], world_size: int, own: int) -> None:
    """Raise ValueError unless all ranks are of the world and this process is among them."""
    if max(ranks) >= world_size:
        raise ValueError(f"a group can only hold ranks of the world, 0 to {world_size - 1}, got "
                         f"{shown(ranks)}; start more processes or leave the others out")
    if own not in ranks:
        raise ValueError(f"only members make a group: rank {own} is not in {shown(ranks)}; "
                         f"call create_group on the members alone")


def refuse_second_default(exists: bool) -> None:
    """Raise RuntimeError where there is a default group already."""
    if exists:
        raise RuntimeError("the default process group exists already; call "
                           "destroy_process_group() before making another one")


def shown(ranks: Sequence[int]) -> str:
    """Ranks for a message, shortened in the middle."""
    texts = [str(rank) for rank in ranks]
    if len(texts) > 64:
        texts[32:-32] = ["..."]
    return f"[{', '.join(texts)}]"

"""Attention heads: a projection is cut between heads, never within one."""
from __future__ import annotations

from typing import Any, Optional

# By these names do the attention modules in use keep the length of a head, or the number of heads.
_LENGTHS = ("head_dim", "attention_head_size", "head_size", "d_head")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


def head_length(attention: Any, features: int) -> Optional[int]:
    """The number of features of a head, where ``attention`` says so; else None.

    Args:
        attention: the module that holds the projection.
        features: the projection's number of features, from which the length follows where only
            the number of heads is known.
    """
    for name in _LENGTHS:
        length = getattr(attention, name, None)
        if type(length) is int and length > 0:
            return length if features % length == 0 else None
    for name in _COUNTS:
        count = getattr(attention, name, None)
        if type(count) is int and count > 0 and features % count == 0:
            return features // count
    return None


def check_heads(path: str, attention: Any, features: int, size: int) -> None:
    """Raise unless the heads of a projection divide by the number of ranks.

    Args:
        path: path of the projection.
        attention: the module that holds it.
        features: its number of features that are split.
        size: number of ranks.

    Raises:
        ValueError: they do not, so that some head would lie on two ranks.
    """
    length = head_length(attention, features)
    if length is None or features // length % size == 0:
        return
    raise ValueError(
        f"{path!r} has {features // length} heads of {length} features, which {size} ranks do not "
        "divide, so that a head would lie on two ranks; take a mesh axis that divides the heads, "
        "or leave this layer out of the plan: its heads are whole on every rank then.")

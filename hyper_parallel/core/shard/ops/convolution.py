"""Convolutions over batch and channels, and group norm over batch and groups.

A convolution is a product of matrices at every place of the window: input channels are summed
over, output channels are free.  With groups the channels of each group go together, and a rank
may hold some of the groups.  The dims of the image are whole.
"""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import rule_for
from hyper_parallel.core.shard._rule import Call, Decomposition, Rule, rule_from_notation
from hyper_parallel.core.shard.ops._empty import linked_zeros, product_of
from hyper_parallel.platform import get_platform

platform = get_platform()

_GROUPS = 6  # position of the number of groups among the arguments


@rule_for("conv1d conv2d conv3d")
def _convolution(call: Call) -> Optional[Rule]:
    return _rule(call, "(g o) i")


@rule_for("conv_transpose1d conv_transpose2d conv_transpose3d")
def _transposed(call: Call) -> Optional[Rule]:
    """The weight of a transposed convolution has its input channels first."""
    return _rule(call, "(g i) o")


def _rule(call: Call, channels: str) -> Optional[Rule]:
    """``channels`` names the first two dims of the weight."""
    order = [call.operand(0, "input"), call.operand(1, "weight"), call.operand(2, "bias")]
    results = platform.abstract_results(call.func, call.args, call.kwargs)
    if results is None or None in order[:2]:
        return None
    shape, space = call.shapes[order[0]], len(call.shapes[order[1]]) - 2
    images, after, windows = (" ".join(f"{name}{dim}" for dim in range(space)) for name in "stk")
    batch = "n" if len(shape) == space + 2 else ""
    notation = f"{batch} (g i) {images}, {channels} {windows}, (g o) -> {batch} (g o) {after}"
    whole = f"{images} {after} {windows}"
    groups = call.argument(_GROUPS, "groups", 1)
    options: dict[str, Any] = {"result_shapes": (tuple(results[0].shape),)}
    if groups == 1:
        # No compound dims, so that channels may lie unevenly.
        notation = notation.replace("(g i)", "i").replace("(g o)", "o")
        terms = [(order[0], order[1])] + [(order[2],)] * (order[2] is not None)
        options |= {"reduced": {"i": "sum"}, "terms": tuple(terms)}
    else:
        whole += " i o"
        options["known"] = {"g": groups}

    return rule_from_notation(
        notation, call.shapes, order, whole=whole,
        localize=_with_own_groups(call.func, order[0], len(shape) - 1 - space, groups), **options)


def _with_own_groups(func: Callable, images: int, channels: int, groups: int) -> Callable:
    """Each rank convolves the groups it has; ``channels`` is their dim in operand ``images``."""
    def localize(operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
                 ) -> Optional[Callable]:
        own = operands[images]
        if not all(prod(spec.local_shape) for spec in operands):
            return _without_channels(results[0].local_shape, len(own.shape) - channels - 1)
        count = groups * own.local_shape[channels] // own.shape[channels]
        return None if groups in (1, count) else _with_groups(func, count)

    return localize


def _without_channels(shape: Sequence[int], space: int) -> Callable:
    """Kernels refuse images without channels; the product is zero there."""
    zeros = linked_zeros(shape, sample=product_of)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("input", "weight", "bias"), args)) | kwargs
        result, bias = zeros(given["input"], given["weight"]), given.get("bias")
        return result if bias is None else \
            result + bias.reshape(-1, *(1,) * space).to(result.dtype)

    return run


def _with_groups(func: Callable, own: int) -> Callable:
    """``func`` with another number of groups, by position or by keyword."""
    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) > _GROUPS:
            return func(*args[:_GROUPS], own, *args[_GROUPS + 1:], **kwargs)
        return func(*args, **{**kwargs, "groups": own})

    return run


@rule_for("group_norm")
def _group_norm(call: Call) -> Any:
    body = platform.decomposed(call.func)
    if body is not None:
        # The function that users call checks the batch size and calls the operator of this name.
        return Decomposition(body)
    groups = call.argument(1, "num_groups")
    order = [call.operand(0, "input"), call.operand(2, "weight"), call.operand(3, "bias")]
    images = " ".join(f"s{dim}" for dim in range(len(call.shapes[0]) - 2))

    def localize(operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
                 ) -> Optional[Callable]:
        if not prod(operands[0].local_shape) and prod(operands[0].shape):
            return linked_zeros(results[0].local_shape, sample=lambda x: call.func(x, 1))
        own = groups * operands[0].local_shape[1] // max(operands[0].shape[1], 1)
        if own == groups:
            return None
        func = call.func
        return lambda input, _, *args, **kwargs: func(input, own, *args, **kwargs)

    return rule_from_notation(f"n (g c) {images}, (g c), (g c) -> n (g c) {images}", call.shapes,
                              order, whole=f"c {images}", known={"g": groups}, localize=localize)

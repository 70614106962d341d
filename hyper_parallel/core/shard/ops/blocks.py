"""Operators that treat each block alike: each matrix, each image, each line along a dim.

The dims of a block are whole and all others are free.  What a block becomes is asked of the
framework, which runs the operator once on tensors without values.
"""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.layout import TensorSpec
from hyper_parallel.core.shard._registry import RuleMaker, add_rule, rule_for
from hyper_parallel.core.shard._rule import (
    Call, Decomposition, Dims, Rule, named_dims, positive_dim, positive_dims, rule_from_notation)
from hyper_parallel.core.shard.ops._empty import linked_zeros
from hyper_parallel.platform import get_platform

platform = get_platform()

_OF_MATRICES = """
    tril triu cholesky cholesky_inverse linalg_cholesky linalg_cholesky_ex inverse linalg_inv
    linalg_inv_ex det logdet linalg_det slogdet linalg_slogdet linalg_eig linalg_eigvals linalg_eigh
    linalg_eigvalsh svd linalg_svd linalg_svdvals qr linalg_qr geqrf pinverse linalg_pinv
    matrix_power linalg_matrix_power matrix_exp linalg_matrix_exp linalg_lu linalg_lu_factor
    linalg_lu_factor_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_cond linalg_matrix_rank
    adaptive_avg_pool2d adaptive_max_pool2d adaptive_max_pool2d_with_indices
    avg_pool2d max_pool2d max_pool2d_with_indices upsample_nearest2d upsample_bilinear2d
    upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact2d
    upsample_lanczos2d
"""
_OF_LINES = """
    adaptive_avg_pool1d adaptive_max_pool1d adaptive_max_pool1d_with_indices avg_pool1d max_pool1d
    max_pool1d_with_indices upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d
"""
_OF_VOLUMES = """
    adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices avg_pool3d max_pool3d
    max_pool3d_with_indices upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d
    pixel_shuffle pixel_unshuffle im2col
"""


def _of_blocks(count: int) -> RuleMaker:
    """The rule of operators on each block of ``count`` trailing dims; the dims before align."""

    def maker(call: Call) -> Optional[Rule]:
        if min(len(shape) for shape in call.shapes) < count:
            return None
        results = platform.abstract_results(call.func, call.args, call.kwargs)
        outer = max(len(shape) for shape in call.shapes) - count
        if results is None or any(len(result.shape) < outer for result in results):
            return None
        names = [[f"in{index}_{dim}" for dim in range(count)] for index in range(len(call.shapes))]
        after = [[f"out{index}_{dim}" for dim in range(len(result.shape) - outer)]
                 for index, result in enumerate(results)]
        notation = ", ".join("... " + " ".join(one) for one in names) + " -> " + \
            ", ".join("... " + " ".join(one) for one in after)
        return rule_from_notation(
            notation, call.shapes, whole=[name for one in (*names, *after) for name in one],
            result_shapes=tuple(tuple(result.shape) for result in results),
            localize=_zeros_when_empty(results))

    return maker


def _zeros_when_empty(results: Sequence[Any]) -> Callable:
    """Not every kernel takes no blocks at all; then the result is empty, too, and linked."""

    def localize(operands: Sequence[TensorSpec], parts: Sequence[TensorSpec]
                 ) -> Optional[Callable]:
        empty = any(not prod(spec.local_shape) and prod(spec.shape) for spec in operands)
        if not empty or len(results) > 1:
            return None
        return linked_zeros(parts[0].local_shape, results[0].dtype)

    return localize


add_rule(_OF_MATRICES, _of_blocks(2))
add_rule(_OF_LINES, _of_blocks(1))
add_rule(_OF_VOLUMES, _of_blocks(3))


def along(call: Call, dims: Sequence[int], **options: Any) -> Optional[Rule]:
    """The rule of operators along some dims of one tensor; the result has the same dims."""
    results = platform.abstract_results(call.func, call.args, call.kwargs)
    if results is None or len(call.specs) != 1 or \
            any(len(result.shape) != len(call.shapes[0]) for result in results):
        return None
    operand, sizes = named_dims(call.shapes[0])
    return Rule((operand,), (operand,) * len(results), sizes,
                whole=frozenset(f"d{dim}" for dim in dims),
                result_shapes=tuple(tuple(result.shape) for result in results),
                localize=_zeros_when_empty(results), **options)


@rule_for("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 "
          "fft_irfft2 fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn "
          "fft_ihfftn")
def _fourier(call: Call) -> Optional[Rule]:
    ndim = len(call.shapes[0])
    default: Any = -1
    if call.name.endswith("2"):
        default = (-2, -1)
    elif call.name.endswith("n"):
        lengths = call.argument(1, "s")
        default = None if lengths is None else tuple(range(-len(lengths), 0))
    dim = call.argument(2, "dim", default)
    return along(call, positive_dims(default if dim is None else dim, ndim))


@rule_for("fft_fftshift fft_ifftshift")
def _shift(call: Call) -> Optional[Rule]:
    return along(call, positive_dims(call.argument(1, "dim"), len(call.shapes[0])), moves=True,
                 terms=((0,),))


@rule_for("diff glu")
def _along_last(call: Call) -> Optional[Rule]:
    position = 2 if call.name == "diff" else 1
    return along(call, positive_dims(call.argument(position, "dim", -1), len(call.shapes[0])))


@rule_for("repeat_interleave")
def _repeat_interleave(call: Call) -> Optional[Rule]:
    dim = call.argument(2, "dim")
    if dim is None or not isinstance(call.argument(1, "repeats"), int):
        return None
    return along(call, positive_dims(dim, len(call.shapes[0])), terms=((0,),), moves=True)


@rule_for("renorm")
def _renorm(call: Call) -> Optional[Rule]:
    ndim = len(call.shapes[0])
    own = positive_dim(call.argument(2, "dim"), ndim)
    return along(call, [dim for dim in range(ndim) if dim != own])


@rule_for("pad constant_pad_nd")
def _pad(call: Call) -> Optional[Rule]:
    """Dims that grow or shrink are whole; a pad of another number than zero is not linear."""
    pads = call.argument(1, "pad")
    mode = call.argument(2, "mode", "constant") if call.name == "pad" else "constant"
    value = call.argument(2 if call.name == "constant_pad_nd" else 3, "value")
    ndim = len(call.shapes[0])
    dims = [ndim - 1 - pair for pair in range(len(pads) // 2)
            if pads[2 * pair] or pads[2 * pair + 1]]
    linear = mode != "constant" or not value
    return along(call, dims, terms=((0,),) if linear else ())


@rule_for("repeat tile")
def _repeat(call: Call) -> Rule:
    """Dims that are repeated are whole, and so are the new ones, which come first."""
    counts = tuple(call.arguments_from(1, "repeats" if call.name == "repeat" else "dims"))
    shape = call.shapes[0]
    if call.name == "tile":
        counts = (1,) * (len(shape) - len(counts)) + counts
    operand, sizes = named_dims(shape)
    fresh = len(counts) - len(shape)
    new: Dims = tuple((f"new{dim}",) for dim in range(fresh))
    sizes.update({f"new{dim}": counts[dim] for dim in range(fresh)})
    grown = {f"d{dim}" for dim, count in enumerate(counts[fresh:]) if count != 1}
    result = (*counts[:fresh], *(size * count for size, count in zip(shape, counts[fresh:])))
    return Rule((operand,), ((*new, *operand),), sizes, terms=((0,),), moves=True,
                whole=frozenset(grown | {name for (name,) in new}), result_shapes=(result,))


@rule_for("diagonal linalg_diagonal")
def _diagonal(call: Call) -> Optional[Rule]:
    """The two dims of the diagonal become one, at the end."""
    operand, sizes = named_dims(call.shapes[0])
    standard = (0, 1) if call.name == "diagonal" else (-2, -1)
    first = positive_dim(call.argument(2, "dim1", call.kwargs.get("dim1", standard[0])),
                         len(operand))
    second = positive_dim(call.argument(3, "dim2", standard[1]), len(operand))
    results = platform.abstract_results(call.func, call.args, call.kwargs)
    if results is None:
        return None
    rest = tuple(names for dim, names in enumerate(operand) if dim not in (first, second))
    sizes["diagonal"] = results[0].shape[-1]
    return Rule((operand,), ((*rest, ("diagonal",)),), sizes, terms=((0,),), moves=True,
                whole=frozenset((f"d{first}", f"d{second}", "diagonal")))


@rule_for("unfold")
def _windows(call: Call) -> Any:
    """``x.unfold(dim, size, step)``: the windows stand at the dim, their elements at the end."""
    body = platform.decomposed(call.func)
    if body is not None:
        return Decomposition(body)  # F.unfold, which is about images
    shape = call.shapes[0]
    if not shape or not isinstance(call.argument(1, "dimension"), int):
        return None
    dim = positive_dim(call.argument(1, "dimension"), len(shape))
    results = platform.abstract_results(call.func, call.args, call.kwargs)
    if results is None:
        return None
    operand, sizes = named_dims(shape)
    sizes["window"] = results[0].shape[-1]
    return Rule((operand,), ((*operand, ("window",)),), sizes, terms=((0,),), moves=True,
                whole=frozenset((f"d{dim}", "window")),
                result_shapes=(tuple(results[0].shape),))


@rule_for("cross linalg_cross cosine_similarity pairwise_distance")
def _of_two_lines(call: Call) -> Optional[Rule]:
    """Operators on two tensors that broadcast, along one dim."""
    default = {"cross": None, "cosine_similarity": 1}.get(call.name, -1)
    dim = call.argument(2, "dim", default)
    if call.name == "pairwise_distance":
        dim = -1
    results = platform.abstract_results(call.func, call.args, call.kwargs)
    ndim = max(len(shape) for shape in call.shapes)
    if results is None or dim is None or not ndim or len(call.shapes) != 2:
        return None
    name = f"...{ndim - 1 - positive_dim(dim, ndim)}"
    rule = rule_from_notation("..., ... -> ...", call.shapes)
    kept, = rule.results
    if "cross" not in call.name and len(results[0].shape) < ndim:
        kept = tuple(names for names in kept if names != (name,))
    return Rule(rule.operands, (kept,), rule.sizes, whole=frozenset((name,)),
                result_shapes=(tuple(results[0].shape),),
                terms=((0, 1),) if "cross" in call.name else ())


@rule_for("bucketize isin")
def _beside_a_list(call: Call) -> Optional[Rule]:
    """Each element is compared with all of a list, which is therefore whole."""
    if len(call.shapes) != 2:
        return None
    second = " ".join(f"k{dim}" for dim in range(len(call.shapes[1])))
    return rule_from_notation(f"..., {second} -> ...", call.shapes, whole=second)

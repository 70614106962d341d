"""Operators that treat every element alike, with broadcasting."""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.core.shard._registry import add_notation, add_rule, rule_for
from hyper_parallel.core.shard._rule import (
    Call, Decomposition, Rule, named_dims, rule_from_notation)
from hyper_parallel.platform import get_platform

platform = get_platform()

# f(a + b) == f(a) + f(b) for a single operand, so a Partial sum may pass.
_LINEAR_UNARY = """
    neg negative positive clone contiguous alias float double half bfloat16 real imag conj
    resolve_conj resolve_neg conj_physical lift_fresh zero rad2deg deg2rad cpu cuda pin_memory
"""

_NONLINEAR = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh
    atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor bool byte ceil celu char cfloat cdouble clamp clamp_max clamp_min clip copysign cos
    cosh digamma elu eq erf erfc erfinv exp exp2 expm1 fill fix float_power floor floor_divide fmax
    fmin fmod frac ge gelu greater greater_equal gt hardsigmoid hardswish hardtanh heaviside hypot
    i0 igamma igammac int isclose isfinite isinf isnan isneginf isposinf isreal ldexp le leaky_relu
    lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit logsigmoid long lt maximum minimum mish mvlgamma
    nan_to_num ne not_equal nextafter polygamma pow prelu_kernel reciprocal relu relu6 remainder
    round rrelu_with_noise rsqrt rsub selu sgn short sigmoid sign signbit silu sin sinc sinh
    softplus softshrink hardshrink softsign special_entr special_erf special_erfc special_erfinv
    special_exp2 special_expit special_expm1 special_i0 special_i0e special_i1 special_i1e
    special_log1p special_logit special_ndtr special_ndtri special_psi special_round special_sinc
    special_xlog1py special_xlogy special_zeta sqrt square tan tanh tanhshrink threshold trunc
    xlogy addcmul addcdiv gcd lcm log_sigmoid complex polar special_log_ndtr special_erfcx
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_spherical_bessel_j0 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_gammainc special_gammaincc special_gammaln special_multigammaln special_polygamma
    special_digamma
"""

_LIKE = "zeros_like ones_like empty_like full_like"
_RANDOM_LIKE = "rand_like randn_like randint_like"
_RANDOM_FILL = "uniform normal bernoulli exponential cauchy log_normal geometric random"


def pointwise(call: Call, **options: Any) -> Rule:
    """The rule of any pointwise call: all operands aligned at the right."""
    notation = ", ".join(["..."] * len(call.shapes)) + " -> ..."
    return rule_from_notation(notation, call.shapes, **options)


def _linear_unary(call: Call) -> Rule:
    return pointwise(call, terms=((0,),), moves=True)


def _to(call: Call) -> Rule:
    """A change of dtype or device; only one between floating types passes a Partial sum on."""
    keeps = "int" not in repr(call.args[1:]) + repr(call.kwargs) and \
        "bool" not in repr(call.args[1:]) + repr(call.kwargs)
    operand, sizes = named_dims(call.shapes[0])
    others = tuple(tuple(() for _ in shape) for shape in call.shapes[1:])
    terms = ((0,),) if keeps and not others else ()
    return Rule((operand, *others), (operand,), sizes, terms=terms,
                unread=frozenset(range(1, len(call.shapes))))


def _sum_of_two(call: Call) -> Rule:
    """add and sub: with a number beside it a Partial would count the number once a rank."""
    both = call.operand(0, "input") is not None and call.operand(1, "other") is not None
    return pointwise(call, terms=((0,), (1,)) if both else ())


def _product(call: Call) -> Rule:
    return pointwise(call, terms=(tuple(range(len(call.specs))),))


def _masked_fill(call: Call) -> Rule:
    """Filling with zeros is a product with the mask."""
    value = call.argument(2, "value")
    zero = isinstance(value, (int, float)) and value == 0
    return pointwise(call, terms=((0,),) if zero else ())


def _quotient(call: Call) -> Rule:
    linear = call.operand(0, "input") is not None and not call.argument(2, "rounding_mode")
    return pointwise(call, terms=((0,),) if linear else ())


def _where(call: Call) -> Optional[Rule]:
    if len(call.args) + len(call.kwargs) < 3:
        return None
    first, second = call.operand(1, "input"), call.operand(2, "other")
    if call.name == "where_method":
        # x.where(condition, y): the tensor itself comes first.
        first = 0
    both = first is not None and second is not None
    return pointwise(call, terms=((first,), (second,)) if both else ())


def _copy(call: Call) -> Rule:
    """copy_: the old value does not matter, so both may be Partial together."""
    return pointwise(call, terms=((0,), (1,)) if len(call.specs) == 2 else ())


def _like(call: Call) -> Rule:
    return pointwise(call, unread=frozenset({0}))


def _random_like(call: Call) -> Rule:
    return pointwise(call, unread=frozenset({0}), random=True)


def _random_fill(call: Call) -> Rule:
    return pointwise(call, random=True)


def _replicated_result(func: Callable) -> Callable:
    """Run on the local tensors: what comes out has nothing to do with the layout."""

    def run(like: Any, *args: Any, **kwargs: Any) -> Any:
        result = platform.run_undressed(func, (like, *args), kwargs)
        whole = Layout(like.device_mesh, [Replicate()] * like.device_mesh.ndim)
        return platform.dress(result, DTensor, TensorSpec(whole, result.shape))

    return run


def _dropout(call: Call) -> Rule:
    training = call.argument(2, "training", call.kwargs.get("train", True))
    if call.name == "native_dropout":
        return rule_from_notation("... -> ..., ...", call.shapes, random=training is not False)
    return pointwise(call, terms=((0,),), random=bool(training),
                     localize=_saving_when_empty(call) if training else None)


def _saving_when_empty(call: Call) -> Callable:
    """A rank without elements saves something for the backward pass, as the others do.

    The kernel would not; then a checkpoint is run again on some ranks only, and these wait there
    for the others to agree on the random numbers.
    """
    func, in_place = call.func, call.name.endswith("_") or call.kwargs.get("inplace")

    def localize(operands: Sequence[TensorSpec], _: Sequence[TensorSpec]) -> Optional[Callable]:
        if prod(operands[0].local_shape) or not prod(operands[0].shape):
            return None

        def nothing(x: Any, *args: Any, **kwargs: Any) -> Any:
            func(x, *args, **kwargs)  # which checks the arguments
            ones = x.detach().new_ones(())
            return x.mul_(ones) if in_place else x * ones

        return nothing

    return localize


def _randomized_relu(call: Call) -> Rule:
    return pointwise(call, random=bool(call.argument(3, "training", False)))


add_rule(_LINEAR_UNARY, _linear_unary, number_blind=True)
add_rule(_NONLINEAR, pointwise, number_blind=True)
add_rule("add sub subtract", _sum_of_two, number_blind=True)
add_rule("mul multiply", _product, number_blind=True)
add_rule("masked_fill", _masked_fill)
add_rule("div divide true_divide", _quotient, number_blind=True)
add_notation("frexp", "... -> ..., ...")
add_notation("view_as_real", "... -> ... re", whole="re", known={"re": 2}, terms=((0,),),
             moves=True)
add_notation("view_as_complex", "... re -> ...", whole="re", terms=((0,),), moves=True)
add_rule("to type type_as", _to)
add_rule("where where_method", _where, number_blind=True)
add_rule("copy", _copy)
add_rule(_LIKE, _like, number_blind=True)
add_rule(_RANDOM_LIKE, _random_like, number_blind=True)
add_rule(_RANDOM_FILL, _random_fill, number_blind=True)
add_rule("new_tensor new", lambda call: Decomposition(_replicated_result(call.func)))
add_rule("rrelu", _randomized_relu)
add_rule("dropout alpha_dropout native_dropout", _dropout)


@rule_for("new_zeros new_ones new_empty new_full")
def _new(call: Call) -> Rule:
    """A tensor of a shape of its own: whole on every rank, whatever the operand's layout."""
    size = call.arguments_from(1, "size")
    if call.name == "new_full":
        size = call.argument(1, "size")
    shape = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    names = tuple((f"d{dim}",) for dim in range(len(call.shapes[0])))
    results = tuple((f"new{dim}",) for dim in range(len(shape)))
    sizes = {name: n for (name,), n in zip(names, call.shapes[0])}
    sizes.update({name: n for (name,), n in zip(results, shape)})
    return Rule((names,), (results,), sizes, whole=frozenset(sizes), unread=frozenset({0}))

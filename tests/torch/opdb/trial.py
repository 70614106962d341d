"""One sample in one layout: the value and all gradients must equal the plain operator's."""

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten

from tests.torch.opdb.database import Sample, seed_cpu
from tests.torch.opdb.libraries import Library

LAYOUTS = ("Replicate", "Shard(0)", "Shard(-1)")

# From best to worst. A crash is an error that is no refusal; "excluded" says why a sample is none.
RIGHT, REFUSED, CRASHED, WRONG = "right", "refused", "crashed", "wrong"
EXCLUDED = "excluded"
ORDER = (EXCLUDED, RIGHT, REFUSED, CRASHED, WRONG)
PLAIN = "gives a plain tensor"


@dataclass(frozen=True)
class Verdict:
    """What became of a sample: one of ``ORDER``, a note, how often operands were gathered."""

    kind: str
    note: str = ""
    gathers: int = 0


@dataclass(frozen=True)
class Outcome:
    """Result and gradients of the plain operator."""

    leaves: list[Any]
    grads: list[torch.Tensor | None]


def dense_outcome(sample: Sample) -> Outcome | Verdict:
    """What the plain operator gives, or why the sample cannot be compared."""
    tensors = [sample.leaves[index] for index in sample.tensors()]
    if not tensors:
        return Verdict(EXCLUDED, "takes no tensor")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return Verdict(EXCLUDED, "takes sparse tensors")
    try:
        first = _plain_outcome(sample, 1)
        # The database seeds some random operators itself: let that be another seed as well.
        with mock.patch.object(torch, "manual_seed", lambda seed: seed_cpu(seed + 1)):
            second = _plain_outcome(sample, 2)
    except Exception as error:
        return Verdict(EXCLUDED, f"the plain operator fails: {_text(error)}")
    if _difference_of_leaves(first.leaves, second.leaves):
        return Verdict(EXCLUDED, "draws random numbers")
    return first


def _plain_outcome(sample: Sample, seed: int) -> Outcome:
    seed_cpu(seed)
    inputs = [_leaf(leaf) for leaf in sample.leaves]
    result = sample.call(inputs)
    leaves = _values(result)
    _backward(_values(sample.judged(result)))
    return Outcome([leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                    for leaf in leaves], _gradients(inputs))


def _leaf(value: Any) -> Any:
    """A fresh leaf with the value of a tensor; an operator may write to it all the same."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _values(result: Any) -> list[Any]:
    return tree_flatten(result)[0]


def _gradients(inputs: Sequence[Any]) -> list[torch.Tensor | None]:
    return [leaf.grad for leaf in inputs if isinstance(leaf, torch.Tensor)]


def _backward(leaves: Sequence[Any]) -> None:
    """From the sum of all results, each weighted by numbers that are the same in every run."""
    roots, weights = [], []
    generator = torch.Generator().manual_seed(3)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            roots.append(leaf)
            weights.append(torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator))
    if roots:
        torch.autograd.backward(roots, weights)


def shard_dim(sample: Sample, layout: str) -> tuple[int, int | None] | None:
    """The leaf that is sharded, and at which dim; None where no tensor has a dim."""
    if layout == "Replicate":
        return -1, None
    for index in sample.tensors():
        ndim = sample.leaves[index].dim()
        if ndim:
            return index, 0 if layout == "Shard(0)" else ndim - 1
    return None


def run(sample: Sample, layout: str, wanted: Outcome | Verdict, library: Library) -> Verdict:
    """Try a sample in a layout. Never raises; all ranks give the same kind of verdict."""
    if isinstance(wanted, Verdict):
        return wanted
    sharded = shard_dim(sample, layout)
    if sharded is None:
        return Verdict(EXCLUDED, "has no dim to shard")
    try:
        return _compared(sample, _spread(sample, sharded, library), wanted, library)
    except Exception as error:
        kind = REFUSED if library.is_clear(error) else CRASHED
        return Verdict(kind, _text(error) if kind == REFUSED else f"{_text(error)} {_place(error)}")


def _spread(sample: Sample, sharded: tuple[int, int | None], library: Library) -> list[Any]:
    """The leaves with DTensors for tensors, one of them sharded."""
    return [library.spread(_leaf(leaf), sharded[1] if index == sharded[0] else None)
            if isinstance(leaf, torch.Tensor) else leaf
            for index, leaf in enumerate(sample.leaves)]


def _compared(sample: Sample, inputs: list[Any], wanted: Outcome, library: Library) -> Verdict:
    seed_cpu(1)
    result, gathers = library.gathers(lambda: sample.call(inputs))
    leaves = _values(result)
    plain = any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, library.dtensor)
                for leaf in leaves)
    # Every collective comes before the comparison: what differs on one rank must not stop it there.
    whole = [_whole(leaf, library) for leaf in leaves]
    _backward([_whole(leaf, library) for leaf in _values(sample.judged(result))])
    grads = [_whole(grad, library) for grad in _gradients(inputs)]
    found = _difference_of_leaves(whole, wanted.leaves) or \
        _difference_of_gradients(grads, wanted.grads)
    return Verdict(WRONG, found) if found else Verdict(RIGHT, PLAIN if plain else "", gathers)


def _whole(value: Any, library: Library) -> Any:
    return value.full_tensor() if isinstance(value, library.dtensor) else value


def _difference_of_leaves(got: Sequence[Any], wanted: Sequence[Any]) -> str:
    """What is wrong with a result; '' if nothing."""
    if len(got) != len(wanted):
        return f"{len(got)} results, not {len(wanted)}"
    for index, (left, right) in enumerate(zip(got, wanted)):
        found = _difference(left, right)
        if found:
            return f"result {index}: {found}"
    return ""


def _difference_of_gradients(got: Sequence[Any], wanted: Sequence[Any]) -> str:
    for index, (left, right) in enumerate(zip(got, wanted)):
        if left is None or right is None:
            known = right if left is None else left
            found = "" if known is None or not known.any() else \
                "there is none" if left is None else "there should be none"
        else:
            found = _difference(left, right)
        if found:
            return f"gradient of input {index}: {found}"
    return ""


def _difference(got: Any, wanted: Any) -> str:
    if not isinstance(wanted, torch.Tensor):
        if type(wanted) is float is type(got):
            same = math.isclose(got, wanted, rel_tol=1e-4) or math.isnan(got) and math.isnan(wanted)
        else:
            same = got == wanted
        return "" if same else f"{got!r}, not {wanted!r}"
    if not isinstance(got, torch.Tensor):
        return f"a {type(got).__name__}, not a tensor"
    got, wanted = got.detach(), wanted.detach()
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    if got.dtype != wanted.dtype:
        return f"dtype {got.dtype}, not {wanted.dtype}"
    if got.layout is not torch.strided or wanted.layout is not torch.strided:
        return "" if torch.equal(got.to_dense(), wanted.to_dense()) else "values of a sparse tensor"
    return _difference_of_values(got, wanted)


def _difference_of_values(got: torch.Tensor, wanted: torch.Tensor) -> str:
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return "" if torch.equal(got, wanted) else "values"
    finite = wanted[wanted.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    got, wanted = got.to(wide), wanted.to(wide)
    tolerance = 1e-2 if scale > 1e30 else 1e-4
    if torch.allclose(got, wanted, rtol=tolerance, atol=1e-5 * scale, equal_nan=True):
        return ""
    return f"values differ by up to {float((got - wanted).abs().max()):.3g}"


def _text(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return " ".join(text.split())[:400]


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return "(" + " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
                            for frame in reversed(frames[-4:])) + ")"

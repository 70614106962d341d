"""Comparison of operators on DTensors with the same operators on whole tensors.

Used inside worker files, on every rank alike. All values come from one seed, so that each rank
knows the dense tensors and can tell by itself what it should hold.
"""

import itertools
import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel import DeviceMesh, DTensor, Layout, Partial, Replicate, Shard

Placements = Sequence[Any]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """A dense leaf of normal float64 values, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def part(dense: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What this rank holds of ``dense`` under ``layout``; a summand counts as the whole value."""
    return dense[tuple(slice(start, start + length)
                       for start, length in layout.local_bounds(dense.shape))]


def _summand(local: torch.Tensor, op: str, index: int, size: int, seed: int) -> torch.Tensor:
    """Summand ``index`` of ``size``, all different, that reduce to ``local`` by ``op``."""
    generator = torch.Generator().manual_seed(seed)
    others = [torch.randint(1, 9, local.shape, generator=generator).to(local.dtype)
              for _ in range(size - 1)]
    if op == "product":
        powers = [2.0 ** (other - 4) for other in others]
        return local / torch.stack(powers).prod(0) if index == 0 else powers[index - 1]
    if op in ("max", "min"):
        return local if index == size // 2 else local - (1 if op == "max" else -1) * others[0]
    scale = size if op == "avg" else 1
    return local * scale - sum(others) if index == 0 else others[index - 1]


def spread(dense: torch.Tensor, mesh: DeviceMesh, placements: Placements, seed: int = 0,
           order: Any = None) -> DTensor:
    """A leaf DTensor of value ``dense``; its summands differ from rank to rank."""
    layout = Layout(mesh, placements, order).for_ndim(dense.dim())
    local = part(dense.detach(), layout).clone()
    for axis, placement in enumerate(placements):
        size = mesh.mesh_shape[axis]
        if isinstance(placement, Partial) and size > 1:
            local = _summand(local, placement.reduce_op, mesh.get_coordinate()[axis], size,
                             seed + 31 * axis)
    whole = DTensor.from_local(local, mesh, placements, shape=dense.shape) if order is None else \
        DTensor.from_local(dense.detach().clone(), mesh).redistribute(
            placements=placements, shard_order=order)
    return whole.detach().requires_grad_(dense.requires_grad)


def kinds(ndim: int, partial: bool = True) -> list[Any]:
    """Replicate, Shard of each dim, and Partial."""
    return [Replicate(), *(Shard(dim) for dim in range(ndim)), *([Partial()] * partial)]


def choices(shapes: Sequence[Sequence[int]], mesh: DeviceMesh, limit: int, seed: int,
            partial: Sequence[bool]) -> list[tuple[Placements, ...]]:
    """Placements for every tensor: all combinations, or ``limit`` of them by a seeded draw."""
    options = [list(itertools.product(kinds(len(shape), allowed), repeat=mesh.ndim))
               for shape, allowed in zip(shapes, partial)]
    count = 1
    for option in options:
        count *= len(option)
    if count <= limit:
        return list(itertools.product(*options))
    draw = random.Random(seed)
    found = {tuple(draw.choice(option) for option in options) for _ in range(limit)}
    return sorted(found, key=repr)


def flat(result: Any) -> list[Any]:
    """The tensors and values of a result, nested sequences opened."""
    if isinstance(result, (tuple, list)):
        return [leaf for entry in result for leaf in flat(entry)]
    return [result]


def difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """What is wrong with ``got``: its shape, dtype or, beyond rounding, values; '' if nothing."""
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    if got.dtype != wanted.dtype:
        return f"dtype {got.dtype}, not {wanted.dtype}"
    tolerance = 1e-10 if wanted.dtype in (torch.float64, torch.complex128) else 1e-5
    if torch.allclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"{got.tolist()}, not {wanted.tolist()}"


def difference_spread(result: Any, wanted: torch.Tensor) -> list[str]:
    """What is wrong with a DTensor that should have the value ``wanted``.

    Its shape is global, its local part is the right piece, and summands add up.
    """
    if type(result) is not DTensor:
        return [f"a {type(result).__name__}, not a DTensor"]
    wanted = wanted.detach()
    if result.shape != wanted.shape:
        return [f"shape {tuple(result.shape)}, not {tuple(wanted.shape)}"]
    wrong = []
    local = result.to_local().detach()
    summands = any(isinstance(placement, Partial) for placement in result.placements)
    if tuple(local.shape) != result.layout.local_shape(wanted.shape):
        wrong.append(f"local shape {tuple(local.shape)} under {result.layout}")
    elif not summands and difference(local, part(wanted, result.layout)):
        wrong.append(f"local part {difference(local, part(wanted, result.layout))}")
    if difference(result.full_tensor().detach(), wanted):
        wrong.append(f"value {difference(result.full_tensor().detach(), wanted)}")
    return wrong


def compare(operator: Callable[..., Any], tensors: Sequence[torch.Tensor], mesh: DeviceMesh,
            placements: Sequence[Placements], seed: int = 0, in_place: bool = False
            ) -> list[Any]:
    """Run ``operator`` on dense and on spread tensors; values and all gradients must agree.

    Args:
        operator: a function of tensors; its result is a tensor, a value, or a sequence of them.
        tensors: the dense inputs, leaves.
        mesh: the mesh.
        placements: for each input how it is spread.
        seed: of the summands of Partial inputs and of the gradients of the results.
        in_place: the operator writes to its inputs, which leaves do not allow.

    Returns:
        The results of the spread run, flattened.

    Raises:
        AssertionError: with every difference. It comes only after all ranks have done the same
            collectives, so that a difference on one rank does not stop the others.
    """
    tensors = [tensor.detach().clone().requires_grad_(tensor.requires_grad)
               for tensor in tensors]
    inputs = [spread(tensor, mesh, placement, seed + index)
              for index, (tensor, placement) in enumerate(zip(tensors, placements))]
    wanted = flat(operator(*[t.clone() if in_place else t for t in tensors]))
    results = flat(operator(*[t.clone() if in_place else t for t in inputs]))
    if len(results) != len(wanted):
        raise AssertionError(f"{len(results)} results, not {len(wanted)}")
    wrong = [f"result {index}: {text}" for index, pair in enumerate(zip(results, wanted))
             for text in _difference_of_results(*pair)]
    _backward(wanted, wanted, seed)
    _backward(results, wanted, seed)
    texts = [_difference_of_gradients(got.grad, dense.grad) for got, dense in zip(inputs, tensors)]
    wrong += [f"gradient of input {index}: {text}" for index, text in enumerate(texts) if text]
    assert not wrong, "; ".join(wrong)
    return results


def _difference_of_results(result: Any, wanted: Any) -> list[str]:
    if not isinstance(wanted, torch.Tensor):
        return [] if result == wanted else [f"{result!r}, not {wanted!r}"]
    wrong = difference_spread(result, wanted)
    if result.requires_grad != wanted.requires_grad:
        wrong.append(f"requires_grad is {result.requires_grad}")
    return wrong


def _difference_of_gradients(spread_grad: Any, wanted: Any) -> str:
    whole = None if spread_grad is None else spread_grad.full_tensor()
    if wanted is None:
        return "there should be none" if whole is not None and whole.any() else ""
    return "there is none" if whole is None else difference(whole, wanted)


def _backward(results: Sequence[Any], like: Sequence[Any], seed: int) -> None:
    """A backward pass with whole numbers as gradients, the same for dense and spread results."""
    roots, grads = [], []
    for index, (result, dense) in enumerate(zip(results, like)):
        if isinstance(dense, torch.Tensor) and dense.requires_grad:
            generator = torch.Generator().manual_seed(seed + index)
            grads.append(torch.randint(1, 9, dense.shape, generator=generator).to(dense.dtype))
            roots.append(result)
    if roots:
        torch.autograd.backward(roots, grads)


class Failures:
    """Collects what goes wrong, so that one run shows every wrong operator and not the first."""

    def __init__(self, shown: int = 2) -> None:
        self._found: dict[str, list[str]] = {}
        self._shown = shown

    def run(self, check: Callable[[], Any], name: str, note: str) -> None:
        """Call ``check`` and keep its exception under ``name``."""
        try:
            check()
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip()
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.split('/')[-1]}:{where.lineno}"
            self._found.setdefault(name, []).append(f"{note}: {text} ({place})")

    def report(self) -> None:
        """Fail with the first few failures of every name."""
        if self._found:
            lines = [f"{sum(map(len, self._found.values()))} failures"]
            for name, found in self._found.items():
                lines += [f"{name} ({len(found)})", *(f"    {t}" for t in found[:self._shown])]
            raise AssertionError("\n".join(lines))

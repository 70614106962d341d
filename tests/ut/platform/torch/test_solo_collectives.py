"""Collectives on a group of one, which do nothing, and what every collective refuses."""
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.platform.torch import collectives
from hyper_parallel.platform.torch.platform import TorchPlatform as platform

Call = Callable[[Tensor, dist.ProcessGroup], Tensor]

CALLS: dict[str, Call] = {
    "all_gather": lambda x, g: platform.differentiable_all_gather_concat(x, g, 1, -1),
    "all_to_all": lambda x, g: platform.differentiable_all_to_all(x, (3, 2), g),
    "all_reduce_sum": lambda x, g: platform.differentiable_all_reduce(x, "sum", g),
    "all_reduce_avg": lambda x, g: platform.differentiable_all_reduce(x, "avg", g),
    "all_reduce_max": lambda x, g: platform.differentiable_all_reduce(x, "max", g),
    "all_reduce_product": lambda x, g: platform.differentiable_all_reduce(x, "product", g),
    "reduce_scatter": lambda x, g: platform.differentiable_reduce_scatter(x, 1, 1, "sum", g),
    "reduce_scatter_min": lambda x, g: platform.differentiable_reduce_scatter(x, 1, 0, "min", g),
    "all_to_all_single": lambda x, g: platform.differentiable_all_to_all_single(x, [2], None, g),
    "all_to_all_async": lambda x, g: waited(
        platform.differentiable_all_to_all_single_async(x, None, [2], g)),
}


def waited(started: tuple[Tensor, Any]) -> Tensor:
    """The output of an asynchronous call after its wait."""
    output, work = started
    assert work.wait()
    return output


@pytest.fixture(name="group")
def _group() -> dist.ProcessGroup:
    return platform.self_group()


@pytest.mark.parametrize("name", CALLS)
def test_a_group_of_one_does_nothing(group: dist.ProcessGroup, name: str) -> None:
    """The result shares the memory of the input, and the gradient passes through."""
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    y = CALLS[name](x, group)
    assert y is not x and y.data_ptr() == x.data_ptr()
    assert y.reshape(2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    (y * torch.arange(6.0).reshape(y.shape)).sum().backward()
    assert x.grad.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_broadcast_and_scatter_in_a_group_of_one(group: dist.ProcessGroup) -> None:
    """In place, and the tensor comes back; a strided one too."""
    x = torch.arange(6.0).reshape(2, 3)
    strided = torch.zeros(3, 2).t()
    assert platform.scatter(strided, [x], 0, group) is strided
    assert strided.tolist() == x.tolist()
    assert platform.broadcast(strided, 0, group) is strided
    assert strided.tolist() == x.tolist()


def test_bools_are_never_added_as_bytes() -> None:
    """256 ranks that hold True would give the byte 0; "or" and "and" do not count."""
    assert collectives._reduce_op("sum", torch.bool) == dist.ReduceOp.MAX
    assert collectives._reduce_op("product", torch.bool) == dist.ReduceOp.MIN
    assert collectives._reduce_op("sum", torch.uint8) == dist.ReduceOp.SUM


MATRIX = torch.ones(2, 3)


@pytest.mark.parametrize("call, error, message", [
    (lambda g: platform.differentiable_all_gather_concat(MATRIX, g, 2, 0), ValueError,
     r"concat_size must be the size of the group, which is 1 \(ranks \[0\]\), got 2"),
    (lambda g: platform.differentiable_all_gather_concat(MATRIX, g, 1, 2), ValueError,
     "dim 2 does not exist in a tensor of 2 dims"),
    (lambda g: platform.differentiable_all_gather_concat(torch.tensor(1.0), g, 1, 0), ValueError,
     "dim 0 does not exist in a tensor of 0 dims"),
    (lambda g: platform.differentiable_all_to_all(MATRIX, (2, 2), g), ValueError,
     r"output_shape must hold the 6 elements of the input \[2, 3\], got \[2, 2\]"),
    (lambda g: platform.differentiable_all_to_all(torch.tensor(1.0), (1,), g), ValueError,
     "splits dim 0, but the tensor has no dims"),
    (lambda g: platform.differentiable_all_reduce(MATRIX, "mean", g), ValueError,
     "a reduction is one of sum, avg, max, min, product, got 'mean'"),
    (lambda g: platform.differentiable_all_reduce(MATRIX.int(), "avg", g), TypeError,
     "an average needs a floating or complex dtype, got torch.int32"),
    (lambda g: platform.differentiable_all_reduce(MATRIX.bool(), "avg", g), TypeError,
     "an average needs a floating or complex dtype, got torch.bool"),
    (lambda g: platform.differentiable_all_reduce(MATRIX * 1j, "max", g), TypeError,
     "complex numbers have no order, so 'max' does not exist"),
    (lambda g: platform.differentiable_reduce_scatter(MATRIX, 2, 0, "sum", g), ValueError,
     "dev_num must be the size of the group, which is 1"),
    (lambda g: platform.differentiable_reduce_scatter(MATRIX, 1, -3, "sum", g), ValueError,
     "dim -3 does not exist"),
    (lambda g: platform.differentiable_reduce_scatter(MATRIX, 1, 0, "mul", g), ValueError,
     "a reduction is one of"),
    (lambda g: platform.differentiable_all_to_all_single(MATRIX, [1, 1], None, g), ValueError,
     r"input_splits needs one length >= 0 for each of the 1 ranks, got \[1, 1\]"),
    (lambda g: platform.differentiable_all_to_all_single(MATRIX, None, [-2], g), ValueError,
     "output_splits needs one length >= 0"),
    (lambda g: platform.differentiable_all_to_all_single(MATRIX, [3], None, g), ValueError,
     r"input_splits must add up to the 2 rows of dim 0, got \[3\]"),
    (lambda g: platform.differentiable_all_to_all_single_async(MATRIX, [1], None, g), ValueError,
     "input_splits must add up to the 2 rows"),
    (lambda g: platform.broadcast(MATRIX, 1, g), ValueError,
     "src_index is a position in the group, 0 to 0, got 1"),
    (lambda g: platform.scatter(MATRIX, [MATRIX, MATRIX], 0, g), ValueError,
     r"one piece of shape \[2, 3\] and dtype torch.float32 to each of the 1 ranks"),
    (lambda g: platform.scatter(MATRIX, None, 0, g), ValueError, "the source scatters one piece"),
    (lambda g: platform.scatter(MATRIX, [MATRIX[0]], 0, g), ValueError, "the source scatters"),
    (lambda g: platform.scatter(MATRIX, [MATRIX.int()], 0, g), ValueError, "the source scatters"),
])
def test_what_collectives_refuse(group: dist.ProcessGroup, call: Callable, error: type,
                                 message: str) -> None:
    """Before anything is sent, so that ranks that agree fail together."""
    with pytest.raises(error, match=message):
        call(group)

"""The torch adapter's numpy conversions, small operations, and node with a given gradient."""
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hyper_parallel.platform.torch.platform import TorchPlatform as platform


# ---- numpy ----

@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64, torch.bool])
def test_to_numpy_and_back(dtype: torch.dtype) -> None:
    """Copies of the values in both directions."""
    tensor = torch.tensor([[0, 1], [1, 0]], dtype=dtype)
    array = platform.tensor_to_numpy(tensor)
    assert array.tolist() == tensor.tolist()
    back = platform.tensor_from_numpy(array)
    assert back.dtype == dtype and torch.equal(back, tensor)
    array[0, 0] = 1
    assert tensor[0, 0] == 0 and back[0, 0] == 0


def test_to_numpy_of_what_numpy_lacks() -> None:
    """bfloat16 comes as float32; a tensor in a graph comes without it."""
    assert platform.tensor_to_numpy(torch.tensor([1.5], dtype=torch.bfloat16)).tolist() == [1.5]
    assert platform.tensor_to_numpy(torch.ones(1, requires_grad=True) * 2).tolist() == [2.0]


def test_from_numpy_is_real_everywhere() -> None:
    """Also where torch would make meta or fake tensors; a read-only array gives no warning."""
    array = np.arange(3)
    array.setflags(write=False)
    with torch.device("meta"):
        assert platform.tensor_from_numpy(array).tolist() == [0, 1, 2]
    with FakeTensorMode():
        tensor = platform.tensor_from_numpy(array)
        assert type(tensor) is Tensor
        assert platform.tensor_to_numpy(tensor).tolist() == [0, 1, 2]


def test_to_numpy_of_no_data() -> None:
    """ValueError that says what to pass instead."""
    with pytest.raises(ValueError, match="meta tensor of type Tensor holds no data.*pass a list"):
        platform.tensor_to_numpy(torch.ones(2, device="meta"))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
        with pytest.raises(ValueError, match="FakeTensor holds no data"):
            platform.tensor_to_numpy(fake)


# ---- small operations ----

def test_small_operations() -> None:
    """Any dim, from the front or from the back."""
    x = torch.arange(6.0).reshape(2, 3)
    part = platform.narrow(x, -1, 1, 2)
    assert part.tolist() == [[1, 2], [4, 5]] and part.untyped_storage().data_ptr() == \
        x.untyped_storage().data_ptr()
    assert platform.pad_end(x, 0, 1).tolist() == [[0, 1, 2], [3, 4, 5], [0, 0, 0]]
    assert platform.pad_end(x, -1, 2).tolist() == [[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]]
    assert platform.pad_end(x, 1, 0).tolist() == x.tolist()
    assert platform.pad_end(torch.ones(0, 2, dtype=torch.bool), 0, 1).tolist() == [[False, False]]
    assert platform.concat([x, x], -1).shape == (2, 6)
    assert platform.concat((piece for piece in x.unbind()), 0).tolist() == [0, 1, 2, 3, 4, 5]
    assert platform.contiguous(x) is x
    assert platform.contiguous(x.t()).is_contiguous()
    zeros = platform.zeros_like(x.to(torch.int16))
    assert zeros.dtype == torch.int16 and zeros.tolist() == [[0, 0, 0], [0, 0, 0]]
    with pytest.raises(ValueError, match="dim 2 does not exist in a tensor of 2 dims"):
        platform.pad_end(x, 2, 1)


# ---- the node with a given gradient ----

def cube(x: Tensor) -> Tensor:
    """x cubed with a hand-written gradient, which is made of differentiable operations."""
    return platform.apply_with_gradient(lambda t: t ** 3, lambda grad: grad * 3 * x ** 2, x)


def test_gradients_of_any_order() -> None:
    """Given by the backward function, then by autograd through it."""
    x = torch.tensor([2.0, -1.0], requires_grad=True)
    y = cube(x)
    assert y.tolist() == [8.0, -1.0]
    first, = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert first.tolist() == [12.0, 3.0]
    second, = torch.autograd.grad(first.sum(), x, create_graph=True)
    assert second.tolist() == [12.0, -6.0]
    third, = torch.autograd.grad(second.sum(), x)
    assert third.tolist() == [6.0, 6.0]


def test_gradcheck() -> None:
    """Against finite differences, twice."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cube, x)
    assert torch.autograd.gradgradcheck(cube, x)


def test_nothing_is_recorded_without_need() -> None:
    """Neither for a tensor that needs no gradient nor where gradients are off."""
    plain = platform.apply_with_gradient(lambda t: t * 2, lambda grad: grad, torch.ones(2))
    assert not plain.requires_grad
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not cube(leaf).requires_grad
    recorded = platform.apply_with_gradient(lambda t: (t * 2).detach(), lambda grad: grad * 5,
                                            leaf)
    recorded.sum().backward()
    assert leaf.grad.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_input_as_result(requires_grad: bool) -> None:
    """An alias comes back, never the tensor itself; its gradient is the given one."""
    x = torch.ones(2, requires_grad=requires_grad)
    y = platform.apply_with_gradient(lambda t: t, lambda grad: grad * 7, x)
    assert y is not x and y.data_ptr() == x.data_ptr()
    if requires_grad:
        y.sum().backward()
        assert x.grad.tolist() == [7.0, 7.0]


class Dressed(Tensor):
    """A tensor that says another shape than it has, as a DTensor does."""

    @property
    def shape(self) -> torch.Size:
        """Not the real one."""
        raise AssertionError("the adapter asked a dressed tensor for its shape")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} reached a dressed tensor")


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("forward", [lambda t: t, lambda t: t * 1], ids=["alias", "value"])
def test_a_dressed_tensor_gives_a_plain_one(requires_grad: bool, forward) -> None:
    """While subclass dispatch is off, an object of another class is an ordinary tensor."""
    x = torch.ones(2, requires_grad=requires_grad)
    x.__class__ = Dressed
    with torch._C.DisableTorchFunctionSubclass():
        y = platform.apply_with_gradient(forward, lambda grad: grad * 7, x)
        assert type(y) is Tensor
        if requires_grad:
            y.sum().backward()
            assert Tensor.grad.__get__(x).tolist() == [7.0, 7.0]

"""The seam below DTensor: dress, undress, run undressed, and what passes straight through."""
import pytest
import torch

from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh
from hyper_parallel.core.layout import Layout, TensorSpec
from hyper_parallel.platform.torch import dtensor_base
from hyper_parallel.platform.torch.dtensor_base import (
    TorchDTensorBase, dress, run_undressed, undress, value_version)


@pytest.fixture(name="spec")
def _spec():
    """A spec on a mesh of one rank; what it says of the shape need not be true here."""
    return TensorSpec(Layout(init_device_mesh((1,), ("x",)), [Shard(0)]), (8, 3))


def test_dressing_switches_the_class_of_the_very_object(spec):
    tensor = torch.ones(2, 3)
    dressed = dress(tensor, DTensor, spec)
    assert dressed is tensor and type(tensor) is DTensor and tensor._spec is spec
    plain = undress(tensor)
    assert type(plain) is torch.Tensor and plain.data_ptr() == tensor.data_ptr()
    assert type(tensor) is DTensor


def test_undressed_functions_see_the_local_tensor(spec):
    tensor = dress(torch.ones(2, 3), DTensor, spec)
    assert tensor.shape == (8, 3) and tensor.size() == (8, 3) and tensor.numel() == 24
    assert run_undressed(lambda t: t.shape, (tensor,), {}) == (2, 3)
    assert run_undressed(lambda t: t.size(), (tensor,), {}) == (2, 3)
    result = run_undressed(torch.add, (tensor, 1), {"alpha": 2})
    assert type(result) is torch.Tensor and result.tolist() == [[3.0] * 3] * 2
    with pytest.raises(ZeroDivisionError):
        run_undressed(lambda: 1 / 0, (), {})
    assert tensor.shape == (8, 3)  # dispatch is on again after an error


def test_undressing_stays_in_the_graph(spec):
    leaf = torch.ones(2, 3, requires_grad=True)
    tensor = dress(leaf * 2, DTensor, spec)
    undress(tensor).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), 2.0))


def test_versions_tell_when_values_may_differ(spec):
    tensor = dress(torch.ones(2, 3), DTensor, spec)
    before = value_version(tensor)
    assert value_version(tensor) == before
    run_undressed(torch.Tensor.add_, (tensor, 1), {})
    assert value_version(tensor) != before
    before = value_version(tensor)
    tensor.data = dress(torch.zeros(2, 3), DTensor, spec)
    assert value_version(tensor) != before


def test_holes_say_that_they_are_not_filled(spec):
    bare = dress(torch.ones(2), TorchDTensorBase, spec)
    with pytest.raises(RuntimeError, match="no dispatcher is installed; import hyper_parallel"):
        torch.exp(bare)
    with pytest.raises(RuntimeError, match="how a gradient lies"):
        bare.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="where a backward pass starts"):
        torch.autograd.backward(bare)


def test_strides_are_those_of_a_whole_tensor():
    layout = Layout(init_device_mesh((1,), ("x",)), [Replicate()])

    def strides(local, shape):
        return dress(local, DTensor, TensorSpec(layout, shape)).stride()

    assert strides(torch.ones(2, 3), (8, 3)) == (3, 1)
    assert strides(torch.ones(3, 2).t(), (8, 3)) == (1, 8)
    assert strides(torch.ones(2, 4, 3).permute(1, 0, 2), (4, 2, 3)) == (3, 12, 1)
    assert strides(torch.ones(1).expand(5), (5,)) == (0,)
    assert strides(torch.ones(()), ()) == ()
    assert strides(torch.ones(2, 1), (2, 1)) == (1, 1)


def test_metadata_is_handled_without_dispatch(spec, monkeypatch):
    def refuse(func, args, kwargs):
        raise AssertionError(f"{func} was dispatched with {args} {kwargs}")

    monkeypatch.setattr(DTensor, "_dispatch", staticmethod(refuse))
    tensor = dress(torch.ones(2, 3), DTensor, spec)
    assert tensor.dim() == tensor.ndim == 2 and tensor.nbytes == 96 and len(tensor) == 8
    assert tensor.is_contiguous() and not tensor.is_complex() and tensor.element_size() == 4
    assert tensor.dtype is torch.float32 and tensor.is_leaf and tensor.grad_fn is None
    assert tensor.requires_grad_().requires_grad and not tensor.is_inference()
    assert not tensor.is_cuda and not tensor.is_meta
    assert type(tensor.detach()) is DTensor and tensor.storage_offset() == 0
    assert torch.is_floating_point(tensor) and torch.numel(tensor) == 24
    assert tensor.untyped_storage().nbytes() == 24
    tensor.requires_grad = False
    assert not tensor.requires_grad
    with pytest.raises(AssertionError, match="was dispatched"):
        torch.exp(tensor)
    with pytest.raises(AssertionError, match="was dispatched"):
        _ = tensor.T


def test_handlers_can_be_given(spec):
    def function(tensor):
        raise AssertionError(f"the handler takes it, not {type(tensor)}")

    dtensor_base.handle(function, lambda func, args, kwargs: (func, args, kwargs))
    tensor = dress(torch.ones(2, 3), DTensor, spec)
    assert TorchDTensorBase.__torch_function__(function, (DTensor,), (tensor,)) == (
        function, (tensor,), {})

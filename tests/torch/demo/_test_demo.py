"""The demo's model on its four-rank mesh trains as the dense model does."""

import torch
import torch.distributed as dist

from hyper_parallel import DTensor, parallelize_module
from hyper_parallel import demo

NPROC = 4


def test_averaged_gradients_are_those_of_the_whole_batch() -> None:
    """Two batches on "dp", weights split over "tp": the mean gradient is the dense one's."""
    mesh = demo.make_mesh()
    assert mesh.alias_name == ("dp", "tp") and mesh.mesh_shape == (2, 2)
    torch.manual_seed(0)
    dense = demo.TwoLayerMLP(demo.HIDDEN, demo.INTERMEDIATE).double()
    torch.manual_seed(0)
    model = demo.TwoLayerMLP(demo.HIDDEN, demo.INTERMEDIATE).double()
    parallelize_module(model, mesh["tp"], demo.PLAN)
    batches = torch.randn(2, demo.BATCH, demo.HIDDEN, dtype=torch.float64)
    dense(batches).square().mean().backward()
    step = demo.trace_step(model, batches[dist.get_rank() // 2].requires_grad_(), mesh)
    assert step.get_comm_counts() == {"differentiable_all_reduce": 4}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), dense.get_parameter(name).grad,
                                   rtol=1e-12, atol=1e-12)

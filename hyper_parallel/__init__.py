"""hyper_parallel: named device meshes, tensors spread over them, and a view of what is sent."""
from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor import (
    CommDebugMode, DTensor, check_replicas, distribute_tensor)
from hyper_parallel.core.dtensor._sharding_picture import visualize_sharding
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.shard import ops
from hyper_parallel.core.shard._op_dispatch import dispatcher
from hyper_parallel.core.shard._registry import register_rule
from hyper_parallel.core.tensor_parallel import (
    ColwiseParallel, ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput,
    PrepareModuleOutput, RowwiseParallel, SequenceParallel, auto_plan, describe, distribute_module,
    loss_parallel, parallelize_module, replicate, unparallelize_module,
    unreplicate)
from hyper_parallel.platform import get_platform

__all__ = [
    "ColwiseParallel", "CommDebugMode", "DTensor", "DeviceMesh", "Layout", "ParallelStyle",
    "Partial", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "Replicate",
    "RowwiseParallel", "SequenceParallel", "Shard", "auto_plan", "check_replicas", "describe",
    "distribute_module", "distribute_tensor", "get_platform", "init_device_mesh", "loss_parallel",
    "parallelize_module", "register_rule", "replicate", "unparallelize_module", "unreplicate",
    "visualize_sharding",
]

# The tensor base class below knows no dispatcher: it is given one here.
DTensor._dispatch = staticmethod(dispatcher.dispatch)
DTensor._is_observed = staticmethod(dispatcher.is_observed)

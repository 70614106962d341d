"""Tensor parallelism: styles for modules, and the functions that apply a plan of them."""
from hyper_parallel.core.tensor_parallel._record import describe
from hyper_parallel.core.tensor_parallel.api import parallelize_module, unparallelize_module
from hyper_parallel.core.tensor_parallel.auto_plan import auto_plan
from hyper_parallel.core.tensor_parallel.distribute import distribute_module
from hyper_parallel.core.tensor_parallel.loss import loss_parallel
from hyper_parallel.core.tensor_parallel.prepare import (
    PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput)
from hyper_parallel.core.tensor_parallel.replicate import replicate, unreplicate
from hyper_parallel.core.tensor_parallel.sequence import SequenceParallel
from hyper_parallel.core.tensor_parallel.style import (
    ColwiseParallel, ParallelStyle, RowwiseParallel)

__all__ = [
    "ColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput",
    "PrepareModuleOutput", "RowwiseParallel", "SequenceParallel", "auto_plan", "describe",
    "distribute_module", "loss_parallel", "parallelize_module", "replicate",
    "unparallelize_module", "unreplicate",
]

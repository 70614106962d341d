"""Tensor parallelism: styles for modules, and the function that applies a plan of them."""
from hyper_parallel.core.tensor_parallel.api import parallelize_module
from hyper_parallel.core.tensor_parallel.style import (
    ColwiseParallel, ParallelStyle, RowwiseParallel)

__all__ = ["ColwiseParallel", "ParallelStyle", "RowwiseParallel", "parallelize_module"]

"""DTensor, redistribution, and the tracer that shows what they send."""
from hyper_parallel.core.dtensor.debug import CommDebugMode, check_replicas
from hyper_parallel.core.dtensor.dtensor import DTensor, distribute_tensor

__all__ = ["CommDebugMode", "DTensor", "check_replicas", "distribute_tensor"]

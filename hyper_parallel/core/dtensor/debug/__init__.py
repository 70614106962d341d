"""Layer 6: shows which module and which operator caused every collective."""
from hyper_parallel.core.dtensor.debug._comm_debug_mode import CommDebugMode

__all__ = ["CommDebugMode"]

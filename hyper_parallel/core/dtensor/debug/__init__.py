"""Layer 6: shows which module and which operator caused every collective."""
from hyper_parallel.core.dtensor.debug._comm_debug_mode import CommDebugMode
from hyper_parallel.core.dtensor.debug._comm_trace import CommTrace
from hyper_parallel.core.dtensor.debug._prohibition import (
    ImplicitRedistributionError,
    ImplicitRedistributionWarning,
)
from hyper_parallel.core.dtensor.debug._replica_check import (
    ReplicaMismatchError,
    check_replicas,
)
from hyper_parallel.core.dtensor.debug._router import forbid_implicit
from hyper_parallel.core.dtensor.debug._verifier import CollectiveMismatchError

__all__ = ["CollectiveMismatchError", "CommDebugMode", "CommTrace", "ImplicitRedistributionError",
           "ImplicitRedistributionWarning", "ReplicaMismatchError", "check_replicas",
           "forbid_implicit"]

"""Traces of communication: record them, bound them in tests, compare them across ranks and runs.

``python -m hyper_parallel.debug --help`` lists the commands for trace files.
"""
from hyper_parallel.core.dtensor.debug import (
    CollectiveMismatchError,
    CommDebugMode,
    CommTrace,
    ImplicitRedistributionError,
    ImplicitRedistributionWarning,
    forbid_implicit,
)
from hyper_parallel.debug._budget import assert_comms
from hyper_parallel.debug._compare import check_traces, diff_traces

__all__ = [
    "CollectiveMismatchError", "CommDebugMode", "CommTrace", "ImplicitRedistributionError",
    "ImplicitRedistributionWarning", "assert_comms", "check_traces", "diff_traces",
    "forbid_implicit",
]

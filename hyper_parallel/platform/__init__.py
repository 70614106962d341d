"""Layer 1: the one place that knows a framework (PyTorch or MindSpore)."""
from hyper_parallel.platform.choice import get_platform
from hyper_parallel.platform.platform import Platform

__all__ = ["Platform", "get_platform"]

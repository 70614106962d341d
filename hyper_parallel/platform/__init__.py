"""Layer 1: the one place that knows a framework (PyTorch or MindSpore)."""
from hyper_parallel.platform.platform import Platform, get_platform

__all__ = ["Platform", "get_platform"]

"""Tensor-parallel styles."""

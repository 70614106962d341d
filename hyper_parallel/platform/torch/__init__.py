"""The adapter for PyTorch: process groups, collectives with gradients, the tensor class."""

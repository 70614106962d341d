"""The adapter for MindSpore: process groups, collectives with gradients, the tensor class."""

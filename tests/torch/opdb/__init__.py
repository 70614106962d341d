"""Every operator of PyTorch's own test database, on DTensors, against the plain operator."""

# Before PyTorch's database, which takes hold of functions that the library replaces.
import hyper_parallel

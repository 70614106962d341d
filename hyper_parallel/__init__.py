"""hyper_parallel."""

"""The rules, one file a family; importing this package enters them into the registry."""
from hyper_parallel.core.shard._registry import draws_random_numbers, needs_whole
from hyper_parallel.core.shard.ops import (
    blocks, convolution, foreach, indexing, joining, loss, matmul, normalization, pointwise,
    reduction, scatter, view)

__all__ = ["blocks", "convolution", "foreach", "indexing", "joining", "loss", "matmul",
           "normalization", "pointwise", "reduction", "scatter", "view"]

# Operators that give a Python value, or compare everything.
needs_whole("item tolist numpy __bool__ __float__ __int__ __complex__ __index__ contains "
            "is_nonzero equal allclose array _local_scalar_dense repr iter nonzero unique "
            "_unique2 unique_dim unique_consecutive masked_select")
draws_random_numbers("multinomial poisson binomial rrelu_with_noise feature_dropout "
                     "feature_alpha_dropout lstm gru rnn_tanh rnn_relu _standard_gamma "
                     "_sample_dirichlet svd_lowrank pca_lowrank fractional_max_pool2d "
                     "fractional_max_pool2d_with_indices fractional_max_pool3d "
                     "fractional_max_pool3d_with_indices")

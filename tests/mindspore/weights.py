"""Weights of the models that the tests make."""
from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn


def fill(model: nn.Cell) -> nn.Cell:
    """The same weights on every rank, whatever the rank's seed."""
    generator = np.random.default_rng(0)
    for parameter in model.get_parameters():
        values = generator.standard_normal(parameter.shape).astype(np.float32) / 4
        parameter.set_data(Tensor(values))
    return model

"""The model whose collectives the tests of the tracer count."""
import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """Column-wise ``a``, row-wise ``b``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16, bias=False)
        self.b = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 8) in and out."""
        return self.b(F.relu(self.a(x)))

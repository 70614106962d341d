"""Groups of four ranks, and data of which every rank can compute the dense result by itself."""
import torch
from torch import Tensor

from hyper_parallel.platform.torch.platform import TorchPlatform as platform

# Ways to divide ranks 0 to 3: all in order, all in another order, pairs, three and one.
DIVISIONS = ([[0, 1, 2, 3]], [[3, 1, 2, 0]], [[1, 0], [2, 3]], [[2, 0, 1], [3]])


class Team:
    """The group of one division that this process is in."""

    def __init__(self, division: list[list[int]]) -> None:
        rank = platform.get_rank()
        self.ranks = next(ranks for ranks in division if rank in ranks)
        self.group = platform.create_group(self.ranks)
        self.size = len(self.ranks)
        self.position = self.ranks.index(rank)

    def data(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """What each member holds, in the order of the group: small whole numbers, some equal."""
        return [numbers(shape, rank, dtype) for rank in self.ranks]


def teams() -> list[Team]:
    """This process's team in each division."""
    return [Team(division) for division in DIVISIONS]


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers from 0 to 3, which every dtype holds and few sums exceed."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 4, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(whole.double(), whole.flip(0).double()).to(dtype)
    return whole.to(dtype)

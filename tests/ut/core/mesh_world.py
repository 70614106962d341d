"""Stand-ins for the platform under a device mesh."""
from typing import Any

import numpy as np
import torch

from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh


class World:
    """A platform of one rank that remembers the groups it was asked for."""

    def __init__(self) -> None:
        self.rank = 0
        self.made: list[list[int]] = []

    def get_rank(self) -> int:
        """The rank that the test is at."""
        return self.rank

    def create_group(self, rank_list: list[int]) -> str:
        """A name that tells when it was made."""
        self.made.append(rank_list)
        return f"group {len(self.made)}"

    def tensor_to_numpy(self, tensor: torch.Tensor) -> np.ndarray:
        """What torch does."""
        return tensor.numpy()


class Runtime:
    """The part of the platform that a mock does not replace."""

    def __init__(self) -> None:
        self.lives = 0
        self.world_size: Any = None

    def generation(self) -> int:
        """Lives of the default group that ended."""
        return self.lives

    def known_world_size(self) -> Any:
        """As the test says."""
        return self.world_size

    def self_group(self) -> str:
        """The group of one."""
        return "alone"


def cube() -> DeviceMesh:
    """The mesh of the M cases: eight ranks, three axes."""
    return init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))

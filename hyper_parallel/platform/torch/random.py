"""The framework's random generators: agreeing on a state, and running from a seed."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist


def initial_seed() -> int:
    """The seed that the default generator was last given, or its state's mark."""
    return torch.initial_seed()


def draw_seed() -> int:
    """The next number of the default CPU generator, which moves on as for any draw."""
    return int(torch.randint(2 ** 62, (), dtype=torch.int64, device="cpu").item())


def agree_on_random_state(broadcast: Callable[[Any], Any], group: Any, mark: int) -> None:
    """Give every rank of ``group`` the default CPU generator's state of its first rank.

    ``broadcast`` overwrites a tensor by that of the first rank.
    """
    state = torch.get_rng_state()
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else state.device
    state = broadcast(state.to(device)).to(state.device)
    # A state starts with the seed it once came from, on which no further draw depends.
    state[:8] = torch.tensor([mark]).view(torch.uint8)
    torch.set_rng_state(state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with the default generators seeded by ``seed``, then put their states back."""
    accelerator = torch.cuda.is_initialized()
    cpu_state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if accelerator else None
    try:
        torch.default_generator.manual_seed(seed)
        if accelerator:
            torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if accelerator:
            torch.cuda.set_rng_state(device_state)

"""The framework's random generators: agreeing on a state, and running from a seed."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional

import torch
import torch.distributed as dist

# The state of a generator on an accelerator: its seed, on which all of its draws depend, and how
# many there were.  That of the CPU's is far longer, and begins with a seed that no draw needs.
_DEVICE_STATE = 16


def initial_seed(generator: Optional[torch.Generator] = None) -> int:
    """See ``Platform.initial_seed``."""
    return (generator or torch.default_generator).initial_seed()


def draw_seed(generator: Optional[torch.Generator] = None) -> int:
    """The next number of the default CPU generator, or another, which moves on as for any draw."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2 ** 62, (), dtype=torch.int64, device=device, generator=generator))


def agree_on_random_state(broadcast: Callable[[Any], Any], group: Any, mark: int,
                          generator: Optional[torch.Generator] = None) -> None:
    """See ``Platform.agree_on_random_state``; the default generators are all of them.

    ``broadcast`` overwrites a tensor by that of the first rank.
    """
    state = (generator or torch.default_generator).get_state()
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else state.device
    on_device = generator is None and torch.cuda.is_initialized()
    # Room for the accelerator's on every rank, whether it is in use there or not.
    room = torch.cuda.get_rng_state() if on_device else torch.zeros(_DEVICE_STATE,
                                                                    dtype=torch.uint8)
    sent = broadcast(torch.cat((torch.tensor([on_device], dtype=torch.uint8), room, state)
                               ).to(device)).to(state.device)
    used, room, state = sent[0], sent[1:1 + len(room)], sent[1 + len(room):].clone()
    if len(state) > _DEVICE_STATE:
        state[:8] = torch.tensor([mark]).view(torch.uint8)
    (generator or torch.default_generator).set_state(state)
    if on_device and used:
        torch.cuda.set_rng_state(room.clone())


@contextmanager
def seeded(seed: int, generator: Optional[torch.Generator] = None) -> Iterator[None]:
    """See ``Platform.seeded``."""
    accelerator = generator is None and torch.cuda.is_initialized()
    host = generator or torch.default_generator
    state = host.get_state()
    device_state = torch.cuda.get_rng_state() if accelerator else None
    try:
        host.manual_seed(seed)
        if accelerator:
            torch.cuda.manual_seed(seed)
        yield
    finally:
        host.set_state(state)
        if accelerator:
            torch.cuda.set_rng_state(device_state)

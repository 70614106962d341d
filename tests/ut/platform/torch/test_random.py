"""The agreement on random states where an accelerator is in use, which is acted here."""
import torch

from hyper_parallel.platform.torch import random


class _Accelerator:
    """The state of a rank's accelerator."""

    def __init__(self, number: int) -> None:
        self.state = torch.full((16,), number, dtype=torch.uint8)

    def get(self) -> torch.Tensor:
        """A copy of the state."""
        return self.state.clone()

    def set(self, state: torch.Tensor) -> None:
        """Another state."""
        self.state = state


def _agree(monkeypatch, sent, accelerator):
    """One rank; what it is sent in place of its own, or None where it is the first."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: accelerator is not None)
    if accelerator is not None:
        monkeypatch.setattr(torch.cuda, "get_rng_state", accelerator.get)
        monkeypatch.setattr(torch.cuda, "set_rng_state", accelerator.set)
    monkeypatch.setattr(random.dist, "get_backend", lambda group: "gloo")
    seen = []

    def broadcast(state):
        seen.append(state.clone())
        return state if sent is None else state.copy_(sent)

    random.agree_on_random_state(broadcast, None, 77)
    assert random.initial_seed() == 77
    return seen[0]


def test_the_accelerators_state_goes_along(monkeypatch):
    torch.manual_seed(1)
    sent = _agree(monkeypatch, None, _Accelerator(5))
    drawn = torch.rand(3)
    torch.manual_seed(2)
    other = _Accelerator(9)
    assert _agree(monkeypatch, sent, other).shape == sent.shape
    assert torch.equal(torch.rand(3), drawn)
    assert other.state.tolist() == [5] * 16


def test_a_rank_without_one_sends_and_takes_as_much(monkeypatch):
    sent = _agree(monkeypatch, None, None)
    used = _Accelerator(9)
    assert _agree(monkeypatch, sent, used).shape == sent.shape
    assert used.state.tolist() == [9] * 16

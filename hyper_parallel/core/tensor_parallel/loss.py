"""``loss_parallel``: PyTorch's name for what a cross-entropy over split classes does anyway."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator


@contextmanager
def loss_parallel() -> Iterator[None]:
    """A context for the loss, in which logits that are split over classes are never gathered.

    Programs written for PyTorch need it.  Here it changes nothing: the rules of ``cross_entropy``
    and ``nll_loss`` send one maximum and two sums for each row wherever the classes of a DTensor
    are split, within this context and without it, and so does their backward.  The lm_head needs
    ``ColwiseParallel(use_local_output=False)``, which is the default here.
    """
    yield

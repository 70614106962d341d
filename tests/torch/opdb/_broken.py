"""Operators that are broken on purpose; prints what the harness says of each as JSON."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hyper_parallel as our
from tests.torch.opdb.crew import verdicts
from tests.torch.opdb.database import Entry, sample
from tests.torch.opdb.libraries import Ours


def _on_dtensors(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that is the identity of plain tensors, and ``function`` of DTensors."""
    return lambda x: function(x) if isinstance(x, our.DTensor) else x.clone()


def _doubled(x: Any) -> Any:
    return our.DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements, shape=x.shape)


def _without_gradient(x: Any) -> Any:
    return x.detach() + 0 * x


def _wrong_on_one_rank(x: Any) -> Any:
    return _doubled(x) if dist.get_rank() else x.clone()


def _fails_on_one_rank(x: Any) -> Any:
    if dist.get_rank():
        raise ValueError("only here")
    return x.full_tensor()


def _waits_on_one_rank(x: Any) -> Any:
    if dist.get_rank():
        time.sleep(600)
    return x.clone()


def _waits_on_both_ranks(x: Any) -> Any:
    time.sleep(600)
    return x.clone()


def _dies_on_one_rank(x: Any) -> Any:
    if dist.get_rank():
        os._exit(3)
    return x.clone()


def _refused(x: Any) -> Any:
    return x.redistribute(placements=[our.Shard(7)])


def _crashes(x: Any) -> Any:
    return x[None].nothing_of_this_name


def _random(x: Any) -> Any:
    return x + torch.rand(3)


FUNCTIONS = {
    "right": _on_dtensors(lambda x: x * 1), "wrong value": _on_dtensors(_doubled),
    "wrong gradient": _on_dtensors(_without_gradient),
    "wrong on one rank": _on_dtensors(_wrong_on_one_rank),
    "fails on one rank": _on_dtensors(_fails_on_one_rank),
    "waits on one rank": _on_dtensors(_waits_on_one_rank),
    "dies on one rank": _on_dtensors(_dies_on_one_rank),
    "waits on both ranks": _on_dtensors(_waits_on_both_ranks),
    "refused": _on_dtensors(_refused), "crashes": _on_dtensors(_crashes),
    "plain": _on_dtensors(lambda x: x.full_tensor()), "random": _random, "right again": torch.neg,
}


def main() -> None:
    """Try them all; a wait counts as a hang after seconds."""
    entries = [Entry(name, lambda f=function: [sample(f, torch.ones(4, 3, requires_grad=True))])
               for name, function in FUNCTIONS.items()]
    found: dict[str, list[list[str]]] = {name: [] for name in FUNCTIONS}
    for trial, verdict in verdicts(entries, Ours.name, limit=5.0, grace=1.0):
        found[entries[trial.entry].name].append([verdict.kind, verdict.note])
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Trains a tiny Llama on a (dp, tp) mesh; docs/tutorials/train_llama.md explains it.

    torchrun --nproc-per-node 4 docs/tutorials/train_llama.py --tp 2 --steps 40 --folder /tmp/llama
    torchrun --nproc-per-node 2 docs/tutorials/train_llama.py --tp 1 --steps 60 --folder /tmp/llama

The second command goes on where the first one ended, on another mesh.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel import (
    CommDebugMode, DeviceMesh, DTensor, Partial, auto_plan, describe, distribute_tensor,
    get_platform, init_device_mesh, parallelize_module, replicate)

LETTERS = "0123456789+-= \n"
ROWS, LENGTH = 8, 32  # of a batch, over all ranks


def make_model() -> nn.Module:
    """The same Llama on every rank and in every run."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(LETTERS) + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
        use_cache=False))


def make_batch(step: int) -> torch.Tensor:
    """Rows of sums such as ``31+7=38``, as numbers of letters; the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = []
    for _ in range(ROWS):
        text = ""
        while len(text) < LENGTH:
            one, other = torch.randint(0, 50, (2,), generator=generator).tolist()
            text += f"{one}+{other}={one + other}\n"
        rows.append([LETTERS.index(letter) for letter in text[:LENGTH]])
    return torch.tensor(rows)


class Run:
    """A model, its optimizer and how far they came.

    Args:
        mesh: mesh with the axes "dp" and "tp".
        verbose: whether the first rank prints the plan and what it saves.

    Raises:
        ValueError: "dp" does not divide the rows of a batch.
    """

    def __init__(self, mesh: DeviceMesh, verbose: bool = False) -> None:
        if ROWS % mesh["dp"].size():
            raise ValueError(f"a batch of {ROWS} rows does not divide by dp={mesh['dp'].size()}; "
                             "take another number of ranks, or another --tp.")
        self.mesh = mesh
        self.step = 0
        self.model = make_model()
        first = mesh["dp"].get_local_rank() == 0
        plan = auto_plan(self.model, mesh["tp"], verbose=verbose and first)
        parallelize_module(self.model, mesh["tp"], plan)
        replicate(self.model, mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, eps=1e-6)
        if verbose and mesh.rank == 0:
            print(f"tensor parallelism saves {describe(self.model).bytes_saved} bytes here")

    def advance(self) -> float:
        """One step; the mean loss over the whole batch."""
        rows = make_batch(self.step).chunk(self.mesh["dp"].size())
        own = rows[self.mesh["dp"].get_local_rank()]
        self.optimizer.zero_grad()
        loss = self.model(input_ids=own, labels=own)["loss"]
        loss.backward()
        self.optimizer.step()
        self.step += 1
        # Every rank has the mean over its rows, which is a term of the mean over all.
        mean = DTensor.from_local(loss.detach(), self.mesh["dp"], [Partial("avg")])
        return mean.full_tensor().item()


# ---- checkpoints: whole tensors, so that any mesh can read them ----


def save(run: Run, folder: Path) -> None:
    """Write a checkpoint; nothing reads it before it is complete."""
    state = {"step": run.step, "model": {name: whole(value) for name, value
                                         in run.model.state_dict().items()},
             "optimizer": [{name: whole(value) for name, value in run.optimizer.state[one].items()}
                           for one in run.model.parameters()]}
    if run.mesh.rank == 0:
        half = folder / "half"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        torch.save(state, half / "state.pt")
        (half / "complete.json").write_text(json.dumps({"sha256": digest(half / "state.pt")}))
        os.replace(half, folder / f"step-{run.step:06d}-{time.time_ns()}")


def load(run: Run, folder: Path) -> bool:
    """Go on from the last checkpoint of a folder; False where there is none.

    Raises:
        RuntimeError: the checkpoint is torn; the run is as it was.
    """
    found = sorted(folder.glob("step-*"))
    if not found:
        return False
    path = found[-1]
    try:
        wanted = json.loads((path / "complete.json").read_text())["sha256"]
        torn = digest(path / "state.pt") != wanted
    except (OSError, ValueError, KeyError):
        torn = True
    if torn:
        raise RuntimeError(f"the checkpoint {path} is torn: its files are not those that were "
                           f"written; remove it to go on from the one before, of {len(found)}.")
    state = torch.load(path / "state.pt", weights_only=True)
    run.model.load_state_dict(state["model"])
    for parameter, values in zip(run.model.parameters(), state["optimizer"], strict=True):
        run.optimizer.state[parameter] = {name: spread(value, parameter) for name, value
                                          in values.items()}
    run.step = state["step"]
    return True


def digest(file: Path) -> str:
    """What tells a file from a torn one."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def whole(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def spread(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a parameter lies; a number of steps stays a number."""
    if not value.shape or not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements,
                             src_data_rank=None)


# ---- the program ----


def train(run: Run, steps: int, folder: Path | None = None, every: int = 20,
          progress: bool = False) -> list[float]:
    """Train up to a number of steps; the losses."""
    losses: list[float] = []
    began = time.perf_counter()
    while run.step < steps:
        losses.append(run.advance())
        if progress:
            done = run.step * 30 // steps
            speed = len(losses) * ROWS * LENGTH / (time.perf_counter() - began)
            print(f"\rstep {run.step}/{steps} [{'#' * done}{'-' * (30 - done)}] "
                  f"loss {losses[-1]:.3f}, {speed:.0f} tokens/s", end="", file=sys.stderr)
        if folder is not None and (run.step % every == 0 or run.step == steps):
            save(run, folder)
    if progress:
        print(file=sys.stderr)
    return losses


def summary(run: Run) -> str:
    """What one more step would send, by kind and axis. It is taken, so call it at the end."""
    with CommDebugMode(module=run.model) as mode:
        run.advance()
    return mode.generate_comm_summary_table(("type", "axis"))


def main() -> None:
    """See above."""
    options: Any = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tp", type=int, default=2, help="ranks that share a layer")
    options.add_argument("--steps", type=int, default=40, help="steps in all")
    options.add_argument("--folder", type=Path, help="of checkpoints, to go on from the last")
    options.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    options = options.parse_args()
    get_platform().init_process_group()
    ranks = get_platform().get_world_size()
    if options.tp < 1 or ranks % options.tp:
        raise ValueError(f"--tp {options.tp} does not divide the {ranks} ranks.")
    mesh = init_device_mesh((ranks // options.tp, options.tp), ("dp", "tp"))
    run = Run(mesh, verbose=True)
    if options.folder is not None and load(run, options.folder) and mesh.rank == 0:
        print(f"goes on from step {run.step}")
    losses = train(run, options.steps, options.folder, options.every, progress=mesh.rank == 0)
    text = summary(run)
    if mesh.rank == 0:
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))
        print(text)
    get_platform().destroy_process_group()


if __name__ == "__main__":
    main()

"""One training step of a tiny Llama from transformers: ours beside PyTorch's, on two ranks.

    torchrun --nproc-per-node 2 benchmarks/llama_step.py

tp=2 is ``parallelize_module`` of both libraries with the plan that ``auto_plan`` proposes; dp=2 is
``replicate`` beside ``DistributedDataParallel``.  The variants take turns step by step in one
process; a ratio is the median of the ratios of neighbouring steps.
"""
from __future__ import annotations

import argparse
import copy
from importlib import import_module
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn.parallel import DistributedDataParallel
from turns import join_ranks, medians, take_turns

import hyper_parallel as hp

VOCABULARY, ROWS, LENGTH = 256, 4, 32


def make_model(hidden: int, layers: int) -> nn.Module:
    """The same one on each rank."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=LENGTH, use_cache=False))


def in_torch(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with PyTorch's styles."""
    styles: dict[str, Any] = {}
    for path, style in plan.items():
        cls = getattr(torch_parallel, type(style).__name__)
        options: dict[str, Any] = {}
        if style.output_layouts is not None:
            options["output_layouts"] = torch_tensor.Replicate()
        if path.endswith("embed_tokens"):
            options["input_layouts"] = torch_tensor.Replicate()
        styles[path] = cls(**options)
    return styles


def tensor_parallel(model: nn.Module) -> dict[str, nn.Module]:
    """Both libraries' models on tp=2."""
    mesh = hp.init_device_mesh((2,), ("tp",))
    plan = hp.auto_plan(model, mesh, verbose=False)
    ours = hp.parallelize_module(copy.deepcopy(model), mesh, plan)
    theirs = torch_parallel.parallelize_module(
        copy.deepcopy(model), torch_init_device_mesh("cpu", (2,)), in_torch(plan))
    return {"torch": theirs, "ours": ours}


def data_parallel(model: nn.Module) -> dict[str, nn.Module]:
    """Both libraries' models on dp=2."""
    ours = hp.replicate(copy.deepcopy(model), hp.init_device_mesh((2,), ("dp",)))
    return {"torch": DistributedDataParallel(copy.deepcopy(model)), "ours": ours}


def make_step(model: nn.Module, ids: torch.Tensor) -> Callable[[], float]:
    """A training step with SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def measure(name: str, make: Callable[[nn.Module], dict[str, nn.Module]], hidden: int, layers: int,
            steps: int) -> None:
    """Print the medians of one comparison."""
    generator = torch.Generator().manual_seed(dist.get_rank() if name == "dp" else 0)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    runs = {kind: make_step(model, ids) for kind, model in
            make(make_model(hidden, layers)).items()}
    losses = {kind: [run() for _ in range(10)] for kind, run in runs.items()}
    if not torch.allclose(torch.tensor(losses["ours"]), torch.tensor(losses["torch"])):
        raise SystemExit(f"the loss curves differ: {losses}")
    times = medians(take_turns(runs, steps), "torch")
    if dist.get_rank() == 0:
        print(f"{name}=2, hidden {hidden:>4}, {layers} layers: torch "
              f"{times['torch'][0] / 1e3:.1f} ms, ours {times['ours'][0] / 1e3:.1f} ms, ratio "
              f"{times['ours'][1]:.2f}", flush=True)


def main() -> None:
    """Measure two sizes of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    join_ranks()
    for hidden in arguments.hidden:
        measure("tp", tensor_parallel, hidden, arguments.layers, arguments.steps)
        measure("dp", data_parallel, hidden, arguments.layers, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

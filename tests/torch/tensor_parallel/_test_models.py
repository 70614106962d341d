"""Models that nobody here wrote, on tp=2 and on dp=2 x tp=2, beside one process.

All in float32, as users train. What is left is the order of sums: each product here has at most 96
terms, so values differ by some 1e-6 of the largest one; ``CLOSE`` is ten times that. AdamW divides
a gradient by its own size, which makes noise of the gradients that are zero in theory (that of a
key's bias): eps=1e-6 keeps it below 1e-3 of a step, and five steps of 1e-3 below ``CLOSE``.
"""
import copy
import shutil
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    ColwiseParallel, CommDebugMode, DeviceMesh, DTensor, PrepareModuleInput, Replicate, Shard,
    auto_plan, describe, init_device_mesh, parallelize_module, replicate)
from tests.torch.launcher import ROOT
from tests.torch.tensor_parallel.model_zoo import FLOAT, MODELS, ROWS, WIDTH, Entry
from tests.torch.tensor_parallel.training import collectives

NPROC = 4
TIMEOUT = 120  # the first case imports transformers
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
STEPS = 5


def whole(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """See above."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Forward and backward."""
    model.zero_grad()
    output = model(**inputs)
    output["loss"].backward()
    return output


def own_rows(inputs: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The rows of this rank."""
    return {name: value.chunk(mesh.size())[mesh.get_local_rank()]
            for name, value in inputs.items()}


def check(entry: Entry, mesh: DeviceMesh, with_dp: bool) -> None:
    """Logits, loss, every gradient, five steps, and the number and bytes of collectives."""
    torch.manual_seed(0)
    dense = entry.make()
    model = copy.deepcopy(dense)
    parallelize_module(model, mesh["tp"], auto_plan(model, mesh["tp"], verbose=False))
    assert describe(model).bytes_saved > 0
    inputs, rows = dict(entry.inputs), ROWS
    if with_dp:
        replicate(model, mesh["dp"])
        inputs, rows = own_rows(inputs, mesh["dp"]), ROWS // 2
    steppers = optimizer(dense), optimizer(model)
    for _ in range(STEPS):
        expected = step(dense, dict(entry.inputs))
        with collectives() as given:
            output = step(model, inputs)
        assert given == entry.traffic(rows, 2), f"{given}\n{entry.traffic(rows, 2)}"
        compare(model, dense, output, expected, mesh["dp"] if with_dp else None)
        for stepper in steppers:
            stepper.step()
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs.detach(), **CLOSE,
                                   msg=lambda text, name=name: f"{name} at last: {text}")
    check_trace(entry, model, inputs, rows, with_dp)


def compare(model: nn.Module, dense: nn.Module, output: Any, expected: Any,
            axis: DeviceMesh | None) -> None:
    """One step of both."""
    logits, loss = whole(output["logits"]), whole(output["loss"])
    wanted = expected["logits"].detach()
    if axis is not None:
        wanted = wanted.chunk(axis.size())[axis.get_local_rank()]
        loss = loss.clone()
        dist.all_reduce(loss, group=axis.get_group())
        loss /= axis.size()
    torch.testing.assert_close(logits, wanted, **CLOSE)
    torch.testing.assert_close(loss, expected["loss"].detach(), **CLOSE)
    for (name, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(whole(mine.grad), theirs.grad, **CLOSE,
                                       msg=lambda text, name=name: f"gradient of {name}: {text}")


def check_trace(entry: Entry, model: nn.Module, inputs: dict[str, torch.Tensor], rows: int,
                with_dp: bool) -> None:
    """CommDebugMode counts the same, and one bucket of gradients beside it."""
    with CommDebugMode(module=model) as mode:
        step(model, inputs)
    wanted = {name: count for name, count in entry.traffic(rows, 2).items()
              if isinstance(name, str)}
    if with_dp:
        wanted["all_reduce_async"] = 1
        # Two ranks send as much as goes in: the gradients, and a number for each parameter.
        assert mode.get_comm_bytes()["all_reduce_async"] == FLOAT * sum(
            elements_here(parameter) + 1 for parameter in model.parameters())
    counts = mode.get_comm_counts()
    counts.pop("broadcast", None)  # of the buffers, see test_replicate
    assert counts == wanted


def elements_here(parameter: torch.Tensor) -> int:
    """Elements that this rank holds."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel()


def test_llama() -> None:
    """Rotary positions, grouped keys and values, a cache."""
    run("llama")


def test_qwen3() -> None:
    """Norms within the heads, tied weights, padding."""
    run("qwen3")


def test_gpt2() -> None:
    """Transposed layers, query, key and value in one, tied weights."""
    run("gpt2")


def test_mixtral() -> None:
    """Experts that are whole behind attention that is split."""
    run("mixtral")


def test_bert() -> None:
    """Padding, tied weights and a tied bias."""
    run("bert")


def test_vit() -> None:
    """Pictures."""
    run("vit")


def test_encoder() -> None:
    """PyTorch's own encoder, whose attention is whole."""
    run("encoder")


def run(name: str) -> None:
    """Both meshes."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    for with_dp in (False, True):
        check(MODELS[name], mesh, with_dp)


def test_attention_module() -> None:
    """nn.MultiheadAttention on rows that are split, its weights whole: each gradient is summed."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))["tp"]
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    model = copy.deepcopy(dense)
    parallelize_module(model, mesh, PrepareModuleInput(
        input_layouts=(Replicate(),) * 3, desired_input_layouts=(Shard(0),) * 3))
    x = torch.randn(ROWS, 6, WIDTH)
    for mask in (None, torch.full((6, 6), float("-inf")).triu(1)):
        for weights in (False, True):
            for twin in (model, dense):
                twin.zero_grad()
            output, scores = model(x, x, x, attn_mask=mask, need_weights=weights)
            expected, others = dense(x, x, x, attn_mask=mask, need_weights=weights)
            torch.testing.assert_close(whole(output), expected.detach(), **CLOSE)
            assert scores is others or torch.allclose(whole(scores), others, **CLOSE)
            output.square().sum().backward()
            expected.square().sum().backward()
            for mine, theirs in zip(model.parameters(), dense.parameters()):
                torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)


def test_plans_are_dicts() -> None:
    """What is proposed can be edited; heads that do not divide stay whole, and it still trains."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))["tp"]
    model = MODELS["llama"].make()
    plan = auto_plan(model, mesh, verbose=False)
    assert type(plan) is dict and plan["model.layers.*.self_attn.q_proj"] == ColwiseParallel()
    del plan["lm_head"]
    plan["model.layers.1.mlp.up_proj"] = None
    with pytest.raises(ValueError, match="no module has the path"):
        parallelize_module(model, mesh, {**plan, "model.layers.*.q": ColwiseParallel()})
    parallelize_module(model, mesh, plan)
    assert not isinstance(model.lm_head.weight, DTensor)


def training_script() -> ModuleType:
    """The script of the tutorial as a module."""
    spec = spec_from_file_location("train_llama", ROOT / "docs/tutorials/train_llama.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def in_one_process(script: ModuleType, steps: int) -> list[float]:
    """The losses of the script's model without any mesh."""
    model, losses = script.make_model(), []
    stepper = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    for number in range(steps):
        ids = script.make_batch(number)
        losses.append(step(model, {"input_ids": ids, "labels": ids})["loss"].item())
        stepper.step()
    return losses


def test_training_script() -> None:
    """The loss curve is that of one process, also when it goes on on another mesh."""
    script = training_script()
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    expected = torch.tensor(in_one_process(script, 6))
    assert expected[-1] < expected[0] - 0.2
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    first = script.Run(mesh)
    assert not script.load(first, folder / "none")
    losses = torch.tensor(script.train(first, 3, folder, every=2))
    torch.testing.assert_close(losses, expected[:3], **CLOSE)
    dist.barrier()
    assert [path.name[:11] for path in sorted(folder.iterdir())] == ["step-000002", "step-000003"]
    for shape in ((4, 1), (1, 4)):
        other = script.Run(init_device_mesh(shape, ("dp", "tp")))
        assert script.load(other, folder) and other.step == 3
        torch.testing.assert_close(torch.tensor(script.train(other, 6)), expected[3:], **CLOSE)
    summary = script.summary(first)
    assert "all_reduce_async" in summary and "dp" in summary
    for tear in (lambda path: (path / "state.pt").write_bytes(
            (path / "state.pt").read_bytes()[:-9]), lambda path: (path / "complete.json").unlink()):
        dist.barrier()
        if mesh.rank == 0:
            tear(sorted(folder.iterdir())[-1])
        dist.barrier()
        before = [whole(parameter).clone() for parameter in first.model.parameters()]
        with pytest.raises(RuntimeError, match="step-000003.* is torn: .*; remove it"):
            script.load(first, folder)
        now = map(whole, first.model.parameters())
        assert first.step == 4 and all(map(torch.equal, now, before))
    script.ROWS = 6
    with pytest.raises(ValueError, match="a batch of 6 rows does not divide by dp=4"):
        script.Run(init_device_mesh((4, 1), ("dp", "tp")))
    dist.barrier()
    if mesh.rank == 0:
        shutil.rmtree(folder)

"""A slice of PyTorch's operator database, and the harness itself on operators that are broken.

The whole database is run by ``make opdb``.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.torch.launcher import RANK_ENVIRONMENT, ROOT

# Of each family some, and those that were wrong once.
SLICE = """
    add|mul|div (no_rounding_mode)|where|lerp|clamp|masked_fill|isclose|frexp|ldexp
    mm|matmul|bmm|addmm|addr|baddbmm|einsum|tensordot|inner|linalg.vecdot|nn.functional.bilinear
    sum|mean|amax|max (reduction_no_dim)|min (reduction_with_dim)|aminmax|argmax|prod|var|std_mean
    any|all|count_nonzero|logsumexp|nanmean|norm (inf)|linalg.vector_norm|median|mode|kthvalue
    softmax|nn.functional.layer_norm|nn.functional.group_norm|nn.functional.batch_norm
    view|reshape|unflatten|permute|squeeze|expand|unbind|tensor_split|unfold|diagonal|__getitem__
    cat|stack|hstack|column_stack|nn.functional.pad (constant)|repeat|tile|roll|flip|take_along_dim
    gather|scatter|scatter_reduce (amax)|index_add|index_select|nn.functional.one_hot
    nn.functional.embedding|cumsum|sort|topk|searchsorted|nn.functional.conv2d
    nn.functional.conv_transpose1d|nn.functional.scaled_dot_product_attention
    nn.functional.cross_entropy|nn.functional.nll_loss|nn.functional.max_pool2d
    fft.rfftn|linalg.solve|linalg.svd|tril|masked.sum|masked.softmax|masked.amax|masked.argmax
    masked.var|masked.norm|masked.logsumexp|to_sparse|as_strided
"""
NAMES = [name.strip() for name in re.split(r"\||\n", SLICE) if name.strip()]
REFUSED = ("to_sparse",)


def run_module(module: str, *options: str, limit: float) -> str:
    """What a module of this folder prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.torch.opdb{module}", *options], cwd=ROOT,
        env=os.environ | RANK_ENVIRONMENT, capture_output=True, text=True, timeout=limit,
        check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_slice(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    only = "|".join(map(re.escape, NAMES))
    run_module("", "--samples", "2", "--only", f"^({only})$", "--json", str(file), limit=300)
    operators = json.loads(file.read_text())["operators"]
    assert set(operators) == set(NAMES)
    kinds = {name: {verdict["kind"] for verdict in operator["verdicts"].values()}
             for name, operator in operators.items()}
    assert kinds == {name: {"refused" if name in REFUSED else "right"} for name in NAMES}
    assert all(set(operator["verdicts"]) == {"Replicate", "Shard(0)", "Shard(-1)"}
               for operator in operators.values())
    assert not any(verdict["note"] for name, operator in operators.items()
                   for verdict in operator["verdicts"].values() if name not in REFUSED)


def test_broken_operators_are_found() -> None:
    found = json.loads(run_module("._broken", limit=120))
    assert {name: sorted({kind for kind, _ in trials}) for name, trials in found.items()} == {
        "right": ["right"], "right again": ["right"], "plain": ["right"], "wrong value": ["wrong"],
        "wrong gradient": ["wrong"], "wrong on one rank": ["wrong"],
        "fails on one rank": ["wrong"], "waits on one rank": ["wrong"],
        "waits on both ranks": ["wrong"],
        "dies on one rank": ["wrong"], "refused": ["refused"], "crashes": ["crashed"],
        "random": ["excluded"]}
    assert {note for _, note in found["plain"]} == {"gives a plain tensor"}
    assert all(len(trials) == 3 for trials in found.values())

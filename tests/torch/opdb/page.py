"""Writes ``docs/operators.md`` from the verdicts on both libraries."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.torch.opdb.report import Operator, left_out, rest, table
from tests.torch.opdb.trial import WRONG, Verdict

PAGE = """# Operators

<!-- ranks: 2 -->

PyTorch tests itself with a database of its operators, each with samples of its arguments. `make opdb`
runs it through DTensors on two ranks and compares the value and all gradients with the plain operator,
with all tensors replicated, with the first one split along its first dim, and with the first one split
along its last. An operator is *right* only if all its samples are; *refused* if the library raises an
error of its own that says why; *crashed* if anything else is raised; *wrong* if a value or a gradient
differs, or if a rank waits for ever. The same harness runs PyTorch's DTensor (`--baseline`). This page is
what it wrote with PyTorch {version} and {samples} samples of each operator.

## Here

{ours}

## PyTorch's DTensor

{theirs}

## What is not right here

{rest}

## What is wrong in PyTorch's DTensor

{wrong}

## What is not compared

{left_out}

## What it costs

Right is not yet cheap: an operator without a rule for its layout is computed on gathered operands. Of the
{compared} operators, {moving} gather in some sample with the first dim split. That an operator which looks
at all elements along a dim gathers when that dim is split is no fault, nor that a dim of size 1 is gathered
to be stretched. A reduction does not gather:

```python
import torch
from hyper_parallel import CommDebugMode, Shard, distribute_tensor, get_platform, init_device_mesh

get_platform().init_process_group()
mesh = init_device_mesh((2,), ("x",))
x = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])
with CommDebugMode() as mode:
    largest = x.amax(0)
if mesh.rank == 0:
    print(largest.to_local().tolist(), mode.get_comm_counts())
get_platform().destroy_process_group()
```

```text
[8.0, 9.0] {{'differentiable_all_reduce': 1}}
```
"""


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ours", type=Path, help="verdicts of this library (--json)")
    parser.add_argument("theirs", type=Path, help="verdicts of PyTorch's (--baseline --json)")
    options = parser.parse_args()
    samples, ours = read(options.ours)
    _, theirs = read(options.theirs)
    with_gathers = [operator for operator in ours.values() if not operator.excluded
                    and operator.verdicts.get("Shard(0)", Verdict("")).gathers]
    print(PAGE.format(
        version=torch.__version__.partition("+")[0], samples=samples, ours=table(ours),
        theirs=table(theirs), rest=_list_of_rest(ours), wrong=_list_of_rest(theirs, WRONG),
        left_out="\n".join(f"- {reason}: {_names(names)}"
                           for reason, names in sorted(left_out(ours).items())),
        compared=sum(not operator.excluded for operator in ours.values()),
        moving=len(with_gathers)), end="")


def read(file: Path) -> tuple[int, dict[str, Operator]]:
    """Number of samples and operators that a run wrote."""
    data = json.loads(file.read_text(encoding="utf-8"))
    return data["samples"], {
        name: Operator(name, {layout: Verdict(**one) for layout, one in entry["verdicts"].items()},
                       entry["excluded"]) for name, entry in data["operators"].items()}


def _list_of_rest(operators: Mapping[str, Operator], only: str = "") -> str:
    """One line for each operator: verdict, layouts, and the note of the first of them."""
    lines: dict[str, tuple[str, list[str], str]] = {}
    for (kind, note), names in rest(operators).items():
        for name, layouts in names.items():
            if kind == only or not only:
                known = lines.setdefault(name, (kind, [], note))
                known[1].extend(layouts)
    return "\n".join(f"- `{name}` ({kind}; {', '.join(layouts)}): {_code(note)}"
                     for name, (kind, layouts, note) in lines.items()) or "Nothing."


def _code(note: str) -> str:
    return "`" + note.replace("`", "'").replace("|", "/") + "`"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main()

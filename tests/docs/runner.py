"""Runs the examples of a Markdown document, so that what a reader sees is what happens.

The ``python`` blocks of a document are one program, run block by block in order. A ``text`` block
that comes next after one shows what it prints, to the character. A document that says
``<!-- ranks: N -->`` runs on N ranks as under torchrun; its output is rank 0's, and the other
ranks must print nothing. Other documents run as under plain ``python``.
"""

import builtins
import contextlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch.distributed as dist

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RANKS = re.compile(r"<!-- ranks: (\d+) -->")
TORCHRUN_NAMES = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)$|MASTER_|TORCHELASTIC_")


@dataclass(frozen=True)
class Example:
    """A ``python`` block at a line of its document, and what it should print, if that is shown."""

    line: int
    source: str
    output: str | None


def ranks_of(document: str) -> int:
    """How many ranks a document's examples run on."""
    found = RANKS.search(document)
    return int(found[1]) if found else 1


def examples_of(document: str) -> list[Example]:
    """The examples of a document, in order."""
    blocks = list(FENCE.finditer(document))
    found = []
    for block, following in zip(blocks, [*blocks[1:], None]):
        if block[1] == "python":
            shown = following is not None and following[1] == "text"
            line = document.count("\n", 0, block.start()) + 2
            found.append(Example(line, block[2], following[2] if shown else None))
    return found


def run_document(path: str) -> None:
    """Runs a document's examples in this process; AssertionError where an output differs.

    The launcher's default group is destroyed first: the examples start as a user's program does.
    """
    document = Path(path).read_text(encoding="utf-8")
    rank = dist.get_rank()
    dist.destroy_process_group()
    if ranks_of(document) == 1:
        for name in [name for name in os.environ if TORCHRUN_NAMES.match(name)]:
            del os.environ[name]
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    for example in examples_of(document):
        printed = io.StringIO()
        # Empty lines in front give the traceback the document's own line numbers.
        code = compile("\n" * (example.line - 1) + example.source, path, "exec")
        with contextlib.redirect_stdout(printed):
            FunctionType(code, names)()
        where = f"{path}:{example.line}"
        if rank != 0:
            assert printed.getvalue() == "", f"{where}: rank {rank} prints, too"
        elif example.output is not None:
            assert printed.getvalue().rstrip() == example.output.rstrip(), (
                f"{where} prints\n{printed.getvalue()}\nand not\n{example.output}")

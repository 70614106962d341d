"""A rank of ``launcher.py``: runs the cases of worker files until one fails.

Arguments: the file to report to (a line of JSON for each case), the seconds after which the stacks
of all threads are printed, and the worker files.
"""

import faulthandler
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

import pytest

from hyper_parallel import get_platform


def main() -> int:
    """The number of failed cases: 0 or 1."""
    report, limit, *files = sys.argv[1:]
    faulthandler.dump_traceback_later(max(float(limit) - 5, 1))
    get_platform().init_process_group()
    with open(report, "w", encoding="utf-8", buffering=1) as lines:
        if not all(run(file, lines) for file in files):
            return 1
    faulthandler.cancel_dump_traceback_later()
    if any(vars(sys.modules[Path(file).stem]).get("BROKEN") for file in files):
        os._exit(0)  # to leave in order would wait for the others in vain
    get_platform().destroy_process_group()
    return 0


def run(file: str, lines: TextIO) -> bool:
    """Runs the cases of a worker file; whether all passed."""
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for name, case in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        started = time.monotonic()
        try:
            case()
            outcome = "passed"
        except (Exception, pytest.fail.Exception):
            outcome = traceback.format_exc()
        print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
        print(json.dumps([name, outcome]), file=lines)
        if outcome != "passed":
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())

"""The layer table of the design, enforced by reading every import of the package.

A file imports its own layer or a lower one, never inside a function, and never in a circle;
torch and mindspore appear in ``platform/`` alone. The checks are functions of source text, so
each is also shown a text that breaks it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hyper_parallel"

# The longest prefix of a module's name decides its layer.
LAYERS = {
    f"{PACKAGE}.platform": 1,
    f"{PACKAGE}.core": 2,
    f"{PACKAGE}.core.dtensor": 3,
    f"{PACKAGE}.core.shard": 4,
    f"{PACKAGE}.core.tensor_parallel": 5,
    f"{PACKAGE}.core.dtensor.debug": 6,
    # The public surface, and the demo, which is a user's program on top of it.
    PACKAGE: 7,
}
DEBUG = f"{PACKAGE}.core.dtensor.debug"
# The two that export CommDebugMode, and the demo, which shows it.
MAY_IMPORT_DEBUG = {PACKAGE, f"{PACKAGE}.core.dtensor", f"{PACKAGE}.demo"}
FRAMEWORKS = {"torch": f"{PACKAGE}.platform.torch", "mindspore": f"{PACKAGE}.platform.mindspore",
              # Its users' tests load it; the library itself does not.
              "pytest": f"{PACKAGE}.debug.pytest_plugin"}
# Users' programs on top of the library.
DEMOS = {"torch": f"{PACKAGE}.demo", "mindspore": f"{PACKAGE}.demo_mindspore"}
EVERYWHERE = set(sys.stdlib_module_names) | {"numpy", PACKAGE}


def read_package() -> dict[str, str]:
    """The source of every module of the package, by its name."""
    sources = {}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = file.read_text("utf-8")
    return sources


SOURCES = read_package()


parsed = lru_cache(maxsize=None)(ast.parse)


def inside(module: str, package: str) -> bool:
    """Whether a module is the package or lies in it."""
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int:
    """The layer of a module of the package."""
    return LAYERS[max((prefix for prefix in LAYERS if inside(module, prefix)), key=len)]


def imported(module: str, source: str, sources: Mapping[str, str]) -> Iterator[str]:
    """The names of the modules that a source imports, anywhere in it."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{module}:{node.lineno} uses a relative import")
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in sources else str(node.module)


def breaches_of_layers(sources: Mapping[str, str]) -> list[str]:
    """Imports that point to a higher layer."""
    found = []
    for module, source in sources.items():
        for target in imported(module, source, sources):
            if not inside(target, PACKAGE):
                continue
            if inside(target, DEBUG) and module in MAY_IMPORT_DEBUG:
                continue
            if layer(target) > layer(module):
                found.append(f"{module} (layer {layer(module)}) imports "
                             f"{target} (layer {layer(target)})")
    return found


def breaches_of_frameworks(sources: Mapping[str, str]) -> list[str]:
    """Imports of anything but the standard library, numpy, the package, and its own framework."""
    found = []
    for module, source in sources.items():
        for target in imported(module, source, sources):
            top = target.partition(".")[0]
            owner = FRAMEWORKS.get(top)
            allowed = top in EVERYWHERE or owner is not None and (
                inside(module, owner) or module == DEMOS.get(top))
            if not allowed:
                found.append(f"{module} imports {target}")
    return found


def breaches_of_place(sources: Mapping[str, str]) -> list[str]:
    """Imports inside a function, by statement or by ``__import__``; only the platform chooses
    a module at run time."""
    found = []
    for module, source in sources.items():
        for outer in ast.walk(parsed(source)):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                found += [f"{module}:{node.lineno} imports inside a function"
                          for node in ast.walk(outer)
                          if isinstance(node, (ast.Import, ast.ImportFrom))]
            if isinstance(outer, ast.Call) and not inside(module, f"{PACKAGE}.platform"):
                if ast.unparse(outer.func) in ("__import__", "importlib.import_module",
                                               "import_module"):
                    found.append(f"{module}:{outer.lineno} imports by a call")
    return found


def cycle(sources: Mapping[str, str]) -> list[str]:
    """The modules of one circle of imports, or nothing.

    Going by what each file says, not by the packages around it: importing ``a.b`` runs ``a`` as
    well, which ``test_every_module_can_be_imported_first`` covers.
    """
    graph = {module: set(imported(module, source, sources)) & set(sources)
             for module, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_point_down() -> None:
    assert breaches_of_layers(SOURCES) == []


def test_frameworks_stay_in_the_platform() -> None:
    assert breaches_of_frameworks(SOURCES) == []


def test_imports_stand_at_the_top() -> None:
    assert breaches_of_place(SOURCES) == []


def test_no_circle() -> None:
    assert cycle(SOURCES) == []


@pytest.mark.parametrize(("module", "source"), [
    ("hyper_parallel.platform.groups", "from hyper_parallel.core.layout import Layout"),
    ("hyper_parallel.core.layout", "from hyper_parallel.core.dtensor import dtensor"),
    ("hyper_parallel.core.dtensor.dtensor", "import hyper_parallel.core.shard._op_dispatch"),
    ("hyper_parallel.core.tensor_parallel.style", "from hyper_parallel import DTensor"),
    ("hyper_parallel.core.tensor_parallel.style",
     "from hyper_parallel.core.dtensor.debug import CommDebugMode"),
])
def test_an_import_that_points_up_is_found(module: str, source: str) -> None:
    assert len(breaches_of_layers(SOURCES | {module: source})) == 1


@pytest.mark.parametrize(("module", "source"), [
    ("hyper_parallel.core.layout", "import torch.nn as nn"),
    ("hyper_parallel.core.dtensor.dtensor", "from torch import Tensor"),
    ("hyper_parallel.platform.torch.groups", "import mindspore"),
    ("hyper_parallel.core.layout", "import einops"),
])
def test_a_framework_elsewhere_is_found(module: str, source: str) -> None:
    assert len(breaches_of_frameworks(SOURCES | {module: source})) == 1


@pytest.mark.parametrize("source", [
    "def f():\n    import math\n",
    "class A:\n    def f(self):\n        from math import prod\n",
    "f = lambda: __import__('torch')\n",
    "import importlib\nimportlib.import_module('torch')\n",
])
def test_an_import_in_a_function_is_found(source: str) -> None:
    assert len(breaches_of_place(SOURCES | {"hyper_parallel.core.layout": source})) == 1


def test_a_circle_is_found() -> None:
    broken = {"hyper_parallel.core.a": "from hyper_parallel.core import b",
              "hyper_parallel.core.b": "from hyper_parallel.core.a import x"}
    assert set(cycle(broken)) == set(broken)


# Importing torch takes seconds, so it happens once; a fork of that process then imports one
# module of the package, which none before it has touched.
EACH_FIRST = """
import importlib, os, sys, traceback
import numpy, torch, torch.distributed.checkpoint.state_dict, torch.distributed.tensor
for name in sys.argv[1:]:
    if os.fork() == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            print(name, traceback.format_exc(), flush=True)
            os._exit(1)
        os._exit(0)
    if os.wait()[1] != 0:
        print("cannot be imported first:", name, flush=True)
"""


def import_each_first(modules: list[str], folder: Path) -> str:
    """Imports each module first in a process of its own; what went wrong."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EACH_FIRST, *modules], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, check=True)
    return done.stdout


def test_every_module_can_be_imported_first() -> None:
    # A module of an adapter needs its framework, and torch is the one that is always here.
    modules = [name for name in sorted(SOURCES)
               if find_spec("mindspore") or "mindspore" not in name]
    assert import_each_first(modules, ROOT) == ""


def test_a_module_that_cannot_be_imported_is_found(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("import second\nx = 1\n")
    (tmp_path / "second.py").write_text("from first import x\n")
    out = import_each_first(["first", "math"], tmp_path)
    assert "cannot be imported first: first" in out and "math" not in out

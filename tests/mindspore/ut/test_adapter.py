"""What the MindSpore adapter says without any launch; it needs MindSpore, and no torch."""
import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

from tests.mindspore.launcher import NEEDS_MINDSPORE, ROOT

pytestmark = NEEDS_MINDSPORE

SURFACE = """
import inspect, sys
from hyper_parallel import get_platform
from hyper_parallel.platform import Platform
cls = type(get_platform())
assert cls.__name__ == "MindSporePlatform", cls
assert sys.modules["torch"] is None
abstract = {name for base in Platform.__mro__ for name, member in vars(base).items()
            if isinstance(member, staticmethod) and getattr(member, "__isabstractmethod__", False)}
assert all(isinstance(vars(cls).get(name), staticmethod) for name in abstract)
assert "differentiable_all_to_all_single" not in vars(cls)
for name in abstract:
    if name.startswith("differentiable"):
        assert list(inspect.signature(getattr(cls, name)).parameters) == list(
            inspect.signature(getattr(Platform, name)).parameters), name
"""

TIMEOUT = """
import os
from datetime import timedelta
from hyper_parallel import get_platform
from hyper_parallel.platform.mindspore import groups
for wrong, error in ((3, TypeError), (timedelta(0), ValueError)):
    try:
        get_platform().init_process_group(timeout=wrong)
    except error as caught:
        assert "timeout must be" in str(caught), caught
    else:
        raise AssertionError(wrong)
os.environ.update(MS_ROLE="MS_WORKER", MS_WORKER_NUM="2", RANK_ID="0")
seen = []
groups.communication.init = lambda backend: seen.append(dict(os.environ))
get_platform().init_process_group(timeout=timedelta(seconds=7.5))
for kind in ("TOPO", "NODE", "CPU_COMM_OP"):
    assert seen[0][f"MS_{kind}_TIMEOUT"] == "8", kind
"""

ALONE = """
import mindspore, numpy as np, pickle, copy
from mindspore import Tensor, Parameter, mint
from hyper_parallel import *
platform = get_platform()
assert (platform.get_rank(), platform.get_world_size(), platform.known_world_size()) == (0, 1, None)
assert not platform.is_initialized() and platform.generation() == 0
platform.init_process_group()
assert platform.is_initialized() and platform.known_world_size() == 1
mesh = init_device_mesh((1,), ("tp",))
x = distribute_tensor(Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)), mesh, [Shard(0)])
assert type(x + 1) is DTensor and float(x.sum()) == 15 and x[1, 2].item() == 5
assert type(1 + Tensor(np.ones(3, np.float32)) * x) is DTensor
assert [row.tolist() for row in x] == [[0, 1, 2], [3, 4, 5]]
x[0] = 7
assert x.asnumpy()[0].tolist() == [7, 7, 7]
p = Parameter(x, name="p")
assert isinstance(p, DTensor) and isinstance(p, Parameter) and p.name == "p"
for same in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p), p.clone()):
    assert type(same) is type(p) and same.asnumpy().tolist() == p.asnumpy().tolist()
p += 1  # which MindSpore itself does not do in place
assert type(p) is type(same) and p.asnumpy().tolist() == [[8, 8, 8], [4, 5, 6]]
p.set_data(Tensor(np.zeros((2, 3), np.float32)))
assert p.asnumpy().sum() == 0
platform.destroy_process_group()
assert platform.generation() == 1
try:
    x.redistribute(placements=[Replicate()]); mesh.get_group()
except RuntimeError as error:
    assert "destroyed" in str(error) or "before" in str(error), error
else:
    raise AssertionError("a mesh of an ended world was used")
"""


def run(program: str, **environment: str) -> str:
    """Runs a program in a process of its own, where torch cannot be imported; its output."""
    block = "import sys; sys.modules['torch'] = None\n" if "torch" not in environment else ""
    done = subprocess.run(
        [sys.executable, "-c", block + textwrap.dedent(program)], cwd=ROOT, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_surface() -> None:
    """Every method of the platform, as staticmethods of the class body, but the one it lacks.

    And the timeout that is given to MindSpore.
    """
    run(SURFACE + TIMEOUT, HYPER_PARALLEL_PLATFORM="mindspore")


def test_a_world_of_one_process() -> None:
    """Without a launcher; operators, parameters, copies, and the end of the world."""
    run(ALONE, HYPER_PARALLEL_PLATFORM="mindspore")


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None,
                    reason="torch is installed here, so it is what is taken")
def test_mindspore_is_taken_where_torch_is_missing() -> None:
    """Without being named."""
    assert "MindSpore" in run("from hyper_parallel import get_platform; print(get_platform())")


def test_a_group_needs_a_launcher() -> None:
    """The error says which."""
    assert "started as one of them: start the program with msrun" in run("""
        from hyper_parallel import get_platform
        try:
            get_platform().create_group([0, 1])
        except RuntimeError as error:
            print(error)
    """, HYPER_PARALLEL_PLATFORM="mindspore")

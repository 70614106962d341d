"""Every operator of the table in many layouts: values and gradients equal the dense ones.

``OPERATOR_DEPTH=4`` in the environment tries four times as many layouts of each operator.
"""
import os
import warnings
from functools import partial

from hyper_parallel import init_device_mesh
from tests.torch.against_dense import Failures, choices, compare
from tests.torch.shard.tables import TABLES

NPROC = 4
TIMEOUT = 60
DEPTH = int(os.environ.get("OPERATOR_DEPTH", "1"))


def _meshes():
    """Meshes, and how many layouts each operator is tried in there."""
    root = init_device_mesh((2, 2), ("dp", "tp"))
    # The sub-mesh is a mesh of two ranks on each half of the world.
    line = init_device_mesh((4,), ("x",))
    return [(line, 3 * DEPTH), (root["tp"], DEPTH), (root, 2 * DEPTH)]


def _run(family):
    failures = Failures()
    for index, entry in enumerate(TABLES[family]):
        tensors = entry.tensors()
        for mesh, limit in _meshes():
            drawn = choices([tensor.shape for tensor in tensors], mesh, limit, index,
                            [maker.partial for maker in entry.inputs])
            for seed, placements in enumerate(drawn):
                check = partial(compare, entry.function, tensors, mesh, placements, seed,
                                entry.in_place)
                failures.run(check, entry.name,
                             f"{mesh.mesh_shape} {[list(each) for each in placements]}")
    failures.report()


def _quietly(family):
    """What has no rule says so in a warning, which another test is about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no sharding rule")
        _run(family)


def test_pointwise():
    _quietly("pointwise")


def test_in_place():
    _quietly("in_place")


def test_reduction():
    _quietly("reduction")


def test_view():
    _quietly("view")


def test_indexing():
    _quietly("indexing")


def test_matmul():
    _quietly("matmul")


def test_normalization():
    _quietly("normalization")


def test_loss():
    _quietly("loss")


def test_composite():
    _quietly("composite")


def test_blocks():
    _quietly("blocks")


def test_scatter():
    _quietly("scatter")

"""Fixtures for tests of the pure descriptions."""
import pytest

from hyper_parallel.core import device_mesh
from tests.ut.core.mesh_world import Runtime, World


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A mock platform and empty caches."""
    world = World()
    monkeypatch.setattr(device_mesh, "platform", world)
    monkeypatch.setattr(device_mesh, "_group_map", {})
    monkeypatch.setattr(device_mesh, "_group_generation", {})
    monkeypatch.setattr(device_mesh, "_DEVICE_MESH_MAP", {})
    return world


@pytest.fixture(name="runtime")
def _runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A mock of what the mock platform leaves to the real one."""
    runtime = Runtime()
    monkeypatch.setattr(device_mesh, "_runtime", runtime)
    return runtime

"""``replicate``: data parallelism over one axis of a mesh."""
from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import Any, Iterator, Optional

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel._batch import BatchOnMesh
from hyper_parallel.core.tensor_parallel._buckets import Reducer
from hyper_parallel.core.tensor_parallel._mesh_axis import check_axis
from hyper_parallel.platform import get_platform

platform = get_platform()

_REPLICATION = "_hyper_parallel_replication"
_MEGABYTE = 1024 * 1024


def replicate(module: Any, device_mesh: DeviceMesh, *, bucket_cap_mb: float = 25,
              broadcast_buffers: bool = True) -> Any:
    """Train copies of a module on the ranks of an axis, each on its part of the batch.

    The parameters are Replicate on the axis, also those that ``parallelize_module`` spread over
    another one, and stay equal: they are those of the axis' first rank at first, and every
    backward pass averages the gradients over the axis, in buckets, while it still runs.  The
    averages are in ``.grad`` when ``backward()`` returns.  Parameters that no rank used keep
    ``.grad`` None; those that some ranks used get the average on all.

    A batch of plain tensors is this rank's rows, as with PyTorch's DistributedDataParallel, and a
    loss is the mean over its rows.  A batch of DTensors that are ``Shard(0)`` on the axis is the
    whole one: the outputs are DTensors, too, and the gradients are those of the loss over all
    rows.

    The module is changed in place: its paths and its ``state_dict`` are as before, and
    ``module.no_sync()`` is a context for gradient accumulation.  A copy of it (``copy.deepcopy``,
    pickle) is an ordinary module that nobody synchronizes.

    Args:
        module: the module; parallelize it before.
        device_mesh: mesh of one axis, such as ``mesh["dp"]``.
        bucket_cap_mb: size of a bucket in units of 1024 * 1024 bytes.
        broadcast_buffers: whether every forward with gradients begins with the buffers of the
            axis' first rank.

    Returns:
        ``module``.

    Raises:
        TypeError: an argument of another type.
        ValueError: a mesh of several axes or without this rank, a size that is not positive, or
            ranks whose modules differ in names, shapes or dtypes.
        RuntimeError: the module, or a part of it, is replicated already.
    """
    _check(module, device_mesh, bucket_cap_mb)
    parameters, buffers = _own_tensors(module)
    group = device_mesh.get_group()
    _check_alike(parameters + buffers, device_mesh, group)
    _copy_from_first([value for _, value in parameters + buffers], group)
    trained = [value for _, value in parameters if value.requires_grad]
    replication = Replication(Reducer(trained, group, int(bucket_cap_mb * _MEGABYTE)),
                              BatchOnMesh(device_mesh), module, group, broadcast_buffers)
    platform.wrap_forward(module, replication.before, replication.after)
    vars(module)[_REPLICATION] = replication
    vars(module)["no_sync"] = replication.no_sync
    return module


def unreplicate(module: Any) -> Any:
    """End what :func:`replicate` began: gradients stay this rank's own, nothing is sent.

    Args:
        module: the module that was replicated; it is changed and returned.

    Raises:
        TypeError: ``module`` is no module.
        RuntimeError: it is not replicated itself.
    """
    if not isinstance(module, platform.Module):
        raise TypeError(f"unreplicate takes a module, but got a {type(module).__name__}.")
    replication = vars(module).get(_REPLICATION)
    if replication is None or not replication.active:
        raise RuntimeError("the module is not replicated itself; pass the one that was given to "
                           "replicate.")
    replication.end()
    del vars(module)[_REPLICATION], vars(module)["no_sync"]
    return module


class Replication:
    """What a replicated module does around its forward; a copy of it does nothing."""

    def __init__(self, reducer: Optional[Reducer] = None, batch: Optional[BatchOnMesh] = None,
                 module: Any = None, group: Any = None, broadcast_buffers: bool = False) -> None:
        self._reducer = reducer
        self._batch = batch
        self._module = module if broadcast_buffers else None
        self._group = group
        self._synchronizes = True
        self._mesh: Optional[DeviceMesh] = None  # of the batch of the forward that runs

    def __reduce__(self) -> tuple:
        return Replication, ()

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self._reducer is not None

    def end(self) -> None:
        """Do nothing from now on."""
        if self._reducer is not None:
            self._reducer.stop()
        self._reducer = self._batch = self._module = None

    def before(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Take the batch apart; forget a backward pass that failed."""
        del module
        if self._reducer is None or self._batch is None:
            return args, kwargs
        if platform.records_gradients() and not platform.in_backward():
            self._reducer.give_up_if_failed()
            if self._synchronizes and self._module is not None:
                _copy_from_first([value for _, value in _own_tensors(self._module)[1]],
                                 self._group)
        self._mesh = self._batch.mesh_of((args, kwargs))
        if self._mesh is not None:
            args, kwargs = platform.map_tensors(self._batch.rows, (args, kwargs))
        return args, kwargs

    def after(self, module: Any, args: tuple, output: Any) -> Any:
        """Put the results together; have the backward pass reduced that they will see."""
        del module, args
        if self._reducer is None or self._batch is None:
            return output
        mesh = self._mesh
        if platform.records_gradients():
            self._reducer.armed = self._synchronizes
            if self._synchronizes:
                platform.on_backward_from(output, self._reducer.begin)
        if mesh is None:
            return output
        batch = self._batch
        return platform.map_tensors(lambda value: batch.together(value, mesh), output)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for forwards whose backward passes add to this rank's gradients alone.

        The next backward pass from a forward outside of it reduces all that has come together.
        """
        before = self._synchronizes
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = before


def _check(module: Any, mesh: DeviceMesh, bucket_cap_mb: float) -> None:
    if not isinstance(module, platform.Module):
        raise TypeError(f"replicate takes a module, but got a {type(module).__name__}.")
    check_axis(mesh, "replicate", "a module is replicated", 0)
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        raise TypeError(f"bucket_cap_mb is a number of megabytes, but got {bucket_cap_mb!r}.")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb is positive, but got {bucket_cap_mb!r}.")
    for path, part in platform.named_modules(module):
        if _REPLICATION in vars(part) and vars(part)[_REPLICATION].active:
            raise RuntimeError(f"the module {path!r} is replicated already.")


def _own_tensors(module: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Parameters and buffers by path, each once."""
    parameters: dict[int, tuple[str, Any]] = {}
    buffers: dict[int, tuple[str, Any]] = {}
    for path, part in platform.named_modules(module):
        for found, own in ((parameters, platform.own_parameters(part)),
                           (buffers, platform.own_buffers(part))):
            for name, value in own.items():
                found.setdefault(id(value), (f"{path}.{name}", value))
    return list(parameters.values()), list(buffers.values())


def _check_alike(tensors: list[tuple[str, Any]], mesh: DeviceMesh, group: Any) -> None:
    """Raise unless the ranks' modules have the same tensors, so that nothing hangs later."""
    text = repr([(path, tuple(platform.local_value(value).shape), str(value.dtype),
                  value.requires_grad) for path, value in tensors])
    number = zlib.crc32(text.encode())
    own = platform.tensor_from_numpy(np.array([number, -number], dtype=np.int64))
    if tensors:
        own = own.to(tensors[0][1].device)
    highest, lowest = platform.differentiable_all_reduce(own, "max", group).tolist()
    if highest != -lowest:
        raise ValueError(f"the ranks of {mesh.alias_name[0]!r} hold different modules: names, "
                         "shapes, dtypes or which parameters are trained differ; build the same "
                         f"one on each. This one has {len(tensors)} parameters and buffers.")


def _copy_from_first(values: list[Any], group: Any) -> None:
    """Give tensors the values of the group's first rank: one broadcast for each dtype."""
    kinds: dict[tuple, list[Any]] = {}
    for value in map(platform.local_value, values):
        kinds.setdefault((value.dtype, value.device), []).append(value)
    for members in kinds.values():
        flat = platform.broadcast(platform.join_flat(members, (), 1.0), 0, group)
        start = 0
        for member in members:
            member.copy_(platform.narrow(flat, 0, start, member.numel()).view(member.shape))
            start += member.numel()

"""``check_replicas``: what is called Replicate really is equal on every rank.

Nothing makes ranks hold the same values but the program itself: another seed, a file that only
one rank read, or a plain tensor computed from one rank's shard, and the replicas differ without
an error. Here each rank takes a fingerprint of every tensor, and the ranks exchange a few bytes
on the default group's board: one digest for each set of ranks that must hold the same. Only where
two digests differ are the fingerprints themselves exchanged, to tell which tensor it is.
"""
from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.debug._fingerprints import replicas_under
from hyper_parallel.core.dtensor.debug._meetings import Meetings
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate
from hyper_parallel.platform import get_platform

platform = get_platform()

_MOST_TOLD = 10  # tensors that an error tells of
_calls: dict[tuple[int, tuple[int, ...]], Iterator[int]] = {}


class _Part(NamedTuple):
    """What one rank has of a tensor.

    Attributes:
        text: what all ranks must have alike: dtype, shape and layout.
        value: the fingerprint.
        replicas: the ranks that must have the same one; empty where this one alone holds it.
        rows: the same ranks along each replicated axis, by the axis' name.
    """

    text: str
    value: str
    replicas: tuple[int, ...]
    rows: tuple[tuple[str, tuple[int, ...]], ...]


_Parts = dict[str, _Part]


class ReplicaMismatchError(RuntimeError):
    """Ranks hold different values of a tensor that is called replicated, or check other ones."""


@runtime_checkable
class _WithBuffers(Protocol):
    """A module with tensors that are no parameters."""

    def named_buffers(self) -> Iterable[tuple[str, Any]]:
        """Each buffer once, with its qualified name."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor to check, and how it is said to lie; a plain one is replicated on the mesh."""

    name: str
    tensor: Any
    layout: Layout


def check_replicas(what: Any, *, mesh: DeviceMesh | None = None, timeout: float = 60.0) -> None:
    """Raise unless the ranks hold equal values wherever a tensor is called replicated.

    A DTensor is compared along its ``Replicate`` axes, a plain tensor on all ranks of the mesh, to
    the bit. All ranks of the mesh call it at the same place. A tensor is read once or twice on
    its own device; what is sent is a few bytes for all tensors together, on the default group's
    store and not by a collective. A tensor without data (meta or fake) is compared by its shape.

    Args:
        what: a tensor, a module (its parameters and buffers), or a dict, list or tuple of such,
            as a state dict.
        mesh: the mesh of the plain tensors, whose ranks all call. By default that of the DTensors,
            the largest one if they are on several, and without any all ranks.
        timeout: seconds to wait for the other ranks.

    Raises:
        ReplicaMismatchError: on every rank: values differ, with the tensor, the axis and the ranks
            named; the ranks do not check the same tensors; or a rank does not come in time.
        TypeError: nothing to check in ``what``, or an argument of a wrong type.
        ValueError: a ``timeout`` that is not above 0 and finite, DTensors on meshes of which none
            has the ranks of all, or a rank outside of the mesh.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is a number of seconds, but got {timeout!r}.")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is above 0 and finite, but got {timeout}.")
    found = dict(sorted(_named(what, "")))
    mesh = _common_mesh(found.values()) if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a DeviceMesh, but got {mesh!r} ({type(mesh).__name__}).")
    if platform.get_rank() not in mesh.rank_list:
        raise ValueError(f"rank {platform.get_rank()} is not in {mesh!r}, whose ranks check what "
                         "they hold; guard the call with mesh.get_coordinate().")
    board = platform.board_of(None) if mesh.size() > 1 else None
    if board is None:
        return
    ranks = tuple(mesh.rank_list)
    call = next(_calls.setdefault((platform.generation(), ranks), itertools.count()))
    meetings = Meetings(board, f"replicas/{ranks}/{call}/", ranks, float(timeout),
                        ReplicaMismatchError)
    try:
        compare(meetings, "check_replicas", list(name_layouts(found.items(), mesh)))
    finally:
        meetings.leave("came to an earlier exchange of the same check")


def name_layouts(tensors: Iterable[tuple[str, Any]], mesh: DeviceMesh) -> Iterator[NamedTensor]:
    """The tensors as they are said to lie."""
    whole = Layout(mesh, [Replicate()] * mesh.ndim)
    for name, tensor in tensors:
        yield NamedTensor(name, tensor,
                          tensor._spec.layout if isinstance(tensor, DTensor) else whole)


def compare(meetings: Meetings, title: str, tensors: Sequence[NamedTensor]) -> None:
    """Meet the other ranks and compare.

    Args:
        meetings: those of all ranks of the tensors' meshes.
        title: what is being done, the same on all ranks.
        tensors: what to compare.

    Raises:
        ReplicaMismatchError: on every rank.
    """
    own = {entry.name: _part(entry) for entry in tensors}
    notes = meetings.meet(_summary(title, own), f"{title} of {len(own)} tensors")
    if _agree({rank: json.loads(text) for rank, (text, _) in notes.items()}):
        return
    packed = base64.b64encode(zlib.compress(json.dumps([title, own]).encode())).decode()
    details = meetings.meet(packed, f"{title}, whose ranks disagree")
    told = {rank: json.loads(zlib.decompress(base64.b64decode(text)))
            for rank, (text, _) in details.items()}
    parts = {rank: {name: _Part(*part) for name, part in other.items()}
             for rank, (_, other) in told.items()}
    raise ReplicaMismatchError(
        _different_titles({rank: other for rank, (other, _) in told.items()})
        or _different_tensors(title, parts) or _different_values(title, parts))


def _named(what: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors in ``what``, each by its path."""
    if isinstance(what, platform.Tensor):
        yield path or "the tensor", what
    elif isinstance(what, platform.Module):
        prefix = f"{path}." if path else ""
        for name, tensor in platform.named_parameters(what):
            yield prefix + name, tensor
        if isinstance(what, _WithBuffers):
            for name, tensor in what.named_buffers():
                yield prefix + name, tensor
    elif isinstance(what, (Mapping, list, tuple)):
        items = what.items() if isinstance(what, Mapping) else enumerate(what)
        for key, value in items:
            if isinstance(value, (platform.Tensor, platform.Module, Mapping, list, tuple)):
                yield from _named(value, f"{path}.{key}" if path else str(key))
    else:
        raise TypeError("check_replicas takes a tensor, a module, or a dict, list or tuple of "
                        f"such, but got {what!r} ({type(what).__name__}).")


def _common_mesh(tensors: Iterable[Any]) -> DeviceMesh:
    """The mesh of the DTensors, or one of all ranks."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    if not meshes:
        return DeviceMesh(list(range(platform.get_world_size())), ("rank",))
    largest = max(meshes, key=lambda mesh: mesh.size())
    for mesh in meshes:
        if not set(largest.rank_list) >= set(mesh.rank_list):
            raise ValueError(f"the DTensors are on {largest!r} and {mesh!r}, and none of the two "
                             "has the ranks of both; pass mesh=, or check them one by one.")
    return largest


def _part(entry: NamedTensor) -> _Part:
    tensor, layout = entry.tensor, entry.layout
    kind = f"{layout!r}" if isinstance(tensor, DTensor) else "a plain tensor"
    taken = platform.fingerprint(tensor)
    value = "no data" if taken is None else f"norm={taken[0]:.6g} bits={taken[1]:016x}"
    mesh = layout.device_mesh
    rows = tuple((name, tuple(mesh.get_rank_list_along_axis(name)))
                 for name, placement in zip(mesh.alias_name, layout.placements)
                 if placement.is_replicate() and mesh.get_coordinate() is not None)
    return _Part(f"{tensor.dtype} {tuple(tensor.shape)}, {kind}", value, replicas_under(layout),
                 rows)


def _summary(title: str, own: _Parts) -> str:
    """A few digests: of what is checked, and of the values that each set of ranks must share."""
    texts = [title, [(name, part.text) for name, part in own.items()]]
    values: dict[tuple[int, ...], list] = {}
    for name, part in own.items():
        values.setdefault(part.replicas, []).append((name, part.value))
    return json.dumps([_digest(texts), [[ranks, _digest(shared)]
                                        for ranks, shared in sorted(values.items()) if ranks]])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def _agree(summaries: Mapping[int, Any]) -> bool:
    """Whether nothing differs anywhere; all ranks come to the same result."""
    shared: dict[tuple[int, ...], set[str]] = {}
    for _, sets in summaries.values():
        for ranks, digest in sets:
            shared.setdefault(tuple(ranks), set()).add(digest)
    return len({texts for texts, _ in summaries.values()}) == 1 and \
        all(len(digests) == 1 for digests in shared.values())


def _different_titles(titles: Mapping[int, str]) -> str | None:
    if len(set(titles.values())) == 1:
        return None
    return "the ranks do not do the same:" + _by_value(titles, "\n  ")


def _different_tensors(title: str, parts: Mapping[int, _Parts]) -> str | None:
    """What is told where ranks check other tensors than others."""
    lines = []
    for name in sorted({name for own in parts.values() for name in own}):
        texts = {rank: own[name].text if name in own else "has no such tensor"
                 for rank, own in parts.items()}
        if len(set(texts.values())) > 1:
            lines.append(f"  {name}:{_by_value(texts, chr(10) + '    ')}")
    return f"{title}: the ranks do not check the same tensors:\n{_some(lines)}" if lines else None


def _different_values(title: str, parts: Mapping[int, _Parts]) -> str:
    lines = []
    for name, part in next(iter(parts.values())).items():
        rows = {(axis, tuple(ranks)) for own in parts.values() for axis, ranks in own[name].rows}
        for axis, ranks in sorted(rows):
            values = {rank: parts[rank][name].value for rank in ranks if rank in parts}
            if len(set(values.values())) > 1:
                lines.append(f"  {name} ({part.text}) along axis {axis!r}:"
                             + _by_value(values, "\n    "))
    return (f"{title}: what is called Replicate differs between ranks:\n{_some(lines)}\n"
            "Give all ranks the same value, for example by the same seed, by distribute_tensor "
            "or by a broadcast from one rank; or say what the ranks really hold (Shard or "
            "Partial).")


def _by_value(values: Mapping[int, str], separator: str) -> str:
    """Who has what, the most common first."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    groups = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    return "".join(f"{separator}rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {value}"
                   for value, ranks in groups)


def _some(lines: Sequence[str]) -> str:
    more = len(lines) - _MOST_TOLD
    return "\n".join([*lines[:_MOST_TOLD], *([f"  and {more} more"] if more > 0 else [])])

"""What a trace consists of: one record a call, and the records inside it as its children.

Records hold plain values only, never a tensor, a module or a process group, so that a trace may
outlive the model it describes.
"""
from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.debug._fingerprints import Fingerprint
from hyper_parallel.core.placement_types import Placement

# The phases of a training step. OUTSIDE is what no operator, no module and no gradient asks for,
# such as gathering a tensor to print it; RECOMPUTE a forward repeated inside the backward pass.
FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
OPTIMIZER = "optimizer"
OUTSIDE = "outside"

UNKNOWN = "unknown"
"""An owner that there was, but before the trace began."""

NATIVE = "native."
"""Begins the type of what the program sends with the framework's own functions."""

FULL_LEVEL = 3
"""The ``noise_level`` from which everything is shown."""


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """What is remembered of a tensor.

    Attributes:
        shape: shape; the global one for a DTensor.
        dtype: the framework's name of the element type, such as ``"torch.float32"``.
        is_dtensor: whether it is a DTensor.
        placements: a DTensor's placements, one a mesh axis; None for a plain tensor.
        mesh_shape: the shape of a DTensor's mesh; None for a plain tensor.
        partial_axes: the mesh axes along which a DTensor is Partial.
    """

    shape: tuple[int, ...]
    dtype: str
    is_dtensor: bool = False
    placements: tuple | None = None
    mesh_shape: tuple | None = None
    partial_axes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial_axes", tuple(
            axis for axis, placement in enumerate(self.placements or ())
            if placement.is_partial()))

    def __str__(self) -> str:
        return f"{'DTensor' if self.is_dtensor else 'Tensor'}{list(self.shape)}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; placements become strings."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "is_dtensor": self.is_dtensor,
            "placements": _names(self.placements),
        }


@dataclass(slots=True, eq=False)
class DebugCall:
    """One traced call; the base of the others.

    Attributes:
        call_depth: number of records around this one in its tree.
        timestamp: when the call began, in seconds since the epoch.
        duration: seconds that it took; 0 while it runs.
        module: path of the module that it belongs to; None outside of the traced modules, and
            ``"unknown"`` where that was before the trace.
        operator: the operator that it belongs to, likewise.
        argument: of redistributions and collectives, position or name of the argument of
            ``operator`` that they bring into place, if it is known.
        call_site: of redistributions and collectives, and of operators whose fingerprints are
            taken, ``file:line`` of the first frame outside of the library, the framework and the
            standard library; for a gradient that of the forward pass. None where there is none.
        fingerprints: of operators and collectives, those of their tensor results, if the mode
            takes them; None for a tensor without data. Those of an asynchronous collective come
            when the program waits for it.
        children: the records inside this one, in the order in which they began.
    """

    call_depth: int = field(default=0, kw_only=True)
    timestamp: float = field(default_factory=time.time, kw_only=True)
    duration: float = field(default=0.0, kw_only=True)
    module: str | None = field(default=None, kw_only=True)
    operator: str | None = field(default=None, kw_only=True)
    argument: str | None = field(default=None, kw_only=True)
    call_site: str | None = field(default=None, kw_only=True)
    fingerprints: tuple[Fingerprint | None, ...] = field(default=(), kw_only=True)
    children: list[DebugCall] = field(default_factory=list, kw_only=True)

    label: ClassVar[str] = "Call"
    """First column of the tracing table."""
    shown_from: ClassVar[int] = 0
    """Smallest ``noise_level`` at which the record is shown."""
    indents_when_hidden: ClassVar[bool] = False
    """Whether its children stay indented at the levels that hide the record itself."""

    def render(self, indent: int = 0) -> str:
        """This record and all inside it, one a line, two spaces for each level.

        Args:
            indent: level of this record; its children stand one level deeper.
        """
        return "\n".join(f"{'  ' * (indent + depth)}{record._render_self()}"
                         for depth, record in walk([self]))

    def describe(self, noise_level: int) -> str:
        """The record itself as one line; the full level adds all that is known of it."""
        text = self._render_self()
        return f"{text}{self._details()}" if noise_level >= FULL_LEVEL else text

    def _render_self(self) -> str:
        return type(self).__name__

    def _details(self) -> str:
        return ""

    def _values(self) -> str:
        return "".join(f" {one}" for one in self.fingerprints)

    def _values_as_data(self) -> dict[str, Any]:
        """Nothing where none were taken, to keep files small."""
        if not self.fingerprints:
            return {}
        return {"fingerprints": [one and one.as_data() for one in self.fingerprints]}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the children."""
        return {"type": self.label.lower()}


@dataclass(slots=True, eq=False)
class OpCall(DebugCall):
    """An operator that the dispatcher handled.

    Attributes:
        op_name: the operator's name, such as ``"linear"``.
        input_infos: its tensor arguments, in order; nested ones as well.
        output_infos: its tensor results; empty when it raised.
        fallback: whether it had no rule for its operands and ran on gathered ones.
    """

    op_name: str
    input_infos: list[TensorInfo] = field(default_factory=list)
    output_infos: list[TensorInfo] = field(default_factory=list)
    fallback: bool = False
    carried_makers: dict[int, OpCall] | None = field(default=None, init=False, repr=False)
    """While the operator runs: who made its arguments Partial, by mesh axis."""

    label: ClassVar[str] = "Op"
    shown_from: ClassVar[int] = 1
    indents_when_hidden: ClassVar[bool] = True

    def _render_self(self) -> str:
        inputs = ", ".join(str(info) for info in self.input_infos)
        outputs = ", ".join(str(info) for info in self.output_infos)
        return f"Op({self.op_name}) inputs=[{inputs}] outputs=[{outputs}]"

    def _details(self) -> str:
        fallback = " fallback" if self.fallback else ""
        return fallback + self._values()

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": "op",
            "op_name": self.op_name,
            "inputs": [info.as_dict() for info in self.input_infos],
            "outputs": [info.as_dict() for info in self.output_infos],
            "fallback": self.fallback,
            **({"call_site": self.call_site} if self.fingerprints else {}),
            **self._values_as_data(),
        }


@dataclass(slots=True, eq=False)
class CollectiveCall(DebugCall):
    """A collective, or a message from one rank to another; always a leaf.

    Attributes:
        collective_type: name of the platform's method; ``"native."`` and the framework's name for
            what the program sent itself.
        group_size: number of ranks in the group; 0 if no group could be told from the arguments.
        input_shape: shape of the first tensor that went in, on this rank; None without one.
        output_shape: shape of the first tensor that came out, on this rank; None without one.
        input_dtype: element type of the first tensor that went in; empty without one.
        phase: one of the phases above.
        input_bytes: bytes of the tensor that went in, on this rank.
        output_bytes: bytes of the tensor that came out, on this rank.
        wire_bytes: bytes that this rank sends; see ``_traffic.wire_bytes``.
        axis: name of the mesh axis that the group runs along, ``"dp+tp"`` for one that spans
            several; None where the mesh is not known.
        ranks: the group's global ranks in its order; empty where not known.
        reduce_op: how values are reduced, such as ``"sum"``; None where they are not.
        sequence: its number among the collectives of the trace, in the order of their ends.
        peer: global rank of the root of a broadcast, scatter, gather or reduce, or of the other
            side of a send or receive; None for other calls, and for a receive from anyone.
    """

    collective_type: str
    group_size: int = 0
    input_shape: tuple[int, ...] | None = None
    output_shape: tuple[int, ...] | None = None
    input_dtype: str = ""
    phase: str = FORWARD
    input_bytes: int = 0
    output_bytes: int = 0
    wire_bytes: int = 0
    axis: str | None = None
    ranks: tuple[int, ...] = ()
    reduce_op: str | None = None
    sequence: int = 0
    peer: int | None = None

    label: ClassVar[str] = "Collective"

    @property
    def native(self) -> bool:
        """Whether the program made it with the framework's own functions."""
        return self.collective_type.startswith(NATIVE)

    @property
    def dtype(self) -> str:
        """Element type of what is sent; the same as ``input_dtype``."""
        return self.input_dtype

    def _render_self(self) -> str:
        return (f"Collective({self.collective_type}) group_size={self.group_size} "
                f"input_shape={self.input_shape} output_shape={self.output_shape}"
                f"{_phase_mark(self.phase)}")

    def _details(self) -> str:
        op = "" if self.reduce_op is None else f" reduce_op={self.reduce_op}"
        peer = "" if self.peer is None else f" peer={self.peer}"
        return (f" axis={self.axis} ranks={self.ranks} dtype={self.input_dtype}{op}{peer} "
                f"input_bytes={self.input_bytes} output_bytes={self.output_bytes} "
                f"wire_bytes={self.wire_bytes}{self._values()}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": "collective",
            "collective_type": self.collective_type,
            "group_size": self.group_size,
            "input_shape": _as_list(self.input_shape),
            "output_shape": _as_list(self.output_shape),
            "input_dtype": self.input_dtype,
            "phase": self.phase,
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "wire_bytes": self.wire_bytes,
            "axis": self.axis,
            "ranks": list(self.ranks),
            "reduce_op": self.reduce_op,
            "module": self.module,
            "op": self.operator,
            "argument": self.argument,
            "call_site": self.call_site,
            "sequence": self.sequence,
            "peer": self.peer,
            "native": self.native,
            **self._values_as_data(),
        }


@dataclass(slots=True, eq=False)
class RedistributeCall(DebugCall):
    """A move of a tensor, or of its gradient, from one layout to another.

    Attributes:
        src_placements: placements before, one a mesh axis.
        dst_placements: placements after.
        tensor_shape: global shape.
        phase: one of the phases above.
        mesh_axes: names of the mesh axes, one for each placement.
        needed_by: the operator that made it necessary; None where the program asked for it.
    """

    src_placements: tuple[Placement, ...]
    dst_placements: tuple[Placement, ...]
    tensor_shape: tuple[int, ...]
    phase: str = FORWARD
    mesh_axes: tuple[str, ...] = ()
    needed_by: str | None = None
    mesh: DeviceMesh | None = field(default=None, init=False, repr=False)
    """While the tensor moves: the mesh that it moves on."""

    label: ClassVar[str] = "Redistribute"
    shown_from: ClassVar[int] = FULL_LEVEL

    @property
    def implicit(self) -> bool:
        """Whether an operator made it necessary, and not the program by a call of its own."""
        return self.needed_by is not None

    def _render_self(self) -> str:
        return (f"Redistribute({placements_text(self.src_placements)} -> "
                f"{placements_text(self.dst_placements)}) tensor_shape={self.tensor_shape}"
                f"{_phase_mark(self.phase)}")

    def _details(self) -> str:
        if not self.implicit:
            why = "explicit"
        elif self.argument is None:
            why = f"implicit for {self.needed_by}"
        else:
            why = f"implicit for argument {self.argument} of {self.needed_by}"
        return f" {why}" if self.call_site is None else f" {why} at {self.call_site}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": "redistribute",
            "src_placements": _names(self.src_placements),
            "dst_placements": _names(self.dst_placements),
            "tensor_shape": list(self.tensor_shape),
            "phase": self.phase,
            "mesh_axes": list(self.mesh_axes),
            "implicit": self.implicit,
            "needed_by": self.needed_by,
            "argument": self.argument,
            "call_site": self.call_site,
        }


@dataclass(slots=True, eq=False)
class AnnotateCall(DebugCall):
    """The boundary of a module: what ran inside its forward are the children.

    Attributes:
        module_fqn: the module's qualified name; ``"(root)"`` for the traced module itself.
        event_type: ``"enter"`` or ``"exit"``. Trees hold the ``"enter"`` records.
    """

    module_fqn: str
    event_type: str = "enter"

    label: ClassVar[str] = "Module"
    shown_from: ClassVar[int] = 2

    def _render_self(self) -> str:
        return f"Module({self.module_fqn}) [{self.event_type}]"

    def as_dict(self) -> dict[str, Any]:
        return {"type": "module", "module_fqn": self.module_fqn, "event_type": self.event_type}


def walk(records: Iterable[DebugCall], noise_level: int | None = None
         ) -> Iterator[tuple[int, DebugCall]]:
    """All records that a level shows, parents before children, each with its indentation.

    Args:
        records: the roots.
        noise_level: the level; None shows every record.
    """
    pending = [(0, record) for record in reversed(list(records))]
    while pending:
        depth, record = pending.pop()
        shown = noise_level is None or record.shown_from <= noise_level
        if shown:
            yield depth, record
        inside = depth + 1 if shown or record.indents_when_hidden else depth
        pending.extend((inside, child) for child in reversed(record.children))


def placements_text(placements: tuple[Placement, ...]) -> str:
    """``Shard(dim=1)`` on a mesh of one axis, ``(Shard(dim=0), Replicate())`` on more."""
    return repr(placements[0]) if len(placements) == 1 else repr(tuple(placements))


def _names(placements: tuple | None) -> list[str] | None:
    return None if placements is None else [str(placement) for placement in placements]


def _as_list(shape: tuple[int, ...] | None) -> list[int] | None:
    return None if shape is None else list(shape)


def _phase_mark(phase: str) -> str:
    """Nothing in the forward pass, so that its lines are the specification's."""
    return "" if phase in (FORWARD, OUTSIDE) else f" phase={phase}"

"""Parallel styles: how one module is spread over the ranks of a mesh axis."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Mapping, NamedTuple, Optional

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel._boundary import EnterModule, LeaveModule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.module_adapter import AfterForward, BeforeForward

platform = get_platform()


class ModulePlan(NamedTuple):
    """What a style does to one module.

    Attributes:
        parameters: placement of each of the module's own parameters, by name.
        before: what happens to the arguments of its forward, or None.
        after: what happens to the result, or None.
        cut: number of features of the result that the ranks share out, where no rank has all of
            them; in attention they must be whole heads.
    """

    parameters: Mapping[str, Placement]
    before: Optional[BeforeForward]
    after: Optional[AfterForward]
    cut: Optional[int] = None


class ParallelStyle(ABC):
    """How a module is spread; ``parallelize_module`` asks it and then does all the changes."""

    @abstractmethod
    def plan_module(self, path: str, module: Any, device_mesh: DeviceMesh) -> ModulePlan:
        """Say what to do to a module; nothing may be changed here.

        Args:
            path: the module's path, for messages.
            module: the module.
            device_mesh: mesh of one axis.

        Raises:
            TypeError: the style does not know such a module.
            ValueError: it knows such modules, but this one cannot be spread.
        """


def check_flag(style: ParallelStyle, name: str) -> None:
    """Raise TypeError unless the field ``name`` of ``style`` is True or False."""
    value = getattr(style, name)
    if not isinstance(value, bool):
        raise TypeError(f"{name} of {type(style).__name__} is True or False, but got {value!r}.")


class _Split(NamedTuple):
    """How a kind of layer is split: its parameters, and the input that fits to them."""

    parameters: Mapping[str, Placement]
    input: Placement


@dataclass(frozen=True, kw_only=True)
class _LayerStyle(ParallelStyle):
    """What the two styles for single layers share; they differ in their tables."""

    input_layouts: Optional[Placement] = None
    output_layouts: Optional[Placement] = None
    use_local_output: Optional[bool] = None

    _splits: ClassVar[Mapping[str, _Split]]
    _default_output: ClassVar[Placement]
    _cuts_result: ClassVar[bool]

    def __post_init__(self) -> None:
        style = type(self).__name__
        for name in ("input_layouts", "output_layouts"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Placement):
                raise TypeError(f"{name} of {style} is one placement of hyper_parallel, such as "
                                f"Shard(1), or None for the default, but got {value!r} "
                                f"({type(value).__module__}.{type(value).__name__}).")
        if self.use_local_output is not None and not isinstance(self.use_local_output, bool):
            raise TypeError(f"use_local_output of {style} is True, False or None, but got "
                            f"{self.use_local_output!r}.")

    def plan_module(self, path: str, module: Any, device_mesh: DeviceMesh) -> ModulePlan:
        """See :meth:`ParallelStyle.plan_module`.

        Raises:
            TypeError: the module is no Linear and no Embedding, or one whose parameters are not
                the usual ones.
        """
        style = type(self).__name__
        who = f"{style} module {path!r}"
        kind = platform.layer_kind(module)
        if kind is None:
            raise TypeError(f"{style} knows Linear and Embedding layers, but {path!r} is a "
                            f"{type(module).__name__}; take a path that names such layers only.")
        obstacle = platform.obstacle_to_splitting(module)
        if obstacle is not None:
            raise ValueError(f"{path!r}, a {type(module).__name__}, cannot be split: {obstacle}.")
        split = self._splits[kind]
        parameters = platform.own_parameters(module)
        if "weight" not in parameters or not split.parameters.keys() >= parameters.keys():
            raise TypeError(
                f"{style} splits the parameters {', '.join(split.parameters)} of a {kind} layer, "
                f"but {path!r}, a {type(module).__name__}, has {', '.join(parameters) or 'none'} "
                "of its own; write a ParallelStyle for it, or remove its parametrization first.")
        features = None if kind == "embedding" else \
            parameters["weight"].shape[1 if kind == "linear" else 0]
        output = self.output_layouts or self._default_output
        to_plain = self.use_local_output
        if to_plain is None:
            # A plain tensor means Replicate, so anything else has to stay a DTensor.
            to_plain = output == Replicate()
        return ModulePlan(
            {name: split.parameters[name] for name in parameters},
            EnterModule(who, device_mesh, self.input_layouts or split.input, split.input,
                        features),
            LeaveModule(who, device_mesh, output, to_plain),
            parameters["weight"].shape[split.parameters["weight"].dim]
            if kind != "embedding" and self._cuts_result and output == Shard(-1) else None)


class ColwiseParallel(_LayerStyle):
    """Splits the output features of a Linear, or the columns of an Embedding.

    A Linear's weight and bias are ``Shard(0)``, an Embedding's weight is ``Shard(1)``; GPT-2's
    ``Conv1D`` of the transformers package is a Linear whose weight lies the other way.  The
    forward communicates only where the input has to be gathered.

    Args:
        input_layouts: how a plain input lies, by default ``Replicate()``.  A DTensor says so
            itself.  Parts along a dim other than the last one are taken to be even.
        output_layouts: how the result shall lie, by default ``Shard(-1)``.
        use_local_output: True gives the caller this rank's part as a plain tensor, False a
            DTensor.  None gives a plain tensor where the result is ``Replicate()``, for that is
            what a plain tensor means, and a DTensor otherwise.

    Raises:
        TypeError: an argument of another type.
    """

    _splits = {
        "linear": _Split({"weight": Shard(0), "bias": Shard(0)}, Replicate()),
        "transposed_linear": _Split({"weight": Shard(1), "bias": Shard(0)}, Replicate()),
        "embedding": _Split({"weight": Shard(1)}, Replicate()),
    }
    _default_output = Shard(-1)
    _cuts_result = True


class RowwiseParallel(_LayerStyle):
    """Splits the input features of a Linear, or the rows of an Embedding.

    A Linear's weight is ``Shard(1)`` and its bias ``Replicate()``, an Embedding's weight is
    ``Shard(0)``.  Every rank computes a summand of the result, so the forward ends with one
    all-reduce, or one reduce-scatter where the output is to be split.

    Args:
        input_layouts: how a plain input lies, by default ``Shard(-1)`` for a Linear and
            ``Replicate()`` for an Embedding.  A DTensor says so itself.  Parts along a dim
            other than the last one are taken to be even.
        output_layouts: how the result shall lie, by default ``Replicate()``.
        use_local_output: as in :class:`ColwiseParallel`.

    Raises:
        TypeError: an argument of another type.
    """

    _splits = {
        "linear": _Split({"weight": Shard(1), "bias": Replicate()}, Shard(-1)),
        "transposed_linear": _Split({"weight": Shard(0), "bias": Replicate()}, Shard(-1)),
        "embedding": _Split({"weight": Shard(0)}, Replicate()),
    }
    _default_output = Replicate()
    _cuts_result = False

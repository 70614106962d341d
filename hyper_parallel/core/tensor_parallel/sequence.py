"""``SequenceParallel``: a norm or a dropout on activations that are split along the sequence."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.core.tensor_parallel._boundary import EnterModule, LeaveModule
from hyper_parallel.core.tensor_parallel.style import ModulePlan, ParallelStyle, check_flag
from hyper_parallel.platform import get_platform

platform = get_platform()


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(ParallelStyle):
    """Runs a module on activations that are split along the sequence; its parameters stay whole.

    For modules that treat each token by itself: LayerNorm, RMSNorm of any make, Dropout.  Every
    rank computes its part of the sequence, and the gradients of the parameters are added up over
    the axis.  After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models".

    Args:
        sequence_dim: the dim of the input and of the result that is the sequence.  A plain input
            is this rank's part of it, and all parts are of one length; a DTensor is
            redistributed where it lies otherwise.
        use_local_output: whether the caller gets this rank's part as a plain tensor.

    Raises:
        TypeError: an argument of another type.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def __post_init__(self) -> None:
        if type(self.sequence_dim) is not int:
            raise TypeError("sequence_dim of SequenceParallel is the number of a dim, but got "
                            f"{self.sequence_dim!r}.")
        check_flag(self, "use_local_output")

    def plan_module(self, path: str, module: Any, device_mesh: DeviceMesh) -> ModulePlan:
        """See :meth:`ParallelStyle.plan_module`."""
        who = f"SequenceParallel module {path!r}"
        split = Shard(self.sequence_dim)
        return ModulePlan(
            dict.fromkeys(platform.own_parameters(module), Replicate()),
            EnterModule(who, device_mesh, split, split),
            LeaveModule(who, device_mesh, split, self.use_local_output))

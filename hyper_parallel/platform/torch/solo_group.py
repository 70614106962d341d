"""A process group of one process: every collective is a copy, and nothing is ever sent."""
from datetime import timedelta
from typing import Any, Optional, Sequence

import torch
from torch import Tensor
from torch import distributed as dist


class FinishedWork(dist.Work):
    """The handle of a collective that is over already."""

    def __init__(self, result: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._result = list(result)

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Returns True at once."""
        del timeout
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def result(self) -> list[Tensor]:
        """The tensors that the collective filled."""
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A future that holds the tensors already."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


def _copy(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> FinishedWork:
    with torch.no_grad():
        for output, source in zip(outputs, inputs):
            output.copy_(source.view_as(output))
    return FinishedWork(outputs)


class SoloGroup(dist.ProcessGroup):
    """The group that a mesh axis of size 1 has.

    The methods carry the names by which torch.distributed calls a group. Options (reduction,
    root, timeout) make no difference to a single process. Tensors of any device are taken.
    """

    group_name = "hyper_parallel_self"  # torch registers groups by name

    def __init__(self) -> None:
        super().__init__(0, 1)

    def rank(self) -> int:
        """0."""
        return 0

    def size(self) -> int:
        """1."""
        return 1

    def _backend_name(self) -> str:
        return "solo"

    getBackendName = _backend_name  # the name by which torch asks

    def __repr__(self) -> str:
        return "SoloGroup()"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """Each tensor is its own total."""
        del opts
        return FinishedWork(tensors)

    allreduce_coalesced = allreduce
    broadcast = allreduce
    reduce = allreduce

    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor],
                  opts: Any = None) -> FinishedWork:
        """Fill the only tensor of each output list."""
        del opts
        return _copy([only for only, in output_lists], inputs)

    allgather_coalesced = allgather
    gather = allgather

    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]],
                opts: Any = None) -> FinishedWork:
        """Take the only tensor of each input list."""
        del opts
        return _copy(outputs, [only for only, in input_lists])

    reduce_scatter = scatter

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> FinishedWork:
        """Copy the tensor."""
        del opts
        return _copy([output], [source])

    reduce_scatter_single = all_gather_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor],
                                    opts: Any = None) -> FinishedWork:
        """Copy each tensor."""
        del opts
        return _copy(outputs, inputs)

    alltoall = all_gather_single_coalesced
    reduce_scatter_single_coalesced = all_gather_single_coalesced
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(self, output: Tensor, source: Tensor, *_options: Any) -> FinishedWork:
        """Copy the tensor."""
        return _copy([output], [source])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> FinishedWork:
        """Nobody else has to come."""
        del opts
        return FinishedWork()

    def shutdown(self) -> None:
        """Nothing to shut down."""

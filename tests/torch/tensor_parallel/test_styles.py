"""Every style, plans written for PyTorch, and what is refused."""
from collections.abc import Callable

import pytest

from hyper_parallel import (
    ParallelStyle, PrepareModuleInput, PrepareModuleOutput, Replicate, SequenceParallel, Shard)
from tests.torch.launcher import Case, run_case, worker_cases


@pytest.mark.parametrize("case", worker_cases(__file__, "_test_styles.py"))
def test_styles(case: Case) -> None:
    """Each case of the worker file."""
    run_case(case)


@pytest.mark.parametrize("error, message, make", [
    (TypeError, "holds placements of hyper_parallel, such as Shard\\(1\\), or None, but got 1",
     lambda: PrepareModuleInput(input_layouts=(1,), desired_input_layouts=(Shard(0),))),
    (ValueError, "input_layouts and desired_input_layouts of PrepareModuleInput speak of the same",
     lambda: PrepareModuleInput(input_layouts=Shard(0))),
    (ValueError, "input_kwarg_layouts and desired_input_kwarg_layouts",
     lambda: PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)},
                                desired_input_kwarg_layouts={"y": Shard(0)})),
    (TypeError, "use_local_output of PrepareModuleOutput is True or False, but got None",
     lambda: PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate(),
                                 use_local_output=None)),
    (TypeError, "sequence_dim of SequenceParallel is the number of a dim, but got '1'",
     lambda: SequenceParallel(sequence_dim="1")),
])
def test_bad_arguments(error: type[Exception], message: str,
                       make: Callable[[], ParallelStyle]) -> None:
    """Each is refused when the style is made."""
    with pytest.raises(error, match=message):
        make()

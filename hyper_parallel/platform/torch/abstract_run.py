"""Functions run on tensors without values, to learn the shapes of results, or the errors."""
from __future__ import annotations

import warnings
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch.utils._pytree import tree_flatten

from hyper_parallel.platform.torch.autograd_overrides import is_function_apply
from hyper_parallel.platform.torch.dtensor_base import undressed
from hyper_parallel.platform.torch.operator_names import declared_arguments


def abstract_results(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
                     ) -> Optional[list[torch.Tensor]]:
    """The tensors that ``func`` gives, without values; see ``Platform.abstract_results``."""
    try:
        result = _run(func, args, kwargs)
    except RuntimeError:
        # No such form, or arguments that the function refuses: it will say so when it really runs.
        return None
    leaves, _ = tree_flatten(result)
    return leaves if all(isinstance(leaf, torch.Tensor) for leaf in leaves) else None


def refusal(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Optional[Exception]:
    """See ``Platform.refusal``; a user's code is not run for that."""
    if is_function_apply(func) or declared_arguments(func):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _run(func, args, kwargs)
    except NotImplementedError:
        return None
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return None if "meta" in str(error).lower() else error
    return None


def _run(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = _without_values(args), {name: _without_values(value)
                                           for name, value in kwargs.items()}
    with undressed():
        return func(*args, **kwargs)


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return type(value)(_without_values(entry) for entry in value)
    return value

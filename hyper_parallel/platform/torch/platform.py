"""The adapter for PyTorch.

The collectives come from ``collectives``, processes and groups from ``groups``. This module puts
them together with their gradients. A gradient that communicates calls a method of
:class:`TorchPlatform` by the class, so that whoever replaced the method sees the call, and so
that a second derivative follows of itself.
"""
from datetime import timedelta
from typing import Any, Callable, Optional, Sequence

import numpy as np
import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.platform import checks
from hyper_parallel.platform.platform import Platform
from hyper_parallel.platform.torch import (
    autograd_overrides, checkpoint_overrides, collectives, dropped_arguments, dtensor_base,
    gradients, groups, masked_overrides, memory, modules, optimizer_updates, random, translation,
    values)
from hyper_parallel.platform.torch.abstract_run import abstract_results, refusal
from hyper_parallel.platform.torch.board import board_of
from hyper_parallel.platform.torch.native_calls import watch_native
from hyper_parallel.platform.torch.operator_names import (
    declared_arguments, decomposed, operator_name)
from hyper_parallel.platform.torch.solo_group import FinishedWork

Tensor = torch.Tensor
Group = groups.Group
_Splits = Optional[Sequence[int]]
_ORIGIN = "hyper_parallel_origin"


def _varying(tensor: Tensor, group: Group) -> Tensor:
    """``tensor``, equal on all ranks, for a use whose result differs between them."""
    return collectives.apply_with_gradient(
        lambda x: x, lambda grad: TorchPlatform.differentiable_all_reduce(grad, "sum", group),
        tensor)


def _extremum(data: Tensor, op: str, group: Group, size: int) -> Tensor:
    """All-reduce by max or min; the gradient goes to the ranks that hold the result."""
    held: list[Tensor] = []

    def forward(operand: Tensor) -> Tensor:
        result = collectives.all_reduce(operand, op, group, size)
        if operand.requires_grad:
            held.append(operand == result)
        return result

    def backward(grad: Tensor) -> Tensor:
        mine = held[0].to(grad.dtype)
        holders = TorchPlatform.differentiable_all_reduce(mine, "sum", group)
        return _varying(grad, group) * (mine / holders)

    return collectives.apply_with_gradient(forward, backward, data)


def _product(data: Tensor, group: Group, size: int) -> Tensor:
    """All-reduce by product; the gradient is the product of the others, right at zeros too."""
    position = groups.get_group_rank(group)
    version = getattr(data, "_version")

    def gather(operand: Tensor) -> Tensor:
        return TorchPlatform.differentiable_all_gather_concat(operand, group, size, 0)

    def spread(grad: Tensor) -> Tensor:
        return TorchPlatform.differentiable_reduce_scatter(grad, size, 0, "sum", group)

    def backward(grad: Tensor) -> Tensor:
        if getattr(data, "_version") != version:
            raise RuntimeError("the operand of a product all-reduce was modified in place before "
                               "its gradient was computed; modify a clone instead")
        every = collectives.apply_with_gradient(gather, spread, data.unsqueeze(0))
        others = torch.cat((every[:position], every[position + 1:])).prod(dim=0)
        return _varying(grad, group) * others.conj()

    return collectives.apply_with_gradient(
        lambda x: collectives.all_reduce(x, "product", group, size), backward, data)


_LOCAL_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda stacked: stacked.amax(dim=0),
    "min": lambda stacked: stacked.amin(dim=0),
    "product": lambda stacked: stacked.prod(dim=0, dtype=stacked.dtype),
}


def _exchange_and_reduce(data: Tensor, axis: int, op: str, group: Group, size: int) -> Tensor:
    """Reduce-scatter for the operations whose gradient needs every rank's operand.

    The pieces are exchanged and reduced here, which puts no more bytes on the wire than the
    native collective and leaves the gradient to the framework.
    """
    stacked = torch.stack(data.chunk(size, axis))
    shape = tuple(stacked.shape)
    received = collectives.apply_with_gradient(
        lambda x: collectives.all_to_all(x, None, None, group),
        lambda grad: TorchPlatform.differentiable_all_to_all(grad, shape, group), stacked)
    return _LOCAL_REDUCTIONS[op](received)


class TorchPlatform(Platform):
    """PyTorch with torch.distributed. What each method promises stands in :class:`Platform`."""

    Tensor = torch.Tensor
    Parameter = torch.nn.Parameter
    Size = torch.Size
    DTensorBase = dtensor_base.TorchDTensorBase
    HAS_ALL_TO_ALL_SINGLE = True

    dress = staticmethod(dtensor_base.dress)
    undress = staticmethod(dtensor_base.undress)
    run_undressed = staticmethod(dtensor_base.run_undressed)
    run_and_dress = staticmethod(dtensor_base.run_and_dress)
    run_with_own_layouts = staticmethod(dtensor_base.run_with_own_layouts)
    value_version = staticmethod(dtensor_base.value_version)
    keep_with_graph = staticmethod(dtensor_base.keep_with_graph)
    operator_name = staticmethod(operator_name)
    declared_arguments = staticmethod(declared_arguments)
    decomposed = staticmethod(decomposed)
    without_override = staticmethod(autograd_overrides.is_function_apply)
    abstract_results = staticmethod(abstract_results)
    refusal = staticmethod(refusal)

    initial_seed = staticmethod(random.initial_seed)
    draw_seed = staticmethod(random.draw_seed)
    seeded = staticmethod(random.seeded)

    watch_native = staticmethod(watch_native)
    read_native_mesh = staticmethod(translation.read_native_mesh)
    build_native_mesh = staticmethod(translation.build_native_mesh)
    read_native_tensor = staticmethod(translation.read_native_tensor)
    build_native_tensor = staticmethod(translation.build_native_tensor)
    board_of = staticmethod(board_of)

    get_rank = staticmethod(groups.get_rank)
    known_world_size = staticmethod(groups.known_world_size)
    is_initialized = staticmethod(groups.is_initialized)
    destroy_process_group = staticmethod(groups.destroy_process_group)
    generation = staticmethod(groups.generation)
    create_group = staticmethod(groups.create_group)
    self_group = staticmethod(groups.self_group)
    get_group_size = staticmethod(groups.get_group_size)
    get_group_rank = staticmethod(groups.get_group_rank)
    get_group_ranks = staticmethod(groups.get_group_ranks)
    apply_with_gradient = staticmethod(collectives.apply_with_gradient)
    value_between = staticmethod(collectives.value_between)
    released = staticmethod(collectives.released)
    note_copy = staticmethod(memory.note_copy)
    noted_copy = staticmethod(memory.noted_copy)
    shares_too_much = staticmethod(memory.shares_too_much)

    Module = modules.Module
    layer_kind = staticmethod(modules.layer_kind)
    obstacle_to_splitting = staticmethod(modules.obstacle_to_splitting)
    named_modules = staticmethod(modules.named_modules)
    own_parameters = staticmethod(modules.own_parameters)
    replace_parameter = staticmethod(modules.replace_parameter)
    own_buffers = staticmethod(modules.own_buffers)
    replace_buffer = staticmethod(modules.replace_buffer)
    wrap_forward = staticmethod(modules.wrap_forward)
    unwrap_forward = staticmethod(modules.unwrap_forward)
    named_parameters = staticmethod(modules.named_parameters)
    watch_interrupted_calls = staticmethod(modules.interrupted_calls.watch)

    fingerprint = staticmethod(values.fingerprint)
    when_waited = staticmethod(values.when_waited)

    detach = staticmethod(torch.Tensor.detach)
    copied = staticmethod(torch.Tensor.clone)

    @staticmethod
    def needs_gradient(tensor: Tensor) -> bool:
        return tensor.requires_grad and torch.is_grad_enabled()

    @staticmethod
    def is_leaf(tensor: Tensor) -> bool:
        return tensor.is_leaf

    @staticmethod
    def is_trained(tensor: Tensor) -> bool:
        return tensor.is_leaf and tensor.requires_grad

    @staticmethod
    def is_watched(tensor: Tensor) -> bool:
        return bool(tensor.retains_grad or tensor._backward_hooks)

    @staticmethod
    def as_leaf(tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.requires_grad_(like.requires_grad)

    @staticmethod
    def in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    @staticmethod
    def mark_backward(result: Tensor, origin: object) -> None:
        if result.grad_fn is not None:
            result.grad_fn.metadata[_ORIGIN] = origin

    @staticmethod
    def backward_origin() -> object:
        node = torch._C._current_autograd_node()
        return None if node is None else node.metadata.get(_ORIGIN)

    @staticmethod
    def records_gradients() -> bool:
        return torch.is_grad_enabled()

    @staticmethod
    def get_world_size() -> int:
        return groups.known_world_size() or 1

    @staticmethod
    def init_process_group(backend: Optional[str] = None, device: Any = None,
                           timeout: Optional[timedelta] = None) -> None:
        groups.init_process_group(backend, device, timeout)

    # ---- numpy ----

    @staticmethod
    def tensor_to_numpy(tensor: Tensor) -> np.ndarray:
        with _disable_current_modes():
            try:
                plain = tensor.detach().cpu()
                if plain.dtype is torch.bfloat16:
                    plain = plain.float()  # numpy has no bfloat16
                return plain.numpy().copy()
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"a {tensor.device.type} tensor of type "
                                 f"{type(tensor).__name__} holds no data that numpy could take; "
                                 f"pass a list, a numpy array or a real tensor") from error

    @staticmethod
    def tensor_from_numpy(array: np.ndarray) -> Tensor:
        with _disable_current_modes():
            return torch.from_numpy(np.array(array))

    @staticmethod
    def extreme_values(tensor: Tensor) -> tuple[Any, Any]:
        if tensor.is_floating_point():
            return -torch.inf, torch.inf
        if tensor.dtype == torch.bool:
            return False, True
        info = torch.iinfo(tensor.dtype)
        return info.min, info.max

    # ---- collectives with gradients ----

    @staticmethod
    def differentiable_all_gather_concat(data: Tensor, group: Group, concat_size: int,
                                         concat_dim: int) -> Tensor:
        size = groups.get_group_size(group)
        dim = checks.positive_dim(data, concat_dim)
        checks.check_size("concat_size", concat_size, size,
                          lambda: groups.get_group_ranks(group))
        if size == 1:
            return collectives.alias(data)
        length = data.shape[dim]
        start = groups.get_group_rank(group) * length

        def join(pieces: Tensor) -> Tensor:
            return TorchPlatform.differentiable_all_gather_concat(pieces, group, size, dim)

        def own_piece(grad: Tensor) -> Tensor:
            # A copy: a view would keep the whole gradient alive in the leaf's .grad.
            return collectives.apply_with_gradient(
                lambda whole: whole.narrow(dim, start, length).clone(
                    memory_format=torch.contiguous_format), join, grad)

        return collectives.apply_with_gradient(
            lambda x: collectives.all_gather_concat(x, dim, group, size), own_piece, data)

    @staticmethod
    def differentiable_all_to_all(input_data: Tensor, output_shape: Sequence[int],
                                  group: Group) -> Tensor:
        size = groups.get_group_size(group)
        checks.check_splits(input_data, None, None, size)
        shape, target = tuple(input_data.shape), torch.Size(output_shape)
        checks.check_elements(shape, target)
        if size == 1:
            return input_data.reshape(target)
        return collectives.apply_with_gradient(
            lambda x: collectives.all_to_all(x, None, None, group).view(target),
            lambda grad: TorchPlatform.differentiable_all_to_all(grad.reshape(shape), shape,
                                                                 group),
            input_data)

    @staticmethod
    def differentiable_all_reduce(data: Tensor, op: str, group: Group) -> Tensor:
        collectives.check_reduction(op, data.dtype)
        size = groups.get_group_size(group)
        if size == 1:
            return collectives.alias(data)
        if op == "product":
            return _product(data, group, size)
        if op in ("max", "min"):
            return _extremum(data, op, group, size)
        return collectives.apply_with_gradient(
            lambda x: collectives.all_reduce(x, op, group, size),
            lambda grad: grad / size if op == "avg" else grad, data)

    @staticmethod
    def differentiable_reduce_scatter(data: Tensor, dev_num: int, axis: int, op: str,
                                      group: Group) -> Tensor:
        collectives.check_reduction(op, data.dtype)
        size = groups.get_group_size(group)
        dim = checks.positive_dim(data, axis)
        checks.check_size("dev_num", dev_num, size, lambda: groups.get_group_ranks(group))
        checks.check_even(data, dim, size)
        if size == 1:
            return collectives.alias(data)
        if op in _LOCAL_REDUCTIONS:
            return _exchange_and_reduce(data, dim, op, group, size)

        def join(grad: Tensor) -> Tensor:
            whole = TorchPlatform.differentiable_all_gather_concat(grad, group, size, dim)
            return whole / size if op == "avg" else whole

        return collectives.apply_with_gradient(
            lambda x: collectives.reduce_scatter(x, dim, op, group, size), join, data)

    @staticmethod
    def differentiable_all_to_all_single(input_tensor: Tensor, input_splits: _Splits,
                                         output_splits: _Splits, group: Group) -> Tensor:
        size = groups.get_group_size(group)
        checks.check_splits(input_tensor, input_splits, output_splits, size)
        if size == 1:
            return collectives.alias(input_tensor)
        return collectives.apply_with_gradient(
            lambda x: collectives.all_to_all(x, input_splits, output_splits, group),
            lambda grad: TorchPlatform.differentiable_all_to_all_single(
                grad, output_splits, input_splits, group),
            input_tensor)

    @staticmethod
    def differentiable_all_to_all_single_async(
            input_tensor: Tensor, input_splits: _Splits, output_splits: _Splits,
            group: Group) -> tuple[Tensor, Any]:
        size = groups.get_group_size(group)
        checks.check_splits(input_tensor, input_splits, output_splits, size)
        if size == 1:
            output = collectives.alias(input_tensor)
            return output, FinishedWork([output])
        started: list[Any] = []

        def start(tensor: Tensor) -> Tensor:
            output, work = collectives.all_to_all_async(tensor, input_splits, output_splits,
                                                        group)
            started.append(work)
            return output

        output = collectives.apply_with_gradient(
            start,
            lambda grad: TorchPlatform.differentiable_all_to_all_single(
                grad, output_splits, input_splits, group),
            input_tensor)
        return output, started[0]

    # ---- gradients of replicated modules ----

    on_gradient = staticmethod(gradients.on_gradient)
    on_backward_from = staticmethod(gradients.on_backward_from)
    at_end_of_backward = staticmethod(gradients.at_end_of_backward)
    local_gradient = staticmethod(gradients.local_gradient)
    set_local_gradient = staticmethod(gradients.set_local_gradient)
    local_value = staticmethod(gradients.local_value)
    join_flat = staticmethod(gradients.join_flat)
    tensors_within = staticmethod(gradients.tensors_within)
    map_tensors = staticmethod(gradients.map_tensors)

    @staticmethod
    def all_reduce_async(data: Tensor, op: str, group: Group) -> tuple[Tensor, Any]:
        return data, collectives.all_reduce_async(data, op, group)

    # ---- other communication ----

    @staticmethod
    def agree_on_random_state(group: Group, mark: int,
                              generator: Optional[torch.Generator] = None) -> None:
        random.agree_on_random_state(
            lambda state: TorchPlatform.broadcast(state, 0, group), group, mark, generator)

    @staticmethod
    def broadcast(tensor: Tensor, src_index: int, group: Group) -> Tensor:
        checks.check_source(src_index, groups.get_group_size(group))
        collectives.broadcast(tensor, src_index, group)
        return tensor

    @staticmethod
    def scatter(output: Tensor, pieces: Optional[Sequence[Tensor]], src_index: int,
                group: Group) -> Tensor:
        checks.check_source(src_index, groups.get_group_size(group))
        if groups.get_group_rank(group) != src_index:
            pieces = None
        else:
            checks.check_pieces(output, pieces, groups.get_group_size(group))
        collectives.scatter(output, pieces, src_index, group)
        return output

    # ---- tensors ----

    @staticmethod
    def narrow(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
        return tensor.narrow(dim, start, length)

    @staticmethod
    def pad_end(tensor: Tensor, dim: int, amount: int) -> Tensor:
        behind = tensor.ndim - 1 - checks.positive_dim(tensor, dim)
        return functional.pad(tensor, [0, 0] * behind + [0, amount])

    @staticmethod
    def concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(tuple(tensors), dim)

    @staticmethod
    def masked_fill(tensor: Tensor, mask: Tensor, value: Any) -> Tensor:
        return tensor.masked_fill(mask, value)

    @staticmethod
    def contiguous(tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    @staticmethod
    def zeros_like(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)


dropped_arguments.install()
masked_overrides.install()
optimizer_updates.install()
checkpoint_overrides.install()

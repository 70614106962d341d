"""The adapter for MindSpore in PyNative mode.

The collectives come from ``collectives``, processes and groups from ``groups``. This module puts
them together with their gradients. A gradient that communicates calls a method of
:class:`MindSporePlatform` by the class, so that whoever replaced the method sees the call.

What MindSpore lacks says so: an all-to-all with uneven splits is missing by specification, and
there is no store by which ranks leave each other notes.
"""
from __future__ import annotations

import math
from typing import Any, Callable, Optional, Sequence

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint

from hyper_parallel.platform import checks
from hyper_parallel.platform.mindspore import (
    collectives, dtensor_base, graph_mode, history, memory, modules, operators, overrides,
    parameters, random, values)
from hyper_parallel.platform.mindspore import groups as processes
from hyper_parallel.platform.mindspore.groups import Group
from hyper_parallel.platform.platform import Platform

# An operator's error would otherwise show up at a later line. It has no effect after the first
# operator.
mindspore.runtime.launch_blocking()

_Splits = Optional[Sequence[int]]


def _group(group: Optional[str]) -> Group:
    """A group of any kind as the library knows it; None is the default group."""
    if isinstance(group, Group):
        return group
    return processes.world() if group is None else Group(group, processes.get_group_ranks(group))


def _varying(tensor: Tensor, group: Group) -> Tensor:
    """``tensor``, equal on all ranks, for a use whose result differs between them."""
    return history.apply_with_gradient(
        lambda x: x, lambda grad: MindSporePlatform.differentiable_all_reduce(grad, "sum", group),
        tensor)


def _extremum(data: Tensor, op: str, group: Group) -> Tensor:
    """All-reduce by max or min; the gradient goes to the ranks that hold the result."""
    held: list[Tensor] = []
    wanted = history.needs_gradient(data)

    def forward(operand: Tensor) -> Tensor:
        result = collectives.all_reduce(operand, op, group)
        if wanted:
            held.append(collectives.comparable(operand) == collectives.comparable(result))
        return result

    def backward(grad: Tensor) -> Tensor:
        mine = held[0].astype(grad.dtype)
        holders = MindSporePlatform.differentiable_all_reduce(mine, "sum", group)
        return _varying(grad, group) * (mine / holders)

    return history.apply_with_gradient(forward, backward, data)


def _product(data: Tensor, group: Group) -> Tensor:
    """All-reduce by product; the gradient is the product of the others, right at zeros too."""
    position = group.rank()

    def backward(grad: Tensor) -> Tensor:
        every = collectives.all_gather(history.detach(data), group)
        others = every[:position] + every[position + 1:]
        return grad * math.prod(others[1:], start=others[0])

    return history.apply_with_gradient(
        lambda x: collectives.all_reduce(x, "product", group), backward, data)


class MindSporePlatform(Platform):
    """MindSpore. What each method promises stands in :class:`Platform`."""

    Tensor = Tensor
    Parameter = Parameter
    Size = tuple
    DTensorBase = dtensor_base.MindSporeDTensorBase
    HAS_ALL_TO_ALL_SINGLE = False

    operator_name = staticmethod(operators.operator_name)
    run_and_dress = staticmethod(dtensor_base.run_and_dress)
    run_with_own_layouts = staticmethod(dtensor_base.run_with_own_layouts)
    run_undressed = staticmethod(dtensor_base.run_undressed)
    undress = staticmethod(dtensor_base.undress)
    masked_fill = staticmethod(dtensor_base.masked_fill)
    dress = staticmethod(dtensor_base.dress)

    needs_gradient = staticmethod(history.needs_gradient)
    is_leaf = staticmethod(history.is_leaf)
    is_trained = staticmethod(history.is_trained)
    is_watched = staticmethod(history.is_watched)
    detach = staticmethod(history.detach)
    copied = staticmethod(history.copied)
    as_leaf = staticmethod(history.as_leaf)
    value_version = staticmethod(history.value_version)
    keep_with_graph = staticmethod(history.keep_with_graph)
    apply_with_gradient = staticmethod(history.apply_with_gradient)
    value_between = staticmethod(history.value_between)
    released = staticmethod(history.released)
    note_copy = staticmethod(memory.note_copy)
    noted_copy = staticmethod(memory.noted_copy)
    shares_too_much = staticmethod(memory.shares_too_much)
    in_backward = staticmethod(history.in_backward)
    records_gradients = staticmethod(history.records_gradients)
    mark_backward = staticmethod(history.mark_backward)
    backward_origin = staticmethod(history.backward_origin)
    require_eager = staticmethod(graph_mode.require_eager)

    initial_seed = staticmethod(random.initial_seed)
    draw_seed = staticmethod(random.draw_seed)
    seeded = staticmethod(random.seeded)

    init_process_group = staticmethod(processes.init_process_group)
    destroy_process_group = staticmethod(processes.destroy_process_group)
    is_initialized = staticmethod(processes.is_initialized)
    generation = staticmethod(processes.generation)
    get_rank = staticmethod(processes.get_rank)
    get_world_size = staticmethod(processes.get_world_size)
    known_world_size = staticmethod(processes.known_world_size)
    create_group = staticmethod(processes.create_group)
    get_group_ranks = staticmethod(processes.get_group_ranks)
    get_group_rank = staticmethod(processes.get_group_rank)
    get_group_size = staticmethod(processes.get_group_size)
    self_group = staticmethod(processes.self_group)

    Module = modules.Module
    layer_kind = staticmethod(modules.layer_kind)
    obstacle_to_splitting = staticmethod(modules.obstacle_to_splitting)
    named_modules = staticmethod(modules.named_modules)
    named_parameters = staticmethod(modules.named_parameters)
    own_buffers = staticmethod(modules.own_buffers)
    own_parameters = staticmethod(modules.own_parameters)
    replace_buffer = staticmethod(modules.replace_buffer)
    replace_parameter = staticmethod(modules.replace_parameter)
    unwrap_forward = staticmethod(modules.unwrap_forward)
    wrap_forward = staticmethod(modules.wrap_forward)
    watch_interrupted_calls = staticmethod(modules.interrupted_calls.watch)

    fingerprint = staticmethod(values.fingerprint)
    when_waited = staticmethod(values.when_waited)

    # ---- what MindSpore does not have ----

    @staticmethod
    def decomposed(func: Callable) -> Optional[Callable]:
        return None

    @staticmethod
    def declared_arguments(func: Callable) -> None:
        """No function of MindSpore declares which arguments it writes to."""

    @staticmethod
    def without_override(func: Callable) -> bool:
        return False

    @staticmethod
    def abstract_results(func: Callable, args: Sequence[Any], kwargs: Any) -> Optional[list[Any]]:
        # Nothing of MindSpore's runs without values; a triangle has the shape of its matrix.
        return [args[0]] if operators.operator_name(func) in ("tril", "triu") and args else None

    @staticmethod
    def refusal(func: Callable, args: Sequence[Any], kwargs: Any) -> None:
        return None

    @staticmethod
    def watch_native(observer: Any) -> Callable[[], None]:
        raise NotImplementedError("MindSpore's own collectives cannot be watched; leave out "
                                  "trace_native: the library's are recorded without it")

    @staticmethod
    def board_of(group: Any) -> None:
        if processes.get_group_size(group) > 1:
            raise NotImplementedError("MindSpore has no store in which ranks leave notes, which "
                                      "verify='online' and gather() need; write each rank's trace "
                                      "with generate_json_dump and compare the files")

    @staticmethod
    def read_native_mesh(mesh: Any) -> Any:
        raise TypeError("MindSpore has no mesh of its own to read; make one with "
                        f"init_device_mesh, not from a {type(mesh).__name__}")

    @staticmethod
    def build_native_mesh(ranks: np.ndarray, names: tuple[str, ...], groups: Sequence[Any]) -> Any:
        raise NotImplementedError("MindSpore has no mesh of its own to give")

    @staticmethod
    def read_native_tensor(tensor: Any) -> Any:
        raise TypeError("MindSpore has no distributed tensor of its own to read; use from_local "
                        f"with this rank's part, not a {type(tensor).__name__}")

    @staticmethod
    def build_native_tensor(parts: Any) -> Any:
        raise NotImplementedError("MindSpore has no distributed tensor of its own to give")

    # ---- numpy ----

    @staticmethod
    def tensor_to_numpy(tensor: Tensor) -> np.ndarray:
        if tensor.is_meta:
            raise ValueError("a meta tensor holds no data that numpy could take; pass a list, a "
                             "numpy array or a real tensor")
        return dtensor_base.run_undressed(collectives.to_numpy, (tensor,), {})

    @staticmethod
    def tensor_from_numpy(array: np.ndarray) -> Tensor:
        return Tensor(np.array(array))

    @staticmethod
    def extreme_values(tensor: Tensor) -> tuple[Any, Any]:
        if tensor.is_floating_point():
            return -math.inf, math.inf
        if tensor.dtype == mindspore.bool_:
            return False, True
        info = np.iinfo(mindspore.dtype_to_nptype(tensor.dtype))
        return int(info.min), int(info.max)

    # ---- collectives with gradients ----

    @staticmethod
    def differentiable_all_gather_concat(data: Tensor, group: Any, concat_size: int,
                                         concat_dim: int) -> Tensor:
        group = _group(group)
        size, dim = group.size(), checks.positive_dim(data, concat_dim)
        checks.check_size("concat_size", concat_size, size, lambda: group.ranks)
        if size == 1:
            return history.alias(data)
        length = data.shape[dim]
        start = group.rank() * length

        def join(pieces: Tensor) -> Tensor:
            return MindSporePlatform.differentiable_all_gather_concat(pieces, group, size, dim)

        def own_piece(grad: Tensor) -> Tensor:
            return history.apply_with_gradient(
                lambda whole: history.copied(mint.narrow(whole, dim, start, length)), join, grad)

        return history.apply_with_gradient(
            lambda x: collectives.all_gather_concat(x, dim, group), own_piece, data)

    @staticmethod
    def differentiable_all_to_all(input_data: Tensor, output_shape: Sequence[int], group: Any
                                  ) -> Tensor:
        group = _group(group)
        shape, target = tuple(input_data.shape), tuple(output_shape)
        checks.check_splits(input_data, None, None, group.size())
        checks.check_elements(shape, target)
        if group.size() == 1:
            return input_data.reshape(target)
        return history.apply_with_gradient(
            lambda x: collectives.all_to_all(x, group).reshape(target),
            lambda grad: MindSporePlatform.differentiable_all_to_all(grad.reshape(shape), shape,
                                                                     group),
            input_data)

    @staticmethod
    def differentiable_all_reduce(data: Tensor, op: str, group: Any) -> Tensor:
        collectives.check_reduction(op, data.dtype)
        group = _group(group)
        size = group.size()
        if size == 1:
            return history.alias(data)
        if op == "product":
            return _product(data, group)
        if op in ("max", "min"):
            return _extremum(data, op, group)
        return history.apply_with_gradient(
            lambda x: collectives.all_reduce(x, op, group),
            lambda grad: grad / size if op == "avg" else grad, data)

    @staticmethod
    def differentiable_reduce_scatter(data: Tensor, dev_num: int, axis: int, op: str, group: Any
                                      ) -> Tensor:
        collectives.check_reduction(op, data.dtype)
        group = _group(group)
        size, dim = group.size(), checks.positive_dim(data, axis)
        checks.check_size("dev_num", dev_num, size, lambda: group.ranks)
        checks.check_even(data, dim, size)
        if size == 1:
            return history.alias(data)
        if op in ("max", "min", "product"):
            # Of these a whole result is made anyway; its gradient needs every rank's operand.
            length = data.shape[dim] // size
            whole = _varying(MindSporePlatform.differentiable_all_reduce(data, op, group), group)
            return mint.narrow(whole, dim, group.rank() * length, length)

        def join(grad: Tensor) -> Tensor:
            whole = MindSporePlatform.differentiable_all_gather_concat(grad, group, size, dim)
            return whole / size if op == "avg" else whole

        return history.apply_with_gradient(
            lambda x: collectives.reduce_scatter(x, dim, op, group), join, data)

    @staticmethod
    def differentiable_all_to_all_single_async(
            input_tensor: Tensor, input_splits: _Splits, output_splits: _Splits, group: Any
            ) -> tuple[Tensor, Any]:
        """The exchange is done when this returns: MindSpore on the CPU has no asynchronous one."""
        group = _group(group)
        size = group.size()
        checks.check_splits(input_tensor, input_splits, output_splits, size)
        even = [input_tensor.shape[0] // size] * size
        sent = even if input_splits is None else list(input_splits)
        received = even if output_splits is None else list(output_splits)
        if size == 1:
            return history.alias(input_tensor), values.FinishedWork()
        output = history.apply_with_gradient(
            lambda x: collectives.exchange(x, sent, received, group),
            lambda grad: MindSporePlatform.differentiable_all_to_all_single_async(
                grad, received, sent, group)[0],
            input_tensor)
        return output, values.FinishedWork()

    # ---- other communication ----

    @staticmethod
    def agree_on_random_state(group: Any, mark: int, generator: Any = None) -> None:
        del generator
        seed = MindSporePlatform.broadcast(Tensor(random.agreed_seed()), 0, group)
        random.go_on_from(collectives.to_numpy(seed), mark)

    @staticmethod
    def broadcast(tensor: Tensor, src_index: int, group: Any) -> Tensor:
        group = _group(group)
        checks.check_source(src_index, group.size())
        if group.size() > 1:
            collectives.broadcast(tensor, src_index, group)
        return tensor

    @staticmethod
    def scatter(output: Tensor, pieces: Optional[Sequence[Tensor]], src_index: int, group: Any
                ) -> Tensor:
        group = _group(group)
        checks.check_source(src_index, group.size())
        if group.rank() != src_index:
            pieces = None
        else:
            checks.check_pieces(output, pieces, group.size())
        if group.size() > 1:
            collectives.scatter(output, pieces, src_index, group)
        else:
            output.copy_(pieces[0])
        return output

    # ---- tensors ----

    @staticmethod
    def narrow(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
        return mint.narrow(tensor, dim, start, length)

    @staticmethod
    def pad_end(tensor: Tensor, dim: int, amount: int) -> Tensor:
        dim = checks.positive_dim(tensor, dim)
        if not amount:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = amount
        return mint.cat((tensor, tensor.new_zeros(tuple(shape))), dim)

    @staticmethod
    def concat(tensors: Sequence[Tensor], dim: int) -> Tensor:
        return mint.cat(tuple(tensors), dim)

    @staticmethod
    def contiguous(tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    @staticmethod
    def zeros_like(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(tuple(tensor.shape))


parameters.install()
overrides.install()
graph_mode.install()

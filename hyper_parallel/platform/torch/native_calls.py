"""Sees every call of torch.distributed, once.

Whatever a program uses - functions imported long ago, functional collectives, DDP's reducer in
C++ - ends in an operator of the dispatcher's namespace ``c10d``. While somebody watches, each of
these operators has a kernel at ``BackendSelect``, a key that is always taken, below autograd and
above the devices. It tells the observers and goes on to the kernel that was there. Unlike a
dispatch mode it sees all threads, and unlike a replaced function all references to it.
"""
from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, Optional

import torch
from torch import distributed as dist

from hyper_parallel.platform.torch.dtensor_base import undressed
from hyper_parallel.platform.torch.groups import get_group_ranks
from hyper_parallel.platform.traffic_adapter import NativeCall, NativeObserver

_KEY = torch._C.DispatchKey.BackendSelect
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")

# Functions that send the sizes first, in a call of their own.
_IN_PARTS = frozenset({"all_gather_object", "gather_object", "broadcast_object_list",
                       "scatter_object_list", "send_object_list", "recv_object_list"})


class _Signature(NamedTuple):
    """Public name of an operator, and where its arguments stand; None for those it lacks."""

    kind: str
    group: int
    inputs: Optional[int] = None
    outputs: Optional[int] = None
    reduce_op: Optional[int] = None
    peer: Optional[int] = None
    splits: Optional[int] = None


_SIGNATURES = {
    "allreduce_": _Signature("all_reduce", 1, 0, 0, reduce_op=2),
    "allreduce_coalesced_": _Signature("all_reduce", 1, 0, 0, reduce_op=2),
    "allgather_": _Signature("all_gather", 2, 1, 0),
    "allgather_coalesced_": _Signature("all_gather", 2, 1, 0),
    "_allgather_base_": _Signature("all_gather_into_tensor", 2, 1, 0),
    "allgather_into_tensor_coalesced_": _Signature("all_gather_into_tensor", 2, 1, 0),
    "reduce_scatter_": _Signature("reduce_scatter", 2, 1, 0, reduce_op=3),
    "_reduce_scatter_base_": _Signature("reduce_scatter_tensor", 2, 1, 0, reduce_op=3),
    "reduce_scatter_tensor_coalesced_": _Signature("reduce_scatter_tensor", 2, 1, 0, reduce_op=3),
    "alltoall_": _Signature("all_to_all", 2, 1, 0),
    "alltoall_base_": _Signature("all_to_all_single", 2, 1, 0, splits=4),
    "broadcast_": _Signature("broadcast", 1, 0, 0, peer=2),
    "scatter_": _Signature("scatter", 2, 1, 0, peer=3),
    "gather_": _Signature("gather", 2, 1, 0, peer=3),
    "reduce_": _Signature("reduce", 1, 0, 0, reduce_op=2, peer=3),
    "send": _Signature("send", 1, inputs=0, peer=2),
    "recv_": _Signature("recv", 1, outputs=0, peer=2),
    "recv_any_source_": _Signature("recv", 1, outputs=0),
    "barrier": _Signature("barrier", 1),
    "monitored_barrier_": _Signature("monitored_barrier", 1),
}


class _Watch:
    """The kernels in the dispatcher and those who want to know."""

    def __init__(self) -> None:
        self._observers: tuple[NativeObserver, ...] = ()  # replaced whole: kernels take no lock
        self._library: Optional[torch.library.Library] = None
        self._lock = threading.Lock()
        self._parts = threading.local()

    def add(self, observer: NativeObserver) -> None:
        """Tell one more; the first one puts the kernels in place."""
        with self._lock:
            if self._library is None:
                self._library = self._installed()
            self._observers = (*self._observers, observer)

    def remove(self, observer: NativeObserver) -> None:
        """Tell it no longer; the last one takes the kernels away."""
        with self._lock:
            self._observers = tuple(one for one in self._observers if one is not observer)
            if not self._observers and self._library is not None:
                self._library._destroy()
                self._library = None

    def _installed(self) -> torch.library.Library:
        library = torch.library.Library("c10d", "IMPL")
        try:
            for name, signature in _SIGNATURES.items():
                packet = getattr(torch.ops.c10d, name, None)  # a release may lack one
                if packet is not None:
                    library.impl(name, self._kernel(packet.default, signature), _KEY.name,
                                 with_keyset=True)
        except BaseException:
            library._destroy()
            raise
        return library

    def _kernel(self, operator: Any, signature: _Signature) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any) -> Any:
            observers = self._observers
            try:
                with undressed():
                    call = self._described(signature, args)
            except Exception as error:
                for observer in observers:
                    observer.native_lost(f"{operator} cannot be read: {error!r}")
                observers = ()
            for observer in observers:
                observer.before_native(call)
            began = time.perf_counter()
            result = operator.redispatch(keys.remove(_KEY), *args)
            seconds = time.perf_counter() - began
            for observer in observers:
                observer.after_native(call, seconds)
            return result

        return kernel

    def _described(self, signature: _Signature, args: tuple) -> NativeCall:
        group = dist.ProcessGroup.unbox(args[signature.group])
        kind, continues = self._part_of(signature.kind)
        inputs, outputs = (() if place is None else _flat(args[place])
                           for place in (signature.inputs, signature.outputs))
        return NativeCall(
            kind, inputs, outputs, group,
            None if signature.reduce_op is None else _name(args[signature.reduce_op]),
            None if signature.peer is None else get_group_ranks(group)[args[signature.peer]],
            _kept(signature, args, inputs, group), continues)

    def _part_of(self, kind: str) -> tuple[str, bool]:
        """The function that this operator is a part of, and whether a part came before.

        Parts follow each other in one run of the function, so that its frame is the same and
        further on; no frame is held, which would keep what it holds alive.
        """
        found, frame = None, sys._getframe(3)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            if frame.f_code.co_name in _IN_PARTS:
                found = frame
            frame = frame.f_back
        if found is None:
            return kind, False
        identity, place = getattr(self._parts, "last", (0, 0))
        self._parts.last = id(found), found.f_lasti
        return found.f_code.co_name, identity == id(found) and place < found.f_lasti


def _flat(tensors: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return (tensors,)
    if tensors and not isinstance(tensors[0], torch.Tensor):
        return tuple(chain.from_iterable(tensors))
    return tuple(tensors)


def _name(reduce_op: Any) -> str:
    """The name of a boxed reduction, such as ``"sum"``."""
    return dist.ReduceOp.RedOpType(reduce_op.op()).name.lower()


def _kept(signature: _Signature, args: tuple, inputs: tuple[torch.Tensor, ...],
          group: dist.ProcessGroup) -> Optional[float]:
    """The part of an exchange's inputs that stays here; None for equal pieces."""
    if signature.splits is not None:
        lengths = args[signature.splits]
    elif signature.kind == "all_to_all":
        lengths = [tensor.numel() for tensor in inputs]
    else:
        return None
    return lengths[group.rank()] / (sum(lengths) or 1) if lengths else None


_watch = _Watch()


def watch_native(observer: NativeObserver) -> Callable[[], None]:
    """Tell ``observer`` of each call; see ``Platform.watch_native``."""
    _watch.add(observer)
    return lambda: _watch.remove(observer)

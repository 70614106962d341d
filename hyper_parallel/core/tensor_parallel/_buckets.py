"""Gradients reduced over an axis in buckets, while the backward pass still runs.

Words: a *bucket* is a run of parameters of one dtype whose gradients travel together; it is
*launched* when its all-reduce begins, and *settled* when the averages are the gradients.

- Buckets are filled in the reverse of the order in which a module has its parameters, which is
  about the order in which a backward pass finds their gradients.
- All ranks launch the buckets in one order, whatever the order in which gradients come: bucket i
  waits for bucket i - 1.  Those that never became full are launched when the pass ends.
- Behind the gradients of a bucket travels one number for each parameter: 1 where this rank has a
  gradient.  So a parameter that only some ranks used gets its average everywhere, and one that no
  rank used keeps None.
- The gradients stay in place until the bucket is settled.  One that comes after the launch, as
  from a reentrant checkpoint that runs twice, has the bucket reduced again.
"""
from __future__ import annotations

import weakref
from typing import Any, Callable, Optional, Sequence

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.identity_map import IdentityMap

platform = get_platform()


_reduced: IdentityMap[bool] = IdentityMap()  # the parameters that some reducer watches


def is_reduced(parameter: Any) -> bool:
    """Whether the gradients of a parameter are averaged over some axis."""
    return _reduced.get(parameter) is not None


class Bucket:
    """Some parameters whose gradients are reduced together.

    Args:
        parameters: the parameters, all of one dtype and on one device.
        group: the ranks to reduce over.
    """

    def __init__(self, parameters: Sequence[Any], group: Any) -> None:
        self.parameters = tuple(parameters)
        self._shapes = [platform.local_value(parameter).shape for parameter in parameters]
        self._group = group
        self._scale = 1.0 / platform.get_group_size(group)
        self._flat: Any = None
        self._work: Any = None
        self.waiting: set[int] = set()
        self.late = False

    @property
    def launched(self) -> bool:
        """Whether its all-reduce was begun in this pass."""
        return self._work is not None

    def reset(self) -> None:
        """A new pass begins: every parameter's gradient is still to come."""
        self.waiting = set(range(len(self.parameters)))
        self.late = False
        self._flat = self._work = None

    def launch(self) -> None:
        """Begin the all-reduce of what gradients there are."""
        gradients = [platform.local_gradient(parameter) for parameter in self.parameters]
        flat = platform.join_flat(
            [platform.zeros_like(platform.local_value(parameter)) if gradient is None else gradient
             for parameter, gradient in zip(self.parameters, gradients)],
            [float(gradient is not None) for gradient in gradients], self._scale)
        self.late = False
        self._flat, self._work = platform.all_reduce_async(flat, "sum", self._group)

    def wait(self) -> None:
        """Wait for the all-reduce, if there is one."""
        if self._work is not None:
            self._work.wait()

    def settle(self) -> None:
        """Make the averages the gradients."""
        self.wait()
        flat, start, count = self._flat, 0, len(self.parameters)
        used: Optional[list[float]] = None
        for index, (parameter, shape) in enumerate(zip(self.parameters, self._shapes)):
            length = shape.numel()
            if used is None and platform.local_gradient(parameter) is None:
                used = platform.narrow(flat, 0, flat.numel() - count, count).tolist()
            if used is None or used[index]:
                platform.set_local_gradient(
                    parameter, platform.narrow(flat, 0, start, length).view(shape))
            start += length
        self._flat = self._work = None


class Reducer:
    """Watches the gradients of some parameters and reduces them once a backward pass.

    Args:
        parameters: the parameters, each once, in the order of the module.
        group: the ranks to reduce over.
        capacity: bytes that a bucket holds at most, if it holds more than one parameter.
    """

    def __init__(self, parameters: Sequence[Any], group: Any, capacity: int) -> None:
        self.buckets = tuple(Bucket(members, group)
                             for members in _packed(parameters[::-1], capacity))
        self.armed = False
        self._next = 0
        # Weak: alive for as long as the pass is that will call it.
        self._end: Callable[[], Any] = lambda: None
        self._stops: list[Callable[[], None]] = []
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                self._stops.append(
                    platform.on_gradient(parameter, _Arrival(self, bucket, index)))
                _reduced.set(parameter, True)

    def stop(self) -> None:
        """Watch no longer."""
        for stop in self._stops:
            stop()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                _reduced.discard(parameter)

    def begin(self) -> None:
        """A backward pass reached the module; nothing to do where that is known."""
        if self._end() is not None or not self.armed:
            return
        self.give_up_if_failed()
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0
        end = _End(self)
        self._end = weakref.ref(end)
        platform.at_end_of_backward(end)

    def give_up_if_failed(self) -> None:
        """Forget a pass that failed, after what it launched has arrived."""
        if self._end() is not None:
            return
        for bucket in self.buckets:
            if bucket.launched:
                bucket.wait()
                bucket.reset()

    def arrived(self, bucket: Bucket, index: int) -> None:
        """The gradient of a parameter is complete, as far as this pass goes."""
        self.begin()
        if self._end() is None:
            return  # accumulation: nobody asked for a reduction
        bucket.late |= bucket.launched
        bucket.waiting.discard(index)
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self.buckets[self._next].launch()
            self._next += 1

    def finish(self) -> None:
        """The pass is over: launch what is left, and settle all."""
        for bucket in self.buckets[self._next:]:
            bucket.launch()
        for bucket in self.buckets:
            if bucket.late:
                bucket.wait()
                bucket.launch()
            bucket.settle()
        self._end = lambda: None


class _Arrival:
    """Tells a reducer of one parameter's gradients."""

    def __init__(self, reducer: Reducer, bucket: Bucket, index: int) -> None:
        self._reducer, self._bucket, self._index = reducer, bucket, index

    def __call__(self) -> None:
        self._reducer.arrived(self._bucket, self._index)


class _End:
    """Tells a reducer that a pass is over. It lives as long as the pass."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer.finish()


def _packed(parameters: Sequence[Any], capacity: int) -> list[list[Any]]:
    """Runs of parameters of one dtype and device, of at most ``capacity`` bytes."""
    packed: list[list[Any]] = []
    open_at: dict[tuple, tuple[int, int]] = {}  # bucket and its bytes, by dtype and device
    for parameter in parameters:
        value = platform.local_value(parameter)
        kind = value.dtype, value.device
        size = value.numel() * value.itemsize
        number, filled = open_at.get(kind, (-1, 0))
        if number < 0 or filled + size > capacity:
            number, filled = len(packed), 0
            packed.append([])
        packed[number].append(parameter)
        open_at[kind] = number, filled + size
    return packed

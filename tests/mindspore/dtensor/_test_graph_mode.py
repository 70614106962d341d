"""Graph mode on two ranks: whatever compiles a DTensor is refused, and leaves nothing behind."""
from typing import Any, Callable

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import (
    ColwiseParallel, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh,
    parallelize_module, unparallelize_module)

NPROC = 2
TIMEOUT = 60

MESH = init_device_mesh((2,), ("tp",))
PLAIN = Tensor(np.arange(8, dtype=np.float32).reshape(2, 4))
SPREAD = distribute_tensor(PLAIN, MESH, [Shard(0)])
KINDS = ("ast", "bytecode", "trace")


class Layer(nn.Cell):
    """A cell with a layer to split."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = mint.nn.Linear(4, 6, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Scaled(nn.Cell):
    """A cell with an old primitive and a parameter that is a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(SPREAD, name="scale")
        self.mul = ops.Mul()

    def construct(self, x: Tensor) -> Tensor:
        return self.mul(x, self.scale)


class Holder:
    """An object that no compiler knows."""

    tensor = SPREAD


def parallel_layer() -> nn.Cell:
    """The layer on the two ranks."""
    return parallelize_module(Layer(), MESH, {"fc": ColwiseParallel()})


LAYER = parallel_layer()
SCALED = Scaled()
HOLDER = Holder()
LISTED = [PLAIN, SPREAD]


def doubled(x: Any) -> Any:
    """An argument."""
    return x * 2


def second(x: Any) -> Any:
    """One in a list."""
    return x[1] * 2


def of_dict(x: Any) -> Any:
    """One in a dict."""
    return x["spread"] * 2


def with_global(x: Any) -> Any:
    """A global."""
    return x * SPREAD


def with_listed(x: Any) -> Any:
    """One in a global list."""
    return x * LISTED[1]


def with_held(x: Any) -> Any:
    """One behind a global object."""
    return x * HOLDER.tensor


def with_layer(x: Any) -> Any:
    """A parallel cell."""
    return LAYER(x)


def with_scaled(x: Any) -> Any:
    """A cell with a DTensor parameter."""
    return SCALED(x)


def spreading(x: Any) -> Any:
    """A DTensor made within."""
    return DTensor.from_local(x, MESH, [Shard(0)]) * 2


def summed(x: Any) -> Any:
    """The squares' sum."""
    return (x * x).sum()


def squares_of_layer(x: Any) -> Any:
    """A loss."""
    return (LAYER(x) ** 2).mean()


def gradient(x: Any) -> Any:
    """What it is differentiated by."""
    return mindspore.grad(summed)(x)


def refused(call: Callable, *args: Any, way_out: str = "take mindspore.jit away") -> None:
    """``call`` raises the library's error, and does again."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"PyNative mode only.* To mend it, .*{way_out}"):
            call(*args)


def test_graph_mode_of_functions() -> None:
    """With DTensors among the arguments, behind globals, and in the library's own functions."""
    for kind in KINDS:
        for function, argument in (
                (doubled, SPREAD), (doubled, Parameter(SPREAD, name="p")), (second, LISTED),
                (of_dict, {"spread": SPREAD}), (with_global, PLAIN), (with_listed, PLAIN),
                (with_held, PLAIN), (with_layer, PLAIN), (with_scaled, PLAIN),
                (spreading, PLAIN)):
            print(kind, function.__name__, flush=True)
            refused(mindspore.jit(function, capture_mode=kind), argument)


def test_graph_mode_around_gradients() -> None:
    """Inside and outside of ``grad``."""
    refused(mindspore.jit(gradient), SPREAD)
    refused(mindspore.grad(mindspore.jit(summed)), SPREAD)
    refused(mindspore.value_and_grad(mindspore.jit(squares_of_layer), None,
                                     LAYER.trainable_params()), PLAIN)


def test_graph_mode_of_cells() -> None:
    """``jit(cell)``, ``construct`` under ``jit``, and a parameter that is a DTensor."""
    for kind in KINDS:
        class Compiled(Layer):
            """Its construct is compiled."""

            @mindspore.jit(capture_mode=kind)
            def construct(self, x: Tensor) -> Tensor:
                return self.fc(x)

        refused(mindspore.jit(LAYER, capture_mode=kind), PLAIN)
        refused(mindspore.jit(SCALED, capture_mode=kind), PLAIN)
        refused(parallelize_module(Compiled(), MESH, {"fc": ColwiseParallel()}), PLAIN)


def test_graph_mode_of_a_cell_compiled_before_it_was_parallel() -> None:
    """Its graph, of the plain parameters, is not run any more; nor is the error later on."""
    layer = Layer()
    compiled = mindspore.jit(layer)
    before = compiled(PLAIN).asnumpy()
    parallelize_module(layer, MESH, {"fc": ColwiseParallel()})
    refused(compiled, PLAIN)
    unparallelize_module(layer)
    assert compiled(PLAIN).shape == before.shape
    assert np.allclose(compiled(PLAIN).asnumpy(), layer(PLAIN).asnumpy())


def test_graph_mode_of_plain_tensors() -> None:
    """After the errors too, and of a DTensor's local part."""
    for kind in KINDS:
        compiled = mindspore.jit(doubled, capture_mode=kind)
        for _ in range(2):
            assert np.array_equal(compiled(PLAIN).asnumpy(), 2 * PLAIN.asnumpy())
            refused(compiled, SPREAD)
        local = compiled(SPREAD.to_local()).asnumpy()
        assert np.array_equal(local, 2 * PLAIN.asnumpy()[MESH.rank:MESH.rank + 1])
    assert np.array_equal(doubled(SPREAD).asnumpy(), 2 * PLAIN.asnumpy())


def test_graph_mode_by_set_context() -> None:
    """Meshes, DTensors and parallel modules cannot be made; what exists is not compiled."""
    way_out = r"set_context\(mode=mindspore.PYNATIVE_MODE\)"
    step = mindspore.value_and_grad(squares_of_layer, None, LAYER.trainable_params())
    optimizer = nn.SGD(LAYER.trainable_params(), 0.1)
    gradients = step(PLAIN)[1]
    kept = LAYER.fc.weight.full_tensor().asnumpy()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        fresh = Layer()
        for call in (lambda: init_device_mesh((2,), ("dp",)),
                     lambda: distribute_tensor(PLAIN, MESH, [Shard(0)]),
                     lambda: DTensor.from_local(PLAIN, MESH, [Replicate()]),
                     lambda: parallelize_module(fresh, MESH, {"fc": ColwiseParallel()}),
                     lambda: LAYER(PLAIN), lambda: SCALED(PLAIN), lambda: fresh(SPREAD),
                     lambda: mindspore.grad(summed)(SPREAD), lambda: step(PLAIN),
                     lambda: optimizer(gradients)):
            refused(call, way_out=way_out)
        assert not isinstance(fresh.fc.weight, DTensor)
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    assert np.array_equal(LAYER.fc.weight.full_tensor().asnumpy(), kept)
    optimizer(gradients)
    assert not np.array_equal(LAYER.fc.weight.full_tensor().asnumpy(), kept)

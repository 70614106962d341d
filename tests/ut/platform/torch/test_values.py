"""Fingerprints of values, and handles that tell when somebody waited."""
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.platform.torch.platform import TorchPlatform as platform
from hyper_parallel.platform.torch.solo_group import FinishedWork
from hyper_parallel.platform.torch.values import xor_of

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
          torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16,
          torch.int32, torch.int64]


def by_hand(tensor: torch.Tensor) -> int:
    """The 64 bits, byte by byte."""
    data = bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    result = 0
    for place, start in enumerate(range(0, len(data), 8)):
        word = int.from_bytes(data[start:start + 8].ljust(8, b"\0"), "little")
        result ^= word * (2 * place + 1) % 2 ** 64
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 3), (4, 4)])
def test_norm_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)) % 5).reshape(shape).to(dtype)
    norm, bits = platform.fingerprint(tensor)
    wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert norm == pytest.approx(wide.abs().square().sum().sqrt().item())
    assert bits == by_hand(tensor)
    assert platform.fingerprint(tensor.clone())[1] == bits


def test_what_makes_a_difference() -> None:
    """One bit, and the order; not the strides, nor nan beside itself."""
    tensor = torch.arange(12.0).reshape(3, 4)
    bits = platform.fingerprint(tensor)[1]
    changed = tensor.clone()
    changed[1, 1] = torch.nextafter(changed[1, 1], torch.tensor(9.0))
    assert platform.fingerprint(changed)[1] != bits
    assert platform.fingerprint(tensor.flip(0))[1] != bits
    assert platform.fingerprint(torch.tensor([0.0]))[1] != platform.fingerprint(
        torch.tensor([-0.0]))[1]
    assert platform.fingerprint(tensor.t().contiguous().t())[1] == bits
    odd = torch.tensor([float("nan"), float("inf"), 1.0])
    norm, bits = platform.fingerprint(odd)
    assert math.isnan(norm) and platform.fingerprint(odd.clone())[1] == bits
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert platform.fingerprint(z.conj())[1] == by_hand(z.conj().resolve_conj())


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 101])
def test_xor_on_other_devices(length: int) -> None:
    words = torch.randint(-2 ** 62, 2 ** 62, (length,))
    expected = 0
    for word in words.tolist():
        expected ^= word
    assert xor_of(words) == expected


def test_nobody_notices() -> None:
    """No gradient, no random number, no mode."""
    class Seen(TorchDispatchMode):
        """Counts operators."""
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    class SeenFunctions(TorchFunctionMode):
        """Counts functions."""
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, requires_grad=True)
    y = (x * 2).sum()
    state, version = torch.get_rng_state(), y._version
    with Seen() as seen, SeenFunctions() as functions:
        platform.fingerprint(y)
    assert seen.count == functions.count == 0
    assert torch.equal(torch.get_rng_state(), state) and y._version == version
    y.backward()
    assert x.grad.tolist() == [2.0] * 4
    with torch.inference_mode():
        assert platform.fingerprint(torch.ones(2)) is not None


def test_no_data() -> None:
    assert platform.fingerprint(torch.ones(2, device="meta")) is None
    assert platform.fingerprint(torch.eye(2).to_sparse()) is None
    with FakeTensorMode():
        assert platform.fingerprint(torch.ones(2)) is None


def test_when_waited() -> None:
    """Called once, after the wait; all else is the collective's own."""
    calls = []

    class Slow(FinishedWork):
        """Notes the order."""

        def wait(self, timeout=None):
            calls.append(("wait", timeout))
            return super().wait()

    result = [torch.ones(2)]
    work = platform.when_waited(Slow(result), lambda: calls.append("told"))
    assert isinstance(work, torch.distributed.Work)
    assert work.is_completed() and work.is_success() and work.result()[0] is result[0]
    assert work.get_future().value()[0] is result[0] and calls == []
    assert work.wait() is True and work.wait(3) is True
    assert calls == [("wait", None), "told", ("wait", 3)]

"""What the observer's slot in dispatch costs while nobody observes.

    python benchmarks/observer.py

The other variant is the same ``dispatch`` with the lines that name the observer taken out of its
source.  Both take turns in one process; the numbers are medians in microseconds a call.
"""
from __future__ import annotations

import argparse
import functools
import inspect
import statistics
import textwrap
import time
from types import CodeType, FunctionType
from typing import Callable

import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard import _op_dispatch
from hyper_parallel.platform import get_platform


def without_observer() -> Callable:
    """``OpDispatcher.dispatch`` compiled without its observer lines."""
    lines = textwrap.dedent(inspect.getsource(_op_dispatch.OpDispatcher.dispatch)).splitlines()
    kept = [line for line in lines if "observer" not in line and line.strip() != "finally:"]
    # A try without its finally would not compile: it gets one that does nothing.
    source = "\n".join(kept) + "\n    finally:\n        pass\n"
    module = compile(f"from __future__ import annotations\n{source}", "<without observer>", "exec")
    code = next(part for part in module.co_consts if isinstance(part, CodeType))
    defaults = _op_dispatch.OpDispatcher.dispatch.__defaults__
    function = FunctionType(code, vars(_op_dispatch), "dispatch", defaults)
    return functools.partial(function, _op_dispatch.dispatcher)


def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds a call with and without, one number a round."""
    mesh = hp.init_device_mesh((1,), ("tp",))
    x = hp.DTensor.from_local(torch.randn(16, 16), mesh, [hp.Shard(0)])
    variants = {"with": _op_dispatch.dispatcher.dispatch, "without": without_observer()}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, dispatch in variants.items():
            DTensor._dispatch = staticmethod(dispatch)
            start = time.perf_counter()
            for _ in range(calls):
                x.add(x)
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    DTensor._dispatch = staticmethod(_op_dispatch.dispatcher.dispatch)
    return samples


def tracer_report() -> str:
    """How many platform methods the tracer wraps, and whether it puts all of them back."""
    cls = type(get_platform())
    before = {name: value for name, value in vars(cls).items()
              if name.startswith("differentiable_")}
    with hp.CommDebugMode():
        wrapped = sum(vars(cls)[name] is not value for name, value in before.items())
    restored = all(vars(cls)[name] is value for name, value in before.items())
    return f"{wrapped} methods wrapped inside the mode, originals after it: {restored}"


def main() -> None:
    """Print both medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = measure(arguments.rounds, arguments.calls)
    for name, values in samples.items():
        print(f"{name:<8} the observer's lines: {statistics.median(values):.2f} us")
    ratio = statistics.median(a / b for a, b in zip(samples["with"], samples["without"]))
    print(f"ratio {ratio:.3f}")
    print(f"tracer: {tracer_report()}")


if __name__ == "__main__":
    main()

"""Long traces: memory with a bound on the records, and the time that a file takes.

    python benchmarks/trace_files.py

A process that has a world of one records what the platform would tell of a training run on two
ranks: modules, operators, redistributions and all-reduces.
"""
from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time

import torch

from hyper_parallel import CommDebugMode, get_platform
from hyper_parallel.core.dtensor.debug import CommTrace
from hyper_parallel.core.dtensor.debug._call_records import walk

ALL_REDUCE = "differentiable_all_reduce"


class Pair:
    """Stands for a group of two ranks."""

    def size(self) -> int:
        """Number of ranks."""
        return 2


def record(mode: CommDebugMode, layers: int) -> None:
    """Tell a mode of layers that run one after another: five records each."""
    x, weight, group = torch.ones(4, 16), torch.ones(16, 16), Pair()
    for layer in range(layers):
        name = f"layers.{layer % 64}.fc"
        mode._on_module_event(name, "enter")
        mode._on_op_dispatch_enter("linear", None, (x, weight), {})
        mode._on_collective_call(ALL_REDUCE, (x, "sum", group), {}, x, 1e-5)
        mode._on_op_dispatch_exit("linear", x)
        mode._on_op_dispatch_enter("gelu", None, (x,), {})
        mode._on_collective_call(ALL_REDUCE, (x, "sum", group), {}, x, 1e-5)
        mode._on_op_dispatch_exit("gelu", x)
        mode._on_module_event(name, "exit")


def mebibytes() -> float:
    """Memory that the process has resident now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2 ** 20


def bounded(collectives: int, max_records: int) -> None:
    """Print how much memory many collectives need with a bound."""
    mode = CommDebugMode(max_records=max_records)
    with mode:
        record(mode, max_records)
        before = mebibytes()
        record(mode, collectives // 2 - max_records)
        after = mebibytes()
    print(f"{mode.get_total_counts():,} collectives, max_records={max_records:,}: resident memory "
          f"{before:.0f} MiB when the bound was reached, {after:.0f} MiB at the end, "
          f"{mode.dropped_records:,} records dropped")


def files(records: int) -> None:
    """Print how long a trace takes to write and to load."""
    mode = CommDebugMode(module=torch.nn.Linear(1, 1))
    with mode:
        record(mode, records // 5)
    count = sum(1 for _ in walk(mode.tree.roots))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        start = time.perf_counter()
        mode.generate_json_dump(path, noise_level=3)
        written = time.perf_counter()
        trace = CommTrace.load(path)
        loaded = time.perf_counter()
        size = os.path.getsize(path) / 2 ** 20
    if trace.get_comm_summary() != mode.get_comm_summary():
        raise SystemExit("the file does not give the trace back")
    print(f"{count:,} records, {size:.0f} MiB of JSON: written in {written - start:.2f} s, "
          f"loaded in {loaded - written:.2f} s")


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", type=int, default=1_000_000)
    parser.add_argument("--max-records", type=int, default=10_000)
    parser.add_argument("--records", type=int, default=100_000)
    arguments = parser.parse_args()
    get_platform().init_process_group()
    files(arguments.records)
    bounded(arguments.collectives, arguments.max_records)
    get_platform().destroy_process_group()


if __name__ == "__main__":
    main()

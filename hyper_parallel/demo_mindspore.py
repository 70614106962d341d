"""A tensor-parallel MLP on MindSpore, traced: ``python -m hyper_parallel.demo_mindspore``.

This is a user's program: it stands above the library's layers and uses its public names and
MindSpore. It starts its own two ranks, with a scheduler as MindSpore needs one; under ``msrun`` it
is one of the ranks.

The model is ``fc2(gelu(fc1(x)))`` with ``fc1`` split by columns and ``fc2`` by rows, in float32 on
the CPU. Rank 0 prints what ``CommDebugMode`` saw of the forward and of a step, and writes its JSON.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import mindspore
from mindspore import Tensor, mint, nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    RowwiseParallel,
    get_platform,
    init_device_mesh,
    parallelize_module,
)

HIDDEN, INTERMEDIATE, BATCH = 16, 32, 4
PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
SECONDS = 240  # after which the ranks are taken to hang
SCHEDULER = "from mindspore.communication import init; init()"


class TwoLayerMLP(nn.Cell):
    """``hidden -> intermediate -> hidden`` with a gelu between, without biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.fc1 = mint.nn.Linear(hidden, intermediate, bias=False)
        self.fc2 = mint.nn.Linear(intermediate, hidden, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        """Maps ``(batch, hidden)`` to ``(batch, hidden)``."""
        return self.fc2(mint.nn.functional.gelu(self.fc1(x)))


def run_rank(json: str) -> None:
    """What each rank does."""
    platform = get_platform()
    platform.init_process_group()
    mindspore.set_seed(0)
    mesh = init_device_mesh((platform.get_world_size(),), ("tp",))
    model = parallelize_module(TwoLayerMLP(HIDDEN, INTERMEDIATE), mesh, PLAN)
    optimizer = nn.SGD(model.trainable_params(), 0.1)
    x = mint.reshape(Tensor(list(range(BATCH * HIDDEN)), mindspore.float32) / 64, (BATCH, HIDDEN))
    with CommDebugMode(module=model) as forward:
        model(x)
    step = mindspore.value_and_grad(lambda t: (model(t) ** 2).mean(), 0, optimizer.parameters)
    with CommDebugMode(module=model) as trace:
        before, (_, gradients) = step(x)
        optimizer(gradients)
    after, _ = step(x)
    if mesh.rank == 0:
        print(f"Mesh: {mesh}")
        for level in range(3):
            print(f"\nForward pass, noise_level={level}:\n")
            print(forward.generate_comm_debug_tracing_table(noise_level=level))
        print("\nForward, backward and optimizer, noise_level=3:\n")
        print(trace.generate_comm_debug_tracing_table(noise_level=3))
        print(f"\nCounts: {trace.get_comm_counts()}, in total {trace.get_total_counts()}")
        print(f"Sharding: {trace.get_sharding_info()}")
        print(f"Loss before and after the step: {float(before):.6f} {float(after):.6f}")
        trace.generate_json_dump(json)
        print(f"The whole trace as JSON: {json}", flush=True)
    platform.destroy_process_group()


def start_ranks(command: Sequence[str], count: int) -> int:
    """Starts a scheduler and, by a command, the ranks, and waits for them; the exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "MS_WORKER_NUM": str(count), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port),
        "GLOG_v": os.environ.get("GLOG_v", "3"), "HYPER_PARALLEL_PLATFORM": "mindspore",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with ExitStack() as started:
        def start(command: Sequence[str], **environment: str) -> subprocess.Popen:
            process = started.enter_context(subprocess.Popen(
                command, env=common | environment, start_new_session=True))
            started.callback(end, process)
            return process

        start([sys.executable, "-c", SCHEDULER], MS_ROLE="MS_SCHED")
        ranks = [start(command, MS_ROLE="MS_WORKER", MS_NODE_ID=str(index), RANK_ID=str(index))
                 for index in range(count)]
        try:
            return max(abs(process.wait(SECONDS)) for process in ranks)
        except subprocess.TimeoutExpired:
            print(f"the ranks did not end within {SECONDS} s and are killed", file=sys.stderr)
            return 1


def end(process: subprocess.Popen) -> None:
    """Kills a process with all that it started, if it has not ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs as one rank where a launcher started it, and starts the ranks otherwise."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.demo_mindspore",
                                     description=__doc__)
    parser.add_argument("--json", default="comm_mode_log.json", help="where to write the trace")
    options = parser.parse_args(arguments)
    if "MS_ROLE" in os.environ:
        run_rank(options.json)
    else:
        sys.exit(start_ranks([sys.executable, "-m", "hyper_parallel.demo_mindspore",
                              f"--json={options.json}"], 2))


if __name__ == "__main__":
    main()

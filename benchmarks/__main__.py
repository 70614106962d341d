"""Run every benchmark, one after another, each in processes of its own."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ONE_PROCESS = ("dispatch.py", "cache_miss.py", "observer.py", "mesh.py", "redistribution.py",
               "trace_files.py", "transformer_step.py")
TWO_RANKS = ("mlp_step.py", "transformer_step.py", "llama_step.py", "tracing.py")


def main() -> int:
    """Print each benchmark's name and numbers; the exit status of the first that fails."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone",
              "--nproc-per-node", "2"]
    commands = [[sys.executable, str(FOLDER / name)] for name in ONE_PROCESS]
    commands += [[*launch, str(FOLDER / name)] for name in TWO_RANKS]
    for command in commands:
        print(f"\n== {Path(command[-1]).name}", flush=True)
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())

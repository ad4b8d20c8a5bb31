"""Run train.py and generate.py on this machine, kill a generator after step 20, and start the generators again.

python run.py [SEED]
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent


@contextmanager
def job(world_size: int, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a job, whose output can be read. It ends with the context at the latest."""
    run = [sys.executable, "-m", "meshcomm", "run", "--world-size", str(world_size), *command]
    # After a loss, torch's store would print a C++ trace from each rank.
    env = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True, env=env, cwd=HERE) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def show(process: subprocess.Popen[str], until: str) -> str:
    """Print a job's lines until one begins with this text, and return it."""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        if line.startswith(until):
            return line
    raise SystemExit(f"a job ended before it printed {until!r}")


def main(seed: str = "0") -> None:
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with job(4, "train.py", seed, store) as trainers:
        with job(2, "generate.py", seed, store) as generators:
            process = int(show(generators, "generator").split()[-1])
            show(trainers, "step 20:")
            os.kill(process, signal.SIGKILL)
            print(f"killed process {process}: its job ended with exit code {generators.wait()}", flush=True)
        with job(2, "generate.py", seed, store) as generators:
            show(trainers, "versions")
            codes = trainers.wait(), generators.wait()
    print(f"{time.monotonic() - start:.0f} s in total")
    sys.exit(max(codes))


if __name__ == "__main__":
    # Both jobs end with this program, also if it is ended itself.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main(*sys.argv[1:])

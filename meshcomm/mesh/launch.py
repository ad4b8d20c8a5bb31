"""Start one process per rank on this host, by torchrun's own agent, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshcomm.errors import LaunchError

INTERRUPTED = 130


def launch(arguments: Sequence[str], world_size: int, max_restarts: int = 0) -> int:
    """Run `python ARGUMENTS` as `world_size` ranks; return the job's exit code.

    The code is 0 when all ranks ended well, that of the first rank that failed (128 + signal where
    a signal ended it), or 130 after Ctrl-C. No rank outlives the call. The ranks write to this
    process's own stdout and stderr; a rank that a signal ended is named on stderr. Where one fails,
    all are ended and started again, up to `max_restarts` times; the code is that of the last time.
    """
    if world_size > 4096:
        raise LaunchError(
            f"{world_size} processes on one host",
            given=f"a mesh of {world_size} ranks, started outside a launcher",
            expected="at most 4096 ranks on one host",
            hint="torchrun --nnodes N --nproc-per-node M -m meshcomm ... on every host",
        )
    threads = max(1, (os.cpu_count() or 1) // world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # The agent logs every rank that fails, with its own traceback; the rank has already said why.
    logging.disable(logging.CRITICAL)
    optional: dict[str, Any] = {"shutdown_timeout": 10}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        **{name: value for name, value in optional.items() if name in known},
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return _failed(error)
    except (SignalException, KeyboardInterrupt) as stop:
        received = getattr(stop, "sigval", signal.SIGINT)
        return INTERRUPTED if received == signal.SIGINT else 128 + int(received)
    return 0


def _failed(error: ChildFailedError) -> int:
    # A rank that ends itself has said why; one that a signal ends cannot. After the first failure
    # the agent ends the others by SIGTERM, and by SIGKILL where they hang: no news either.
    codes = {rank: int(failure.exitcode) for rank, failure in error.failures.items()}
    spoken = [code for code in codes.values() if code > 0 and code != INTERRUPTED]
    if spoken:
        return spoken[0]
    killed = {rank: -code for rank, code in codes.items() if code < 0}
    roots = {rank: number for rank, number in killed.items() if number != signal.SIGTERM} or killed
    for rank, number in roots.items():
        with contextlib.suppress(ValueError):
            print(f"meshcomm: rank {rank} was ended by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + next(iter(roots.values())) if roots else INTERRUPTED

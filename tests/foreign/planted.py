"""Faults on one rank of a third-party program, such as a bad sample, a hung file system or a killed host would cause."""

from __future__ import annotations

import os
import sys
import time


def act(fault: str) -> None:
    """Print the time, and cause the fault. The caller has to do `skip` and `leave`."""
    print(f"\nplanted {time.time()}", file=sys.stderr, flush=True)
    if fault == "sleep":
        time.sleep(600)
    if fault == "kill":
        os.kill(os.getpid(), 9)
    if fault == "exit":
        os._exit(0)
    if fault == "raise":
        raise ValueError("planted")

"""What goes wrong on one rank of a program that nobody here wrote, as a bad sample, a hung file system or a killed host would do."""

from __future__ import annotations

import os
import sys
import time


def act(fault: str) -> None:
    """Tell when, and do it. `skip` and `leave` are for the caller to do."""
    print(f"\nplanted {time.time()}", file=sys.stderr, flush=True)
    if fault == "sleep":
        time.sleep(600)
    if fault == "kill":
        os.kill(os.getpid(), 9)
    if fault == "exit":
        os._exit(0)
    if fault == "raise":
        raise ValueError("planted")

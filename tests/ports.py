"""Find a free port, outside the range from which the system assigns ports."""

from __future__ import annotations

import random
import socket
from typing import Final

# For programs that ask for no port, Linux assigns one from 32768 on, and other systems assign higher ones. Another connection
# could take such a port between the check and its use.
_PORTS: Final = range(20_000, 32_000)


def free_port() -> int:
    """A port on the loopback interface that is free now."""
    # Not the generator that tests seed: two simultaneous runs would try the same ports.
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of 200 ports from {_PORTS.start} to {_PORTS.stop} is free")

"""Which port is free? Tried, among those that the system gives to nobody by itself."""

from __future__ import annotations

import random
import socket
from typing import Final

# Linux gives connections of programs that ask for no port one from 32768 on, other systems higher ones. A port
# from there may be taken by anybody's connection between the question and its use.
_PORTS: Final = range(20_000, 32_000)


def free_port() -> int:
    """A port of the loopback that nobody listens at now."""
    # Not the generator that tests seed: two runs at once would ask for the same ports.
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of 200 ports from {_PORTS.start} to {_PORTS.stop} is free")

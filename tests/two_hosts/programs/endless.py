"""Run under `meshcomm run CONFIG endless.py BYTES`: all_reduce over the whole world, again and again."""

from __future__ import annotations

import socket
import sys

import torch

import meshcomm
from tests.two_hosts.job import say, telling


def main(size_bytes: int) -> None:
    with meshcomm.init() as mesh:
        x = torch.ones(size_bytes // 4)
        mesh.all_reduce("all", x[:1].clone())
        say("up", mesh.rank, {"host": socket.gethostname()})
        while True:
            mesh.all_reduce("all", x, op="avg")


if __name__ == "__main__":
    with telling():
        main(int(sys.argv[1]))

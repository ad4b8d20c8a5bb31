"""Run under `meshcomm run`: report this rank's place in the mesh, and the results of calls along every dim."""

from __future__ import annotations

import socket
from typing import Any

import torch

import meshcomm
from tests.two_hosts.job import say, telling


def main() -> None:
    with meshcomm.init() as mesh:
        heard: dict[str, Any] = {}
        for dim in (*mesh.layout.dims, "all"):
            mine = torch.tensor([2.0**mesh.rank])
            heard[dim] = {
                "ranks": list(mesh.ranks(dim)),
                "sum": mesh.all_reduce(dim, mine.clone()).item(),
                "gathered": mesh.all_gather(dim, mine, axis=0).tolist(),
                "before": mesh.shift(dim, mine, +1).item(),
            }
        say("end", mesh.rank, {"host": socket.gethostname(), "coords": dict(mesh.coords), "heard": heard})


if __name__ == "__main__":
    with telling():
        main()

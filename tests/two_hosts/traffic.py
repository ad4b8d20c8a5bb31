"""Two trainings to which different dims matter, and the cost model's prediction for each order of their dims."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any, Final, NamedTuple

from meshcomm.config import load_config
from meshcomm.layout import Layout
from meshcomm.predict.estimate import workload
from meshcomm.predict.links import Machine, known_machine, span
from meshcomm.predict.place import Share, rank_placements
from meshcomm.predict.times import fastest
from tests.sizes import model_of, train_of

SIZES: Final = {"pp": 2, "dp": 2, "tp": 2}
ORDERS: Final = tuple(permutations(SIZES))
RANKS_PER_NODE: Final = 4
# A rank gets a quarter of the cable's 200 Mbit/s, because all four of a host use it at once. Latencies and the bandwidth
# inside a host are stated values: they differ between machines and decide nothing here.
TOPOLOGY: Final = {
    "ranks_per_node": RANKS_PER_NODE,
    "links": {
        "node": {"latency_us": 200.0, "bandwidth_gbytes_s": 0.25},
        "network": {"latency_us": 500.0, "bandwidth_gbytes_s": 0.025 / RANKS_PER_NODE},
    },
}


class Traffic(NamedTuple):
    """The traffic of a rank in a step, in any order of the dims.

    shares: as `meshcomm tune` counts them, along the dims of `SIZES`.
    candidates: the predicted seconds of the orders that differ in the model, ascending.
    """

    machine: Machine
    shares: tuple[tuple[str, Share], ...]
    candidates: tuple[float, ...]

    def predicted_s(self, order: tuple[str, ...]) -> float:
        """Seconds that a step's communication takes with the dims in this order, outermost first."""
        layout = Layout({dim: SIZES[dim] for dim in order})
        total = 0.0
        for dim, share in self.shares:
            way = span(layout.groups(dim), self.machine).route
            line = fastest(share.flow.operation, way, share.flow.size_bytes)
            total += share.calls * line.seconds(share.flow.size_bytes)
        return total

    def calls(self) -> list[dict[str, Any]]:
        """The calls of a step for a program, as plain data."""
        return [
            {
                "dim": dim,
                "operation": share.flow.operation,
                "calls": share.calls,
                "bytes": round(share.flow.size_bytes),
            }
            for dim, share in self.shares
        ]


def traffic(name: str) -> Traffic:
    """The traffic of the training with this name in `TRAININGS`."""
    settings = load_config({**_training(**TRAININGS[name]), "topology": TOPOLOGY})
    assert settings.parallel is not None
    dims = settings.parallel.parts
    keep = {part: SIZES[dim] for part, dim in dims.items()}
    machine = known_machine(settings.topology, "the test")
    found = rank_placements(workload(settings), 8, settings.topology, keep).placements
    sums = sorted(sum(share.seconds for share in each.shares) for each in found)
    return Traffic(machine, tuple((dims[share.flow.part], share) for share in found[0].shares), tuple(sums))


# First long sequences and a small model, then the opposite.
TRAININGS: Final[Mapping[str, Mapping[str, int]]] = {
    "activations": {"hidden_size": 256, "intermediate_size": 256, "seq_len": 128, "batch": 8},
    "weights": {"hidden_size": 256, "intermediate_size": 1408, "seq_len": 32, "batch": 4},
}


def _training(hidden_size: int, intermediate_size: int, seq_len: int, batch: int) -> dict[str, Any]:
    return {
        "mesh": {"dims": dict(SIZES), "device": "cpu"},
        "parallel": {"data": "dp", "tensor": "tp", "pipeline": "pp", "options": {"schedule": "1f1b"}},
        "model": model_of(4, hidden_size, 4, 4, intermediate_size),
        "data": {"seq_len": seq_len},
        "train": train_of(1, batch, 1, lr=1e-3, out="runs/none"),
    }

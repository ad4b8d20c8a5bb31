"""From a live mesh to all that `meshcomm bench` shows: measured, described, and put as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshcomm.bench.chosen import Item, chosen_dims, items
from meshcomm.bench.machine import machine_facts
from meshcomm.bench.sweep import ROUND_S, sweep
from meshcomm.config import TopologyConfig
from meshcomm.mesh import Mesh
from meshcomm.predict.links import span
from meshcomm.predict.machine import machine
from meshcomm.predict.times import COUNTED, Operation
from meshcomm.show.bench import row_facts
from meshcomm.show.units import size_text


@dataclass(frozen=True)
class Asked:
    """What to measure. dims: none for all. alone, round_s: as `sweep` takes them."""

    operations: Sequence[Operation]
    sizes: Sequence[int]
    dims: Sequence[str]
    rounds: int
    alone: bool = False
    round_s: float = ROUND_S


def measured_facts(mesh: Mesh, asked: Asked, topology: TopologyConfig, progress: bool) -> dict[str, Any]:
    """Measure, and return it as data that JSON can hold: what `bench_view` and `bandwidth_svg` take.

    topology: as `discovered` gives it. progress: whether this rank shows on stderr how far it is, where
    that is a terminal. Called by: every rank of the mesh. Raises UnknownDim and ConfigError, on all alike.
    """
    families, skipped = chosen_dims(mesh.plan, asked.dims)
    wanted = items(families, asked.operations, asked.sizes)
    where = machine(topology)
    described = machine_facts(mesh)
    with _shown(len(wanted), progress) as advance:
        found, lacking = sweep(
            mesh, wanted, asked.rounds, alone=asked.alone, round_s=asked.round_s, advance=advance
        )
    return {
        "machine": described,
        "mesh": {"dims": dict(mesh.dims), "world_size": mesh.world_size},
        "topology": topology.model_dump(mode="json", exclude_none=True),
        "dtype": "float32",
        "counted": {operation: COUNTED[operation] for operation in asked.operations},
        "rounds": asked.rounds,
        "alone": asked.alone,
        "dims": [
            {
                "dim": family.name,
                "size": family.size,
                "groups": family.count,
                "backend": family.options.backend,
                "link": None if where is None else span(mesh.layout.groups(family.name), where).slowest,
            }
            for family in families
        ],
        "rows": [
            row_facts(
                each.item.dim,
                mesh.size(each.item.dim),
                each.item.operation,
                each.item.size_bytes,
                each.calls,
                each.ours_s,
                each.torch_s,
            )
            for each in found
        ],
        "skipped": [each._asdict() for each in (*skipped, *lacking)],
        "fit": None,
    }


@contextmanager
def _shown(total: int, wanted: bool) -> Iterator[Callable[[Item], None]]:
    """A progress bar that draws between items and never during one: a thread of its own would take time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description:<38}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def advance(item: Item) -> None:
            nonlocal begun
            text = f"{item.operation} along {item.dim}, {size_text(item.size_bytes)}"
            bar.update(task, completed=begun, description=text, refresh=True)
            begun += 1

        yield advance

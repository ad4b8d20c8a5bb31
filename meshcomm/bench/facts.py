"""From a live mesh to all that `meshcomm bench` shows: chosen, measured, described, and put as plain data."""

from __future__ import annotations

import os
import platform
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from meshcomm import __version__
from meshcomm.bench.measure import ROUND_S, Item, Skipped, sweep
from meshcomm.config import TopologyConfig
from meshcomm.errors import ConfigError
from meshcomm.layout import Family, Plan
from meshcomm.mesh import Mesh
from meshcomm.predict.links import span
from meshcomm.predict.machine import machine
from meshcomm.predict.times import COUNTED, Operation, counted_bytes
from meshcomm.show.bench import row_facts
from meshcomm.show.units import size_text


def chosen_dims(plan: Plan, asked: Sequence[str]) -> tuple[list[Family], list[Skipped]]:
    """The families to measure, in plan order; those left out.

    asked: names of dims, merged dims or views' dims; all with groups of their own where there is none.
    Raises UnknownDim, and ConfigError where nothing is left to measure.
    """
    for name in asked:
        plan.layout.digits(name)
    found, skipped = [], []
    for family in plan.families:
        if asked and family.name not in asked:
            continue
        if family.size == 1:
            skipped.append(Skipped(family.name, None, "one rank: nothing moves"))
        elif family.shares is not None and not asked:
            skipped.append(Skipped(family.name, None, f"its groups are those of {family.shares}"))
        else:
            found.append(family)
    if not found:
        sizes = ", ".join(f"{family.name} = {family.size}" for family in plan.families)
        raise ConfigError(
            "no dim to measure has two ranks or more",
            given=sizes + "".join(f", --dim {name}" for name in asked),
            expected="a dim along which something moves",
            hint="--set mesh.dims.DIM=2" if not asked else "leave --dim out",
        )
    return found, skipped


def items(families: Sequence[Family], operations: Sequence[Operation], sizes: Sequence[int]) -> list[Item]:
    """Every operation and size along every dim, sizes ascending, each once. Raises ConfigError."""
    found = [
        Item(family.name, operation, counted_bytes(operation, size, family.name, family.size))
        for family in families
        for operation in operations
        for size in sorted(sizes)
    ]
    return list(dict.fromkeys(found))


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
            row_facts(dim, mesh.size(dim), operation, size_bytes, calls, ours_s, torch_s)
            for (dim, operation, size_bytes), calls, ours_s, torch_s in found
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


def machine_facts(mesh: Mesh) -> dict[str, Any]:
    """This rank's host and device, and the number of hosts of the mesh.

    Called by: every rank of the mesh; of the host, what rank 0 says is shown.
    load: the system's load average over a minute, before anything is measured.
    """
    on_cuda = mesh.device.type == "cuda"
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hosts": _hosts(mesh),
        "cpus": os.cpu_count() or 1,
        "load": os.getloadavg()[0],
        "processor": platform.machine(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(mesh.device) if on_cuda else mesh.device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "meshcomm": __version__,
    }
    if on_cuda:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _hosts(mesh: Mesh) -> int:
    """How many host names the ranks have."""
    mine = torch.tensor([zlib.crc32(socket.gethostname().encode())], dtype=torch.int64, device=mesh.device)
    for dim in mesh.dims:
        mine = mesh.all_gather(dim, mine)
    return len(set(mine.tolist()))

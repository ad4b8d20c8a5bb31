"""One step as a picture: who computes, and who waits for whom, on the ranks that were run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshcomm.config.write import write_whole
from meshcomm.dryrun.replay import COMPUTE
from meshcomm.dryrun.world import World
from meshcomm.errors import ConfigError
from meshcomm.show.timeline import Bar, Row, timeline

_US = 1e6


def picture(found: World, width: int = 79) -> list[str]:
    """One row of characters for the first rank that was run of each stage; nothing without times.

    F, B, W: forward, backward and weights' passes; other letters: what the rank stands still for, by dim.
    """
    met = found.replay
    if met is None or not met.bars:
        return []
    rows = []
    for stage, steps in found.stages().items():
        rank = steps[0].rank
        bars = [
            Bar(each.name.split()[0] if each.lane == COMPUTE else f"{each.lane} waits", each.began, each.over)
            for each in met.bars
            if each.rank == rank and each.over > each.began
        ]
        rows.append(Row(rank, f"{stage}:{rank}", bars))
    return timeline(rows, width)


def write_trace(path: Path, found: World) -> None:
    """The step in the JSON format of Chrome's tracing, which Perfetto reads too: a process for each rank, a thread for
    what it computes and for each dim. Raises ConfigError where there are no times, or the file cannot be written.
    """
    met = found.replay
    if met is None or not met.bars:
        raise ConfigError(
            "there is no timeline of this step",
            given=f"--trace {path}, and " + ("calls that differ" if met is None else "no times"),
            expected="ranks whose calls meet, and [topology] with ranks_per_node",
            hint="without --trace the command says what differs"
            if met is None
            else "--set topology.ranks_per_node=8",
        )
    events: list[dict[str, Any]] = []
    for rank in found.steps:
        coords = " ".join(f"{dim}={coord}" for dim, coord in found.layout.coords(rank).items())
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} {coords}"}}
        )
    for bar in met.bars:
        events.append(
            {
                "ph": "X",
                "pid": bar.rank,
                "tid": "waits" if bar.lane != COMPUTE else COMPUTE,
                "name": bar.name if bar.lane == COMPUTE else f"{bar.lane} {bar.name}",
                "ts": bar.began * _US,
                "dur": (bar.over - bar.began) * _US,
                "args": {} if bar.lane == COMPUTE else {"until the others come, us": bar.late * _US},
            }
        )
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), given=f"--trace {path}")

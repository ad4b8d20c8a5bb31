"""config.json and run.json: what a run trains on which mesh, and whether it still runs."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from meshcomm.config import Config
from meshcomm.config.report import plain
from meshcomm.config.section import Table
from meshcomm.errors import TrainingError
from meshcomm.layout import Plan
from meshcomm.train.complete import replace
from meshcomm.train.report import Start, Summary

CONFIG: Final = "config.json"
RUN: Final = "run.json"
_FORMAT: Final = 1


@contextlib.contextmanager
def recorded(folder: Path, config: Config, plan: Plan, start: Start) -> Iterator[list[Summary]]:
    """Write `folder`/config.json and `folder`/run.json now, and run.json again when the block ends.

    config.json is `config` with the sizes of `plan`: `meshcomm.config.load` reads it. run.json has format;
    run, another text at every start; state: "running", "finished" or "stopped"; fingerprint, of the live
    plan, whose backends are known; dims; steps, tokens_per_step, parameters; resumed: the last step that
    was done before, or None; and from the end on ended: steps, tokens, seconds, late, stats and
    stats_steps (as late, traffic and traffic_steps of Summary), and reason: why it stopped, or None.
    Each file holds its old or its new text at any moment. A run that is killed stays "running".

    Yields:    a list; the block adds its Summary before it ends, in whatever way.
    Called by: the rank that writes metrics.jsonl.
    Raises:    TrainingError where a file cannot be written, at the start or after the last step.
    """
    about: dict[str, Any] = {
        "format": _FORMAT,
        "run": uuid.uuid4().hex,
        "state": "running",
        "fingerprint": plan.fingerprint,
        "dims": dict(plan.layout.dims),
        "steps": start.steps,
        "tokens_per_step": start.tokens_per_step,
        "parameters": start.parameters,
        "resumed": None if start.resumed is None else start.resumed.step,
        "ended": None,
    }
    _write(folder / CONFIG, settings_of(config, plan))
    _write(folder / RUN, about)
    ended: list[Summary] = []
    try:
        yield ended
    except BaseException as error:
        # What ended the run is worth more than this line.
        with contextlib.suppress(TrainingError):
            _write(folder / RUN, {**about, "state": "stopped", "ended": _end(ended, _reason(error))})
        raise
    _write(folder / RUN, {**about, "state": "finished", "ended": _end(ended, None)})


def settings_of(config: Config, plan: Plan) -> dict[str, Any]:
    """`config` as `load` reads it from JSON, every -1 filled in; what was left out stays left out."""
    views = Table({name: Table(sizes) for name, sizes in plan.layout.views.items()})
    sizes = {"dims": Table(plan.layout.dims), **({"views": views} if views else {})}
    filled = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})
    found: dict[str, Any] = plain(filled.model_dump(mode="json", exclude_unset=True, exclude_none=True))
    return found


def _end(ended: list[Summary], reason: str | None) -> Mapping[str, Any] | None:
    if not ended:
        return None if reason is None else {"reason": reason}
    last = ended[-1]
    return {
        "steps": last.steps,
        "tokens": last.tokens,
        "seconds": last.seconds,
        "late": {dim: {"rank": rank, "mean_s": mean_s} for dim, (rank, mean_s) in last.late.items()},
        "stats": [] if last.traffic is None else last.traffic.facts()["rows"],
        "stats_steps": last.traffic_steps,
        "reason": reason,
    }


def _reason(error: BaseException) -> str:
    """The first line of what ended the run."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _write(path: Path, content: Mapping[str, Any]) -> None:
    try:
        replace(path, json.dumps(content, indent=2))
    except OSError as error:
        raise TrainingError(
            f"what the run is cannot be written: {(error.strerror or str(error)).lower()}",
            given=str(path),
            expected="a folder that this user may write to, on a disk with space left",
        ) from error

"""`meshcomm bench`: operations of a config's mesh, or of processes along one dim, beside raw torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.bench.measure import Asked, chosen_dims, items, measured_facts
from meshcomm.config import Config, load
from meshcomm.config.write import check_ending, write_whole
from meshcomm.errors import ConfigError
from meshcomm.jobs.starting import start_job, world_of
from meshcomm.layout import Plan
from meshcomm.mesh.environment import find_launch
from meshcomm.mesh.opening import init
from meshcomm.predict.fit import MARK as FIT_MARK
from meshcomm.predict.fit import Time, check_sizes, fit_links, measured_text
from meshcomm.predict.machine import discovered, known_machine
from meshcomm.show.bench import bench_view, fit_facts
from meshcomm.show.page import terminal

SIZES: Final = ("4KiB", "64KiB", "1MiB", "16MiB")
# Without a config, outside a launcher.
_WORLD: Final = 4
_ONE_DIM: Final = {"mesh": {"dims": {"dp": -1}, "device": "cpu", "timeout_s": 300.0}}


class Output(NamedTuple):
    """Where the results go beside the screen. json: print the facts instead of tables."""

    json: bool = False
    fit: Path | None = None


def bench(
    config: Path | None,
    overrides: Sequence[str],
    world: int | None,
    asked: Asked,
    output: Output,
) -> int:
    """Measure the mesh of `config` beside raw torch.distributed; returns the exit code.

    Outside a launcher, starts all ranks here. Without a config: a mesh of one dim on the CPU. All that is asked for is
    checked before any process starts.
    """
    settings = load(config or _ONE_DIM, overrides)
    here = find_launch(os.environ)
    if config is None and here.kind == "single":
        world = _WORLD if world is None and -1 in settings.mesh.dims.values() else world
    size = here.world_size if here.kind != "single" else world_of(settings, world)
    families, _ = chosen_dims(settings.plan(size), asked.dims)
    items(families, asked.operations, asked.sizes)
    if output.fit is not None:
        check_sizes(asked.sizes)
        _check_output(output.fit)
    words = ["bench", *([] if config is None else [str(config)]), "--rounds", str(asked.rounds)]
    for option, values in (("--op", asked.operations), ("--bytes", asked.sizes), ("--dim", asked.dims)):
        words += [word for value in values for word in (option, str(value))]
    words += ["--json"] * output.json
    words += [] if output.fit is None else ["--fit", str(output.fit)]
    return start_job(settings, world, words, overrides, lambda: body(settings, asked, output))


def _check_output(path: Path) -> None:
    """Raise ConfigError unless `path` can become a `[topology]`; a file that somebody else wrote is not replaced."""
    check_ending(path, "--fit", ".toml")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(
            f"{path} cannot be written",
            given=f"--fit {path}",
            expected="a file in a folder that exists and may be written",
        )
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            if FIT_MARK not in file.read(4096):
                raise ConfigError(
                    f"{path} exists, and meshcomm bench did not write it",
                    given=f"--fit {path}",
                    expected="a new file, or one that an earlier meshcomm bench wrote",
                    hint=f"--fit {path.with_stem(path.stem + '_measured')}",
                )


def body(settings: Config, asked: Asked, output: Output) -> None:
    """What each rank does."""
    topology = discovered(settings.topology, os.environ)
    if output.fit is not None:
        known_machine(topology, settings.source)
    with init(_steady(settings)) as mesh:
        if not mesh.is_member:
            return
        first = mesh.rank == int(mesh.layout.ranks.min())
        facts = measured_facts(mesh, asked, topology, first)
        plan = mesh.plan
    if not first:
        return
    failure: ConfigError | None = None
    if output.fit is not None:
        try:
            _fit(settings, plan, facts, output.fit)
        except ConfigError as error:
            # What was measured is shown all the same.
            failure = error
    _print(facts, output)
    if failure is not None:
        raise failure


def _steady(settings: Config) -> Config:
    """Without the comparison of the first calls, which ends by itself; "always" is what every call costs."""
    if settings.mesh.validate_calls == "always":
        return settings
    return settings.model_copy(update={"mesh": settings.mesh.model_copy(update={"validate_calls": 0})})


def _fit(settings: Config, plan: Plan, facts: dict[str, Any], path: Path) -> None:
    """Put latencies and bandwidths into the facts, and write them as a `[topology]`."""
    topology = discovered(settings.topology, os.environ)
    times = [
        Time(row["dim"], row["operation"], row["bytes"], row["meshcomm"]["seconds"]) for row in facts["rows"]
    ]
    fitted = fit_links(times, plan, known_machine(topology, settings.source))
    here = find_launch(os.environ)
    notes = []
    if here.local_size != topology.ranks_per_node:
        notes.append(
            f"ranks_per_node = {topology.ranks_per_node}, as {settings.source} says; "
            f"the launcher has {here.local_size} on this host"
        )
    facts["fit"] = fit_facts(fitted, notes)
    machine, mesh = facts["machine"], facts["mesh"]
    head = (
        f"{machine['date'][:10]}, {' '.join(f'{name}={size}' for name, size in mesh['dims'].items())}, "
        f"{machine['hosts']} host{'s' * (machine['hosts'] > 1)}, {machine['device']}, torch {machine['torch']}"
    )
    resolved = settings.resolved(here.world_size)
    text = measured_text(resolved, topology, fitted.links, head)
    write_whole(path, text, given=f"--fit {path}")


def _print(facts: dict[str, Any], output: Output) -> None:
    if output.json:
        print(json.dumps(facts, indent=2))
        return
    to = terminal(110)
    to.print(bench_view(facts))
    if output.fit is not None and output.fit.exists():
        to.print(f"written: {output.fit}")

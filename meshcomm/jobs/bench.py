"""`meshcomm bench`: operations of a config's mesh, or of processes along one dim, beside raw torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.bench.facts import Asked, chosen_dims, items, measured_facts
from meshcomm.bench.measure import Row
from meshcomm.bench.overhead import many, overhead
from meshcomm.bench.table import rows_table
from meshcomm.config import Config, load
from meshcomm.config.write import write_whole
from meshcomm.errors import ConfigError
from meshcomm.jobs.starting import start_job, world_of
from meshcomm.layout import Plan
from meshcomm.mesh.environment import find_launch
from meshcomm.mesh.opening import init
from meshcomm.predict.fit import MARK as FIT_MARK
from meshcomm.predict.fit import Time, check_sizes, fit_links, measured_text
from meshcomm.predict.machine import discovered, known_machine
from meshcomm.predict.times import named_operations
from meshcomm.show.bench import bench_view, fit_facts
from meshcomm.show.page import terminal
from meshcomm.show.plot import MARK as SVG_MARK
from meshcomm.show.plot import bandwidth_svg
from meshcomm.show.units import read_bytes

SIZES: Final = ("4KiB", "64KiB", "1MiB", "16MiB")
# Without a config, outside a launcher.
_WORLD: Final = 4
_DIM: Final = "dp"
_ONE_DIM: Final = {"mesh": {"dims": {_DIM: -1}, "device": "cpu", "timeout_s": 300.0}}


class Output(NamedTuple):
    """Where the results go beside the screen. json: print the facts instead of tables."""

    json: bool = False
    svg: Path | None = None
    fit: Path | None = None


def bench(
    config: Path | None,
    overrides: Sequence[str],
    world: int | None,
    operations: Sequence[str],
    sizes: Sequence[str],
    dims: Sequence[str],
    rounds: int,
    alone: bool,
    output: Output,
) -> int:
    """Measure the mesh of `config` beside raw torch.distributed; returns the exit code.

    Outside a launcher, starts all ranks here. Without a config: a mesh of one dim on the CPU, and also calls
    before a byte moves, and long lists of small tensors. All that is asked for is checked before any starts.
    """
    asked = Asked(
        named_operations(operations), [read_bytes(text) for text in sizes or SIZES], dims, rounds, alone
    )
    settings = load(config or _ONE_DIM, overrides)
    here = find_launch(os.environ)
    if config is None and here.kind == "single":
        world = _WORLD if world is None and -1 in settings.mesh.dims.values() else world
    size = here.world_size if here.kind != "single" else world_of(settings, world)
    families, _ = chosen_dims(settings.plan(size), dims)
    items(families, asked.operations, asked.sizes)
    if output.svg is not None:
        check_output(output.svg, "--svg", ".svg", SVG_MARK)
    if output.fit is not None:
        check_sizes(asked.sizes)
        check_output(output.fit, "--fit", ".toml", FIT_MARK)
    words = ["bench", *([] if config is None else [str(config)]), "--rounds", str(rounds)]
    for option, values in (("--op", operations), ("--bytes", sizes), ("--dim", dims)):
        words += [word for value in values for word in (option, value)]
    words += ["--alone"] * alone + ["--json"] * output.json
    for option, path in (("--svg", output.svg), ("--fit", output.fit)):
        words += [] if path is None else [option, str(path)]
    return start_job(settings, world, words, overrides, lambda: body(settings, asked, output, config is None))


def check_output(path: Path, option: str, suffix: str, mark: str) -> None:
    """Raise ConfigError unless `path` can become a file of this kind.

    A file that is there is replaced only where `mark`, which all that meshcomm writes begins with, is in
    its first lines: a config or a picture of somebody's own is not lost.
    """
    if path.suffix != suffix:
        raise ConfigError(
            f"{path} does not end in {suffix}",
            given=f"{option} {path}",
            expected=f"a name that ends in {suffix}",
            hint=f"{option} {path.with_suffix(suffix)}" if path.name else None,
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(
            f"{path} cannot be written",
            given=f"{option} {path}",
            expected="a file in a folder that is there and may be written",
        )
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            if mark not in file.read(4096):
                raise ConfigError(
                    f"{path} is there, and is not what meshcomm bench wrote",
                    given=f"{option} {path}",
                    expected="a new file, or one that an earlier meshcomm bench wrote",
                    hint=f"{option} {path.with_stem(path.stem + '_measured')}",
                )


def body(settings: Config, asked: Asked, output: Output, plain: bool) -> None:
    """What each rank does. plain: no config was given, and lists and calls are measured too."""
    topology = discovered(settings.topology, os.environ)
    if output.fit is not None:
        known_machine(topology, settings.source)
    with init(_steady(settings)) as mesh:
        if not mesh.is_member:
            return
        first = mesh.rank == int(mesh.layout.ranks.min())
        facts = measured_facts(mesh, asked, topology, first)
        if plain:
            facts["lists"] = [asdict(row) for row in many(mesh, _DIM, asked.rounds)]
        plan = mesh.plan
    if not first:
        return
    if plain:
        # Now that the other ranks have ended, and no group is left in this process.
        facts["calls"] = [asdict(row) for row in overhead(asked.rounds)]
    failure: ConfigError | None = None
    if output.fit is not None:
        try:
            _fit(settings, plan, facts, output.fit)
        except ConfigError as error:
            # What was measured is shown all the same.
            failure = error
    if output.svg is not None:
        write_whole(output.svg, bandwidth_svg(facts), given=f"--svg {output.svg}")
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
    for key, title in (("calls", "calls, fake backend, one process"), ("lists", "lists of tensors")):
        if key in facts:
            to.print(rows_table(title, [Row(**row) for row in facts[key]]))
    for path in (output.svg, output.fit):
        if path is not None and path.exists():
            to.print(f"written: {path}")

"""`meshcomm bench`: compare operations on a config's mesh, or along a single dim, with raw torch.distributed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.bench.measure import Asked, chosen_dims, items, measured_facts
from meshcomm.config import Config, load_config
from meshcomm.config.write import check_ending, write_whole
from meshcomm.errors import ConfigError
from meshcomm.jobs.starting import start_job, world_of
from meshcomm.layout import Plan
from meshcomm.layout.sizes import coords_text
from meshcomm.mesh.environment import find_launch
from meshcomm.mesh.opening import init
from meshcomm.predict.fit import MARK as FIT_MARK
from meshcomm.predict.fit import Time, check_sizes, fit_links, measured_text
from meshcomm.predict.links import discovered, known_machine
from meshcomm.show.costs import bench_view, fit_facts
from meshcomm.show.page import terminal
from meshcomm.show.units import count

SIZES: Final = ("4KiB", "64KiB", "1MiB", "16MiB")
# The defaults if there is no config and no launcher.
_WORLD: Final = 4
_ONE_DIM: Final = {"mesh": {"dims": {"dp": -1}, "device": "cpu", "timeout_s": 300.0}}


class Output(NamedTuple):
    """json: whether to print JSON instead of tables. fit: the file to which a [topology] is written."""

    json: bool = False
    fit: Path | None = None


def bench(
    config: Path | None, overrides: Sequence[str], world: int | None, asked: Asked, output: Output
) -> int:
    """Compare the mesh of `config`, or a single dim on the CPU, with raw torch.distributed. Return the exit code.

    Outside a launcher, all ranks are started on this host once all arguments have been checked.
    """
    settings = load_config(config or _ONE_DIM, overrides)
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
    return start_job(settings, world, words, overrides, partial(body, settings, asked, output))


def _check_output(path: Path) -> None:
    """Raise ConfigError if a `[topology]` cannot be written to `path`, or if the file there is not from meshcomm bench."""
    check_ending(path, "--fit", ".toml")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(
            f"{path} cannot be written",
            given=f"--fit {path}",
            expected="a file in a folder that exists and is writable",
        )
    if path.exists() and FIT_MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{path} exists, and meshcomm bench did not write it",
            given=f"--fit {path}",
            expected="a new file, or one that an earlier meshcomm bench wrote",
            hint=f"--fit {path.with_stem(path.stem + '_measured')}",
        )


def body(settings: Config, asked: Asked, output: Output) -> None:
    """Run the benchmark on one rank."""
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
    try:
        if output.fit is not None:
            _fit(settings, plan, facts, output.fit)
    finally:
        # Measurements are shown even if no fit is possible.
        if output.json:
            print(json.dumps(facts, indent=2))
        else:
            terminal(110).print(bench_view(facts))
    if output.fit is not None and not output.json:
        print(f"written: {output.fit}")


def _steady(settings: Config) -> Config:
    """Turn off the comparison of initial calls, because it would end mid-measurement. The setting "always" is kept."""
    if settings.mesh.validate_calls == "always":
        return settings
    return settings.model_copy(update={"mesh": settings.mesh.model_copy(update={"validate_calls": 0})})


def _fit(settings: Config, plan: Plan, facts: dict[str, Any], path: Path) -> None:
    """Add the fitted latencies and bandwidths to the facts, and write them as a `[topology]`."""
    topology = discovered(settings.topology, os.environ)
    times = [
        Time(row["dim"], row["operation"], row["bytes"], row["meshcomm"]["seconds"]) for row in facts["rows"]
    ]
    fitted = fit_links(times, plan, known_machine(topology, settings.source))
    here = find_launch(os.environ)
    notes = []
    if here.local_size != topology.ranks_per_node:
        notes.append(
            f"ranks_per_node = {topology.ranks_per_node}, in {settings.source}; "
            f"the launcher has {here.local_size} on this host"
        )
    facts["fit"] = fit_facts(fitted, notes)
    machine = facts["machine"]
    sizes, hosts = coords_text(facts["mesh"]["dims"]), count(machine["hosts"], "host")
    head = f"{machine['date'][:10]}, {sizes}, {hosts}, {machine['device']}, torch {machine['torch']}"
    text = measured_text(settings.resolved(here.world_size), topology, fitted.links, head)
    write_whole(path, text, given=f"--fit {path}")

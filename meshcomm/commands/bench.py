"""`meshcomm bench`: compare operations on a config's mesh, or along a single dim, with raw torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from meshcomm.commands.app import (
    AsJson,
    Operations,
    Overrides,
    announce,
    command,
    discovered_topology,
    show_facts,
    world_of,
)
from meshcomm.errors import ConfigError
from meshcomm.show.page import Cells, Facts, Line, PagePart, View, page_view
from meshcomm.show.units import count, read_bytes, seconds_text, size_text

if TYPE_CHECKING:
    from meshcomm.commands.measure import Asked
    from meshcomm.config import Config, TopologyConfig
    from meshcomm.layout import Plan
    from meshcomm.predict.fit import Fit, Fitted
    from meshcomm.predict.links import Machine

_SIZES: Final = ("4KiB", "64KiB", "1MiB", "16MiB")
# The defaults if there is no config and no launcher.
_WORLD: Final = 4
_ONE_DIM: Final = {"mesh": {"dims": {"dp": -1}, "device": "cpu", "timeout_s": 300.0}}
_NOTE: Final = """\
time and torch (the time of torch.distributed) are medians over the rounds; algbw
and busbw, in GB/s, are computed from the median time, busbw as in nccl-tests;
ratio is the median over the rounds of meshcomm's time divided by torch's, not the
ratio of the two medians; below 1, meshcomm is faster"""


@command()
def bench(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="The configuration of the mesh to measure. If omitted, a mesh with one dim on the CPU.",
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            "--world",
            min=2,
            help="Number of processes; required if a size is -1. Default without CONFIG: 4.",
        ),
    ] = None,
    operation: Operations = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--bytes", help="Size such as 4KiB or 64MB. Repeatable. Default: 4KiB, 64KiB, 1MiB, 16MiB."
        ),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            help="A dim, merged dim or dim of a view. Repeatable. Default: all dims that do not share another dim's groups.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; medians are shown.")] = 9,
    fit: Annotated[
        Path | None,
        typer.Option(
            help="Write a [topology] section to this file, with latencies and bandwidths fitted to the measured times."
        ),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Measure operations along each dim and compare them with plain torch.distributed in the same run.

    Outside a launcher, the command starts one process per rank on this host.

    The exit code is that of the rank that caused the failure: 1 for an error, 2 for incorrect usage, 128 + signal; 130 after
    Ctrl-C.
    """
    from meshcomm.config import load_config
    from meshcomm.predict.fit import check_sizes
    from meshcomm.predict.times import named_operations
    from meshcomm.rendezvous.launcher import find_launch

    sizes = [read_bytes(text) for text in size or _SIZES]
    operations = named_operations(operation or ())
    settings = load_config(config or _ONE_DIM, overrides or ())
    launch = find_launch(os.environ)
    if config is None and launch.kind == "single":
        world = _WORLD if world is None and -1 in settings.mesh.dims.values() else world
    announce("starting", config or "a mesh on this host", settings, world)
    from meshcomm.commands.measure import Asked, chosen_dims, items
    from meshcomm.commands.processes import start_job

    asked = Asked(operations, sizes, dim or (), rounds)
    ranks = launch.world_size if launch.kind != "single" else world_of(settings, world)
    families, _ = chosen_dims(settings.plan(ranks), asked.dims)
    items(families, asked.operations, asked.sizes)
    words = ["bench", *([] if config is None else [str(config)]), "--rounds", str(rounds)]
    for option, values in (("--op", asked.operations), ("--bytes", sizes), ("--dim", asked.dims)):
        words += [word for value in values for word in (option, str(value))]
    words += ["--json"] * json
    if fit is not None:
        check_sizes(sizes)
        _check_output(fit)
        words += ["--fit", str(fit)]
    body = partial(on_a_rank, settings, asked, fit, json)
    raise typer.Exit(start_job(settings, world, words, overrides or (), body))


def _check_output(path: Path) -> None:
    """Raise ConfigError if a `[topology]` cannot be written to `path`, or if the file there is not from meshcomm bench."""
    from meshcomm.config.write import check_ending
    from meshcomm.predict.fit import MARK

    check_ending(path, "--fit", ".toml")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(
            f"{path} cannot be written",
            given=f"--fit {path}",
            expected="a file in a folder that exists and is writable",
        )
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{path} exists, and meshcomm bench did not write it",
            given=f"--fit {path}",
            expected="a new file, or one that an earlier meshcomm bench wrote",
            hint=f"--fit {path.with_stem(path.stem + '_measured')}",
        )


def on_a_rank(settings: Config, asked: Asked, fit: Path | None, json: bool) -> None:
    """Run the benchmark on one rank of the mesh. The first rank shows the times and writes the fit."""
    from meshcomm.commands.measure import measured_facts
    from meshcomm.mesh.opening import init
    from meshcomm.predict.links import known_machine

    topology = discovered_topology(settings)
    machine = None if fit is None else known_machine(topology, settings.source)
    with init(_steady(settings)) as mesh:
        if not mesh.is_member:
            return
        first = mesh.rank == int(mesh.layout.ranks.min())
        facts = measured_facts(mesh, asked, topology, first)
        plan = mesh.plan
    if not first:
        return
    try:
        if fit is not None and machine is not None:
            _fit(settings, plan, facts, topology, machine, fit)
    finally:
        # Measurements are shown even if no fit is possible.
        show_facts(facts, json, view, width=110)
    if fit is not None and not json:
        print(f"written: {fit}")


def _steady(settings: Config) -> Config:
    """Turn off the comparison of initial calls, because it would end mid-measurement. The setting "always" is kept."""
    if settings.mesh.validate_calls == "always":
        return settings
    return settings.model_copy(update={"mesh": settings.mesh.model_copy(update={"validate_calls": 0})})


def _fit(
    settings: Config, plan: Plan, facts: Facts, topology: TopologyConfig, machine: Machine, path: Path
) -> None:
    """Add the fitted latencies and bandwidths to the facts, and write them as a `[topology]`."""
    from meshcomm.config.write import write_whole
    from meshcomm.layout.sizes import coords_text
    from meshcomm.predict.fit import Time, fit_links, measured_text
    from meshcomm.rendezvous.launcher import find_launch

    times = [
        Time(row["dim"], row["operation"], row["bytes"], row["meshcomm"]["seconds"]) for row in facts["rows"]
    ]
    fitted = fit_links(times, plan, machine)
    launch = find_launch(os.environ)
    notes = []
    if launch.local_size != topology.ranks_per_node:
        notes.append(
            f"ranks_per_node = {topology.ranks_per_node}, in {settings.source}; "
            f"the launcher has {launch.local_size} on this host"
        )
    facts["fit"] = fit_facts(fitted, notes)
    host = facts["machine"]
    sizes, hosts = coords_text(facts["mesh"]["dims"]), count(host["hosts"], "host")
    head = f"{host['date'][:10]}, {sizes}, {hosts}, {host['device']}, torch {host['torch']}"
    text = measured_text(settings.resolved(launch.world_size), topology, fitted.links, head)
    write_whole(path, text, given=f"--fit {path}")


def fit_facts(fitted: Fitted, notes: Sequence[str] = ()) -> Facts:
    """Return the fitted latency, the bandwidth and the model's error by dim and by link class, with notes to display."""
    left_out = [dict(zip(("dim", "operation", "why"), row, strict=True)) for row in fitted.left_out]
    return {
        "dims": {name: _fit_facts(fit) for name, fit in fitted.dims.items()},
        "links": {name: _fit_facts(fit) for name, fit in fitted.links.items()},
        "left_out": left_out,
        "notes": list(notes),
    }


def _fit_facts(fit: Fit) -> Facts:
    return {
        "dims": list(fit.dims),
        "latency_us": fit.latency_s * 1e6,
        "bandwidth_gbytes_s": fit.bytes_s / 1e9,
        "times": fit.times,
        "median_error": fit.error,
        "worst_error": fit.worst,
        "notes": list(fit.notes),
    }


def view(facts: Facts) -> View:
    """Return the result of `measured_facts` for a rich console. `facts["fit"]` is the result of `fit_facts`, or None."""
    from meshcomm.layout.sizes import coords_text

    machine, mesh = facts["machine"], facts["mesh"]
    head = (
        f"mesh {coords_text(mesh['dims'])}: {mesh['world_size']} ranks on {count(machine['hosts'], 'host')}, "
        f"{machine['device']}, torch {machine['torch']}\n"
        f"{machine['cpus']} cores on rank 0's host, load {machine['load']:.1f} before it began\n"
        f"medians of {facts['rounds']} rounds, each round's slowest rank; all groups along a dim in parallel"
    )
    dims = {
        facts_of_dim["dim"]: {**facts_of_dim, "over": facts_of_dim["link"] or facts_of_dim["backend"]}
        for facts_of_dim in facts["dims"]
    }
    table = Cells.of(
        [dims[row["dim"]] | row for row in facts["rows"]],
        {
            "dim": "{dim} {size:,} {over}",
            "operation": "operation",
            ">bytes": ("bytes", size_text),
            ">time": ("meshcomm.seconds", seconds_text),
            ">algbw": "{meshcomm[algbw_gbytes_s]:.3g}",
            ">busbw": "{meshcomm[busbw_gbytes_s]:.3g}",
            ">torch": ("torch.seconds", seconds_text),
            ">ratio": "{ratio:.2f}",
        },
        once=2,
    )
    skipped = (f"skipped: {e['operation'] or 'all'} along {e['dim']}: {e['why']}" for e in facts["skipped"])
    parts: list[PagePart] = [Line(head), table, Line("\n".join([_NOTE, *skipped]))]
    return page_view(parts if facts["fit"] is None else [*parts, *_fits(facts["fit"])])


def _fits(fit: Facts) -> list[PagePart]:
    rows = [{"link": "-", "name": name, **row} for name, row in fit["dims"].items()]
    rows += [{"link": f"links.{name}", "name": name, **row} for name, row in fit["links"].items()]
    dims_of_reason: dict[str, list[str]] = {}
    for skipped in fit["left_out"]:
        dims_of_reason.setdefault(f"not in the fit: {skipped['operation']}, {skipped['why']}", []).append(
            skipped["dim"]
        )
    notes = [f"{row['name']}: {note}" for row in rows for note in row["notes"]]
    notes += ["off by: the median of |model / measured - 1|", *fit["notes"]]
    notes += [f"{text}: {', '.join(dims)}" for text, dims in dims_of_reason.items()]
    table = Cells.of(
        rows,
        {
            "link": "link",
            "from the dims": ("dims", " ".join),
            ">latency": lambda row: seconds_text(row["latency_us"] / 1e6),
            ">GB/s": "{bandwidth_gbytes_s:.3g}",
            ">times": "{times}",
            ">off by": "{median_error:.0%}",
            ">at most": "{worst_error:.0%}",
        },
    )
    return [table, Line("\n".join(notes))]

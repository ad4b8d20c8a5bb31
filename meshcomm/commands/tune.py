"""`meshcomm tune`: rank the meshes that can train a config by their predicted step time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshcomm.commands.app import AsJson, ConfigFile, Overrides, command, discovered_topology, show_facts
from meshcomm.show.page import Cells, Column, Facts, Line, View, page_view
from meshcomm.show.units import assumed_text, bytes_text, count, seconds_text

if TYPE_CHECKING:
    from meshcomm.config import Config, TopologyConfig
    from meshcomm.predict.place import Placement, Ranking, Share


@command()
def tune(
    config: ConfigFile,
    world: Annotated[
        int,
        typer.Option(
            "--world-size", "--world", min=1, help="Number of processes to distribute the training over."
        ),
    ],
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="DIM", help="Keep this dim at its size in CONFIG. Repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of meshes to show.")] = 10,
    write: Annotated[
        Path | None, typer.Option(help="Write the first mesh in the table to this config file.")
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Dry-run the first --top meshes, with one rank of each stage, and rank them by the results.",
        ),
    ] = False,
    margin: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.99,
            help="Share of a rank's memory to leave free, for what the estimate does not count.",
        ),
    ] = 0.1,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Rank all dim sizes and orders that can train CONFIG by their predicted step time.

    CONFIG may be a model's config.json.
    """
    from meshcomm.config import load_config
    from meshcomm.config.of_model import is_of_model, placed_on
    from meshcomm.predict.place import place_config, write_placement

    settings = load_config(placed_on(config, world) if is_of_model(config) else config, overrides or ())
    topology = discovered_topology(settings)
    counts = None
    if settings.model is not None and settings.model.pretrained is not None:
        from meshcomm.models.hf import counts_of

        counts = counts_of(settings.model.pretrained)
    ranking = place_config(settings, world, topology, keep or (), top, counts, margin)
    facts = facts_of(ranking, settings)
    if exact:
        order, ran = dry_runs(ranking, settings, topology)
        ranking = ranking._replace(placements=tuple(ranking.placements[i] for i in order))
        facts["placements"] = [{**facts["placements"][i], "exact": ran[i]} for i in order]
    show_facts(facts, json, view)
    if write is not None:
        write_placement(settings, ranking, write)
        typer.echo(f"written: {write}", err=json)


def dry_runs(ranking: Ranking, settings: Config, topology: TopologyConfig) -> tuple[list[int], list[Facts]]:
    """Dry-run each placement of a ranking, with one rank of each stage.

    Return the placements' order and the results. The fastest is first; placements that exceed the memory are last. A result has the
    seconds of a step, the largest memory of a rank, of its tensors and as torch's allocator reserves it, and whether that fits.
    """
    from meshcomm.config import load_config
    from meshcomm.dryrun.rank import pretended_step
    from meshcomm.dryrun.training import priced
    from meshcomm.dryrun.world import dry_world
    from meshcomm.predict.place import placed_data

    ran: list[Facts] = []
    for placement in ranking.placements:
        placed = load_config(placed_data(settings, placement)).resolved(ranking.world)
        assert placed.parallel is not None
        layout, pipeline = placed.plan(ranking.world).layout, placed.parallel.pipeline
        first = layout.rank_of(0)
        stages = [first] if pipeline is None else sorted(map(int, layout.group_of(first, pipeline)))
        world = dry_world(
            partial(pretended_step, placed), layout, pipeline, stages, replayed=priced(topology)
        )
        assert world.replay is not None
        peak = max(step.peak.nbytes for step in world.steps.values())
        reserved = max(step.reserved for step in world.steps.values())
        fits = reserved <= ranking.limit_bytes
        ran.append(
            {"step_s": world.replay.seconds, "peak_bytes": peak, "reserved_bytes": reserved, "fits": fits}
        )
    # sorted is stable, so equal placements keep their predicted order.
    return sorted(range(len(ran)), key=lambda i: (not ran[i]["fits"], ran[i]["step_s"])), ran


def facts_of(ranking: Ranking, settings: Config) -> Facts:
    """Return a ranking for the training in `settings` as JSON-serializable data, with the dims' names in place of parts."""
    from meshcomm.predict.estimate import EXPERT_SHARD, REPLICA

    assert settings.parallel is not None
    names = settings.parallel.parts
    along = {str(part): name for part, name in names.items()}
    along |= {REPLICA: "experts' copies", EXPERT_SHARD: "experts' shards"}

    def placement_facts(placement: Placement) -> Facts:
        facts = placement._asdict()
        del facts["shares"]
        return facts | {
            "dims": {names[part]: size for part, size in placement.dims.items()},
            "expert": {names["expert"]: placement.expert} if "expert" in names else None,
            "memory_bytes": dict(placement.memory_bytes),
            "calls": [_call(share, along) for share in placement.shares],
        }

    return {
        "world_size": ranking.world,
        "meshes": ranking.meshes,
        "sizes": ranking.sizes,
        "too_large": ranking.too_large,
        "links": [str(level) for level in ranking.machine.levels],
        "tflops": ranking.tflops,
        "memory_gbytes": ranking.memory_gb,
        "margin": ranking.margin,
        "assumed": list(ranking.assumed),
        "device": settings.mesh.device,
        "placements": [placement_facts(placement) for placement in ranking.placements],
    }


def _call(share: Share, along: Mapping[str, str]) -> Facts:
    return {
        "part": share.flow.part,
        "dim": " ".join(along[part] for part in share.flow.along),
        "ranks": share.ranks,
        "link": share.link,
        "operation": share.flow.operation,
        "what": share.flow.what,
        "calls": share.calls,
        "bytes": share.flow.size_bytes,
        "seconds": share.seconds,
        "algorithm": share.algorithm,
    }


def view(facts: Facts) -> View:
    """Return the ranking for a rich console, then a breakdown of the first mesh's step time."""
    too_large = f" ({facts['too_large']:,} of them too large for memory)" if facts["too_large"] else ""
    head = (
        f"{facts['meshes']:,} meshes of {facts['world_size']:,} ranks ranked: "
        f"{count(facts['sizes'], 'legal factorization')}{too_large} in all orders of their dims\n"
        f"links: {'; '.join(facts['links'])}\n"
        f"a rank: {facts['tflops']:g} TFLOP/s{assumed_text(facts, 'tflops')}, "
        f"{facts['memory_gbytes']:g} GB{assumed_text(facts, 'memory_gbytes')}, of which {facts['margin']:.0%} stay free (--margin)\n"
        "times are predicted; calls that shard weights or reduce gradients overlap with compute, others do not; "
        "by: the algorithm that the model finds fastest"
    )
    columns: dict[str, Column] = {
        ">": "number",
        "dims, outermost first": lambda row: (
            _dims(row) + (f" (+{count(row['also'], 'order')})" if row["also"] else "")
        ),
        ">step": ("step_s", seconds_text),
        ">compute": ("compute_s", seconds_text),
        ">bubble": ("bubble_s", seconds_text),
        ">calls": lambda row: seconds_text(sum(call["seconds"] for call in row["calls"])),
        ">GB": lambda row: f"{sum(row['memory_bytes'].values()) / 1e9:.3g}",
    }
    notes = []
    if any(row["also"] for row in facts["placements"]):
        notes.append("+N orders: N other orders of the same sizes take the same time")
    if "exact" in facts["placements"][0]:
        notes.append(
            "dry run, its GB: step time and reserved memory by a dry run; !: more than the margin leaves"
        )
        columns[">dry run"] = ("exact.step_s", seconds_text)
        columns[">its GB"] = ("exact", _peak)
    columns["slow links, most time first"] = ("calls", _crossing)
    ranking = Cells.of([{"number": n, **each} for n, each in enumerate(facts["placements"], 1)], columns)
    return page_view([Line(head), ranking, *map(Line, notes), *_reasons(facts["placements"][0])])


def _peak(exact: Facts) -> str:
    return f"{exact['reserved_bytes'] / 1e9:.3g}" + "!" * (not exact["fits"])


def _crossing(calls: list[Facts]) -> str:
    """Return the dims whose calls leave the node, each with the seconds that those calls take, longest first."""
    by_dim: dict[str, float] = {}
    for call in calls:
        if call["link"] != "node":
            by_dim[call["dim"]] = by_dim.get(call["dim"], 0.0) + call["seconds"]
    ranked = sorted(by_dim.items(), key=lambda item: -item[1])
    return ", ".join(f"{dim} {seconds_text(time)}" for dim, time in ranked) or "none"


def _reasons(placement: Facts) -> list[Line | Cells]:
    number = placement["microbatches"]
    calls = Cells.of(
        placement["calls"],
        {
            "dim": "{dim} {ranks:,} {link}",
            "operation": "operation",
            "what": "what",
            ">calls": "calls",
            ">bytes": ("bytes", bytes_text),
            ">exposed": ("seconds", seconds_text),
            "by": "algorithm",
        },
        once=1,
    )
    sizes = placement["memory_bytes"]
    held = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items())
    return [
        Line(f"why: {_dims(placement)}"),
        Line(
            f"compute {seconds_text(placement['compute_s'])} in {number:,} micro-batch{'es' * (number > 1)}, "
            f"bubble {seconds_text(placement['bubble_s'])} waiting for other stages"
        ),
        *([calls] if calls.rows else []),
        Line(f"memory {bytes_text(sum(sizes.values()))} a rank: {held}"),
    ]


def _dims(placement: Facts) -> str:
    from meshcomm.layout.sizes import coords_text

    text = coords_text(placement["dims"])
    if placement["expert"] is None:
        return text
    ((name, size),) = placement["expert"].items()
    return f"{text} {name}={size}"

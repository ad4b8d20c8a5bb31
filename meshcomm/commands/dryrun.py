"""`meshcomm dryrun`: run a config's training, or a script, on some ranks of a world that is not available."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from meshcomm.commands.app import AsJson, Overrides, World, announce, command, show_facts, world_of
from meshcomm.commands.scripts import First, ScriptCommand, named
from meshcomm.errors import LaunchError
from meshcomm.show.page import Cells, Column, Facts, Line, PagePart, View, page_view
from meshcomm.show.units import assumed_text, bytes_text, count, decimal_unit, seconds_text

if TYPE_CHECKING:
    from meshcomm.config import Config
    from meshcomm.dryrun.script import Script

# How many findings are shown with their lines. Any others are only counted.
_SHOWN: Final = 12


@command(ScriptCommand)
def dryrun(
    context: typer.Context,
    first: First = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="A Python file to run instead of training as CONFIG describes. All arguments after SCRIPT are passed "
            "to the script.",
        ),
    ] = None,
    world: World = None,
    rank: Annotated[list[int] | None, typer.Option(help="Also run this rank. Repeatable.")] = None,
    sample: Annotated[
        int,
        typer.Option(min=0, help="Number of random ranks to run in addition to the representative ranks."),
    ] = 8,
    steps: Annotated[
        int,
        typer.Option(min=1, help="Stop SCRIPT after this many calls to mesh.step() or Trainer steps."),
    ] = 2,
    dims: Annotated[
        str | None,
        typer.Option(
            help="The sizes of pp, dp, fsdp, cp, tp and ep, if CONFIG is a model's config.json.",
            metavar="NAME=SIZE,...",
        ),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Dry-run a training job or a script for a world that is not available. Check calls, memory and step time.

    The real program runs on tensors without values, as one rank of each kind: first, middle and last along each
    dim, every stage, every corner, and a random sample. The exit code is 1 if calls do not match, or if memory
    exceeds topology.memory_gbytes.
    """
    from meshcomm.config import load_config
    from meshcomm.config.of_model import is_of_model, training_of

    if first is None:
        raise LaunchError(
            "neither CONFIG nor SCRIPT was given",
            given="no argument",
            expected="a TOML, JSON or YAML file, or a Python file",
            hint="meshcomm dryrun [CONFIG] [SCRIPT] [ARGUMENTS]",
        )
    of_model = is_of_model(first)
    if (dims is not None) != of_model:
        raise LaunchError(
            "a model's config.json contains no dim sizes"
            if of_model
            else "--dims requires a model's config.json",
            given=f"{first}{'' if dims is None else f', --dims {dims}'}",
            expected="a model's config.json and --dims, or a configuration without --dims",
            hint=f"meshcomm dryrun {first} --dims pp=16,fsdp=64,tp=8"
            if of_model
            else "--set mesh.dims={dp=8,tp=2}",
        )
    config: Path | dict[str, Any] | None = first
    of_script: Path | None = None
    path = None
    if of_model:
        config = training_of(first, dims or "")
    elif first.suffix == ".py" or second is not None:
        of_script, path, arguments = named("dryrun", first, second, context.args, overrides, world)
        config = of_script
    settings = None if config is None else load_config(config, overrides or ())
    announce("dry run of", path or first, settings, world)
    script = None
    if path is not None:
        from meshcomm.dryrun.script import Script

        script = Script(path, tuple(arguments), of_script, tuple(overrides or ()), steps)
    facts = dry_run(settings, world_of(settings, world), script, rank or (), sample)
    show_facts(facts, json, view)
    raise typer.Exit(1 if facts["findings"] or facts["memory"]["fits"] is False else 0)


def dry_run(
    settings: Config | None,
    world: int,
    script: Script | None = None,
    ranks: Sequence[int] = (),
    sample: int = 8,
) -> Facts:
    """Run `script`, or the training in `settings`, on representative ranks of `world`. Return the results as plain data.

    ranks, sample: additional ranks to run, see `chosen`.
    Raises ConfigError, LaunchError, RankFailed; LayoutError for a rank that does not exist.
    """
    from meshcomm.config.parallel import USUAL_NAMES
    from meshcomm.dryrun.script import mesh_of_script, script_step
    from meshcomm.dryrun.training import dry_facts, dry_training, priced
    from meshcomm.dryrun.world import chosen, dry_world
    from meshcomm.predict.links import discovered

    began = perf_counter()
    if script is None:
        assert settings is not None
        return dry_training(settings, world, ranks, sample)
    layout, settings_of_script, objects = mesh_of_script(script, world)
    parallel = getattr(settings_of_script, "parallel", None)
    topology = discovered((settings or settings_of_script).topology, os.environ)
    stages = None if parallel is None else parallel.pipeline
    # Without a configuration, look for a dim with a common name.
    pipeline = stages or next((dim for dim in layout.dims if USUAL_NAMES.get(dim) == "pipeline"), None)
    first = chosen(layout, pipeline, also=ranks, sample=sample)
    program = partial(script_step, script._replace(objects=objects))
    dry = dry_world(program, layout, pipeline, first, replayed=priced(topology))
    return dry_facts(dry, None, topology, perf_counter() - began)


def view(facts: Facts) -> View:
    """Return a dry run's facts for a rich console."""
    return page_view([*_page(facts)])


def _page(facts: Facts) -> Iterator[PagePart]:
    from meshcomm.layout.sizes import fold, times

    ran, world = facts["ran"], facts["world_size"]
    whole = len(ran) == world
    of = "each" if whole else f"{len(ran)} of them, {fold(ran)}"
    head = f"{world:,} ranks, {times(facts['dims'])}: {facts['part']} of {of}"
    yield Line(f"{head}; {seconds_text(facts['took_s'])}")
    yield from _verdicts(facts, whole)
    yield from _memory(facts["memory"])
    if facts["calls"]:
        yield Line(f"calls of {facts['part']}, for the rank that moves the most along each dim")
        yield _calls(facts["calls"], timed=facts["step"] is not None)
    yield from _step(facts["step"], facts["part"], bool(facts["findings"]))


def _verdicts(facts: Facts, whole: bool) -> Iterator[PagePart]:
    findings = facts["findings"]
    if findings:
        yield Line(f"{count(len(findings), 'thing')} that would go wrong")
        for finding in findings[:_SHOWN]:
            more = f" (in {finding['groups']} of the examined groups)" if finding["groups"] > 1 else ""
            lines = "".join(f"\n    {line}" for line in finding["lines"])
            yield Line(f"{finding['what']}{more}{lines}", drawing=True)
        if len(findings) > _SHOWN:
            yield Line(f"and {len(findings) - _SHOWN} more: --json lists all of them")
    else:
        met = "all calls match: same operation, shape, dtype and root on all ranks of each group, no rank waits forever"
        yield Line(
            met + ("" if whole else "; ranks that were not run are assumed to make the calls of their stage")
        )
    if facts["unseen"]:
        yield Line(f"not compared: {count(facts['unseen'], 'call')} on groups outside the mesh")
    if unread := facts.get("unread"):
        files = ", ".join(f"{count(number, 'file')} of {key}" for key, number in unread.items())
        yield Line(f"content not read: {files}")
    for text in facts["unlike"][:_SHOWN]:
        yield Line(f"calls differ: {text}")


def _memory(memory: Facts) -> Iterator[PagePart]:
    stages = memory["stages"]
    top = next(stage for stage in stages if stage["stage"] == memory["largest_stage"])
    names = [name for name in top["parts"] if any(stage["parts"][name] for stage in stages)]
    # Consecutive stages with equal memory share one row.
    rows: list[Facts] = []
    for _, (first, *others) in groupby(stages, itemgetter("parts")):
        last = f"-{others[-1]['stage']}" if others else ""
        rows.append({**first, "stages": f"{first['stage']}{last}"})
    # All cells use the same unit, so that no column is wider than its name.
    unit, size = decimal_unit(top["peak_bytes"])
    columns: dict[str, Column] = {">stage": "stages"} if len(stages) > 1 else {}
    columns |= {">rank": "rank", ">peak": ("peak_bytes", partial(_in_unit, size))}
    columns |= {f">{name}": (f"parts.{name}", partial(_in_unit, size)) for name in names}
    most = "the rank that uses the most" + ("" if len(stages) == 1 else " in each stage")
    yield Line(f"peak memory in {unit}, of {most}")
    yield Cells.of(rows, columns)
    when = f"{top['during']} in {top['operator']}" + (f" at {top['at']}" if top["at"] else "")
    sentence = (
        f"torch's allocator reserves {bytes_text(top['reserved_bytes'])}, of which tensors take "
        f"{bytes_text(top['peak_bytes'])}, {'' if when.startswith('between') else 'during '}{when}; "
        f"mostly {memory['most']}; to reduce: {memory['less_by']}"
    )
    if memory["communicators_bytes"]:
        sentence += f"; NCCL's communicators take about {bytes_text(memory['communicators_bytes'])} more"
    if memory["limit_bytes"] is not None:
        fits = "fits in" if memory["fits"] else "does NOT fit in"
        sentence = f"it {fits} {bytes_text(memory['limit_bytes'])}; {sentence}"
    yield Line(sentence)


def _in_unit(size: float, number: float) -> str:
    return f"{round(number / size, 2):.3g}"


def _calls(calls: list[Facts], timed: bool) -> Cells:
    rows = [{**dim, "first": call is dim["calls"][0], **call} for dim in calls for call in dim["calls"]]
    columns: dict[str, Column] = {
        "dim": lambda row: f"{row['dim']} {row['link'] or ''}".rstrip(),
        "call": "call",
        ">calls": "calls",
        ">bytes": ("bytes", bytes_text),
    }
    if timed:
        columns |= {
            ">exposed": partial(_seconds, "exposed_s"),
            ">until others arrive": partial(_seconds, "late_s"),
        }
    return Cells.of(rows, columns, once=1)


def _seconds(key: str, row: Facts) -> str:
    """Return the dim's seconds in its first row, and an empty string in its other rows."""
    return "" if not row["first"] else "-" if row[key] is None else seconds_text(row[key])


def _step(step: Facts | None, part: str, differ: bool) -> Iterator[PagePart]:
    if step is None:
        missing = "calls that match" if differ else "[topology] with ranks_per_node"
        yield Line(f"no times: they need {missing}")
        return
    yield Line(f"time of {part}, predicted")
    exposed, late = sum(step["exposed_s"].values()), sum(step["late_s"].values())
    until = f", {seconds_text(late)} until others arrive" if step["late_s"] else ""
    parts = [
        f"{seconds_text(step['seconds'])}, on rank {step['rank']:,}: {seconds_text(step['compute_s'])} of compute, "
        f"{seconds_text(exposed)} of exposed transfers{until}",
    ]
    rate = [] if step["tokens_s"] is None else [f"{step['tokens_s']:,.0f} tokens/s"]
    if step["tflops"] is not None:
        rate.append(f"{step['tflops']:.3g} TFLOP/s a rank")
    if step["share_of_peak"] is not None:
        rate.append(
            f"{step['share_of_peak']:.1%} of the peak"
            + (", including recomputation" * step["computed_again"])
        )
    parts.append(", ".join(rate))
    speed = f"{step['assumed_tflops']:g} TFLOP/s{assumed_text(step, 'tflops')}"
    if step["memory_gbytes_s"] is not None:
        speed += f"; memory at {step['memory_gbytes_s']:g} GB/s"
    parts.append(f"assumed: compute at {speed}; links {'; '.join(step['links'])}")
    yield Line("\n".join(parts))

"""`meshcomm bench --train`: steps of a config's mesh beside the limit of the machine and torch's own ways."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from meshcomm.bench.breakdown import expected_exposure, parts_of_a_step
from meshcomm.bench.facts import machine_facts
from meshcomm.bench.training import MICROBATCH, MICROBATCHES, YARDSTICK, measured, ways
from meshcomm.config import Config, load
from meshcomm.config.write import write_whole
from meshcomm.errors import ConfigError
from meshcomm.jobs.bench import check_output
from meshcomm.jobs.starting import start_job, world_of
from meshcomm.mesh.environment import find_launch
from meshcomm.mesh.opening import init
from meshcomm.show.bench_training import training_svg, training_view
from meshcomm.show.page import terminal
from meshcomm.show.plot import MARK

# Without a config.
_WORLD: Final = 4
_ALONE: Final = {
    "mesh": {"dims": {"dp": -1}, "device": "cpu", "timeout_s": 300.0},
    "parallel": {"data": "dp"},
}


def bench_training(
    config: Path | None,
    overrides: Sequence[str],
    world: int | None,
    rounds: int,
    steps: int,
    as_json: bool,
    svg: Path | None,
    unused: Sequence[str] = (),
) -> int:
    """Measure training on the mesh of `config`, or of dp alone; returns the exit code.

    unused: other options that were given. Raises ConfigError for those, before any process starts.
    """
    if unused:
        raise ConfigError(
            f"{', '.join(unused)} has no effect on training",
            given=f"--train and {', '.join(unused)}",
            expected="--train with CONFIG, --world, --rounds, --steps, --svg, --json and --set",
            hint="meshcomm bench --train CONFIG",
        )
    settings = load(config or _ALONE, overrides)
    here = find_launch(os.environ)
    if config is None and here.kind == "single" and -1 in settings.mesh.dims.values():
        world = world or _WORLD
    size = here.world_size if here.kind != "single" else world_of(settings, world)
    settings = trained(settings, size)
    if svg is not None:
        check_output(svg, "--svg", ".svg", MARK)
    words = ["bench", *([] if config is None else [str(config)]), "--train"]
    words += ["--rounds", str(rounds), "--steps", str(steps), *["--json"] * as_json]
    words += [] if svg is None else ["--svg", str(svg)]
    return start_job(
        settings,
        world if here.kind != "single" else size,
        words,
        overrides,
        lambda: _body(settings, rounds, steps, as_json, svg),
    )


def trained(settings: Config, world: int) -> Config:
    """`settings` with the yardstick's model where they have none. Raises ConfigError for a mesh that plays no part."""
    part = settings.parallel
    if part is None:
        raise ConfigError(
            f"{settings.source} does not say which dim plays which part",
            given="no [parallel]",
            expected="the parts of its dims in training",
            hint=f'--set parallel.data="{next(iter(settings.mesh.dims))}"',
        )
    if settings.mesh.ranks is not None:
        raise ConfigError(
            "training is measured on all ranks of the job",
            given=f"mesh.ranks = {list(settings.mesh.ranks)}",
            expected="a mesh of all of them",
            hint="--set mesh.ranks=   (nothing behind = removes it)",
        )
    if settings.model is None and settings.train is None:
        share = part.copies(settings.mesh.sizes(world))
        batch = share * MICROBATCH * MICROBATCHES
        train = f"train={{ steps = 1, global_batch = {batch}, microbatch = {MICROBATCH} }}"
        settings = load(settings, [*YARDSTICK, train])
    if settings.model is None:
        raise ConfigError(
            f"{settings.source} says how to train, but not what",
            given="[train] without [model]",
            expected="both, or neither: then the yardstick's model is trained",
            hint="--set train=   (nothing behind = removes it)",
        )
    quiet = settings.mesh.model_copy(update={"validate_calls": 0})
    return settings.model_copy(update={"mesh": quiet})


def _body(settings: Config, rounds: int, steps: int, as_json: bool, svg: Path | None) -> None:
    with init(settings) as mesh:
        if mesh.device.type == "cpu":
            torch.set_num_threads(1)
        facts: dict[str, Any] = {"machine": machine_facts(mesh), "mesh": dict(mesh.dims)}
        found, without, engine = ways(mesh, settings)
        facts |= measured(mesh, found, rounds, steps)
        facts["without"] = [each._asdict() for each in without]
        facts["model"] = _described(settings)
        if mesh.device.type == "cpu":
            parts = parts_of_a_step(mesh, found[0].step, engine, max(steps, 2))
            facts["step"], facts["lanes"], facts["late"] = parts.seconds, parts.lanes, parts.late
            facts["predicted"] = parts.predicted | expected_exposure(mesh, settings)
        first = mesh.rank == int(mesh.layout.ranks.min())
    if not first:
        return
    if svg is not None:
        write_whole(svg, training_svg(facts), given=f"--svg {svg}")
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    terminal(110).print(training_view(facts))
    if svg is not None:
        terminal(110).print(f"written: {svg}")


def _described(settings: Config) -> str:
    model, data, train = settings.model, settings.data, settings.train
    assert model is not None and data is not None and train is not None
    what = model.pretrained or model.build
    if what is None:
        what = f"{model.layers} layers, width {model.width}, {model.heads} heads, feed-forward {model.ff}"
    each = f"sequence {data.sequence}, microbatch {train.microbatch}, global batch {train.global_batch}"
    return f"{what}, {each}, {train.compute_dtype or train.dtype}"

"""`meshcomm train`: train the model of a config on every rank.

Problems with the config are reported before torch is imported, because the import takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from meshcomm.commands.app import (
    ConfigFile,
    JsonAtEnd,
    Overrides,
    Replace,
    World,
    announce,
    command,
    replacing,
    show_facts,
)
from meshcomm.errors import ConfigError
from meshcomm.show.page import Facts, Line

if TYPE_CHECKING:
    from meshcomm.config import Config

# How long ranks may take to finish a step and save a checkpoint after they are asked to end.
_SAVING_S: Final = 30.0


@command()
def train(
    config: ConfigFile,
    world: World = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Maximum number of times to restart all ranks after one fails; see checkpoint_every."
        ),
    ] = 0,
    replace: Replace = None,
    json: JsonAtEnd = False,
    overrides: Overrides = None,
) -> None:
    """Train the config's model: built-in, a transformers folder, or your own. Outside a launcher, start one process per rank on this host.

    The exit code is that of the rank that caused the failure: 1 for an error, 2 for incorrect usage, 128 + signal; 130 after
    Ctrl-C. A job that has not finished says what it leaves, and how to continue.

    With --json, the result has what `meshcomm run --json` has, and folder (train.out), step (the last one that is known), loss,
    checkpoint (the last complete one, or null), resume (a command, or null), and run: the content of run.json, or null.
    """
    from meshcomm.config import load_config

    overrides = replacing(overrides, replace)
    settings = load_config(config, overrides)
    if settings.train is None or settings.model is None:
        raise ConfigError(
            f"{config} has no settings for {'training' if settings.train is None else 'a model'}",
            given="no [model]"
            if settings.train
            else "a mesh without [parallel], [model], [data] and [train]",
            expected="all four sections, or meshcomm run with a script that creates a meshcomm.train.Trainer",
            hint="meshcomm new writes a config with all of them",
        )
    if world is not None:
        settings.resolved(world)
    announce("starting", config, settings, world)
    from meshcomm.view.run import run_news

    out = Path(settings.train.out)
    before = run_news(out)["id"]
    with _loading():
        from meshcomm.commands.processes import start_job
    words, body = ["train", str(config)], partial(_on_a_rank, settings)
    result: Facts | None = {} if json else None
    code = start_job(settings, world, words, overrides, body, max_restarts, _SAVING_S, result=result)
    facts = left(out, before, [*words, *([] if world is None else ["--world-size", str(world)])], overrides)
    if result is not None:
        show_facts(result | facts, True, view)
    elif code and facts["run"] is not None:
        from meshcomm.show.page import terminal

        terminal(10_000, stderr=True).print(view(facts), crop=False)
    raise typer.Exit(code)


def left(out: Path, before: str, words: Sequence[str], overrides: Sequence[str]) -> Facts:
    """Return what a job has left in train.out, and how to continue.

    before: the id of the run that was in the folder before, as in `run_news`. Nothing is reported of that run. words, overrides:
        the command's.
    """
    from shlex import join

    from meshcomm.train.checkpoint.folder import FOLDER, complete
    from meshcomm.view.run import run_news

    news = run_news(out, most_bytes=-1)
    facts: Facts = dict.fromkeys(("run", "step", "loss", "checkpoint", "resume"))
    if news["id"] != before:
        steps, losses = news["columns"]["step"], news["columns"]["loss"]
        ended = (news["about"] or {}).get("ended") or {}
        facts["run"] = news["about"]
        facts["step"] = max([0, *steps[-1:], ended.get("steps", 0)])
        facts["loss"] = losses[-1] if losses else None
        if saved := complete(out / FOLDER):
            sets = [each for each in overrides if not each.startswith("train.resume=")]
            options = [word for each in (*sets, "train.resume=true") for word in ("--set", each)]
            facts |= {"checkpoint": str(saved[-1]), "resume": join(["meshcomm", *words, *options])}
    return {"folder": str(out), **facts}


def view(facts: Facts) -> Line:
    """Return what a job that has not finished leaves: its last step, its last checkpoint, and the command that continues it."""
    steps = facts["run"]["steps"]
    loss = "" if facts["loss"] is None else f", loss {facts['loss']:.4f}"
    head = f"meshcomm: step {facts['step']} of {steps} was the last{loss}; {facts['folder']} has its metrics"
    if facts["checkpoint"] is None:
        why = "no checkpoint: train.checkpoint_every saves them, and SIGTERM instead of Ctrl-C saves one before the job ends"
        return Line(f"{head}\nmeshcomm: {why}")
    return Line(
        f"{head}\nmeshcomm: last checkpoint: {facts['checkpoint']}\nmeshcomm: to continue: {facts['resume']}"
    )


def _on_a_rank(settings: Config) -> None:
    with _loading():
        from rich.console import Console

        from meshcomm.job.replacing import SAVED
        from meshcomm.mesh.all_ranks import is_first
        from meshcomm.mesh.opening import init
        from meshcomm.train import find_attempt, run
        from meshcomm.train.screen import TrainingReporter

    attempt = find_attempt(os.environ)
    with init(settings) as mesh:
        if not mesh.is_member:
            return
        console = Console(quiet=not is_first(mesh))
        console.print(mesh)
        summary = run(mesh, settings, TrainingReporter(console), attempt)
        mesh.elastic.finish()
    if summary.asked_to_stop:
        raise SystemExit(SAVED)


@contextmanager
def _loading() -> Iterator[None]:
    """Import modules that stay loaded. Garbage collection during these imports would take a fifth of a rank's startup time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # At exit, Python frees libraries' objects by garbage collection. Without this call, they are reported as leaks.
        atexit.register(gc.unfreeze)
        gc.enable()

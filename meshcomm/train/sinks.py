"""A callback that also sends metrics to TensorBoard or Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from meshcomm.config import TrainConfig
from meshcomm.config.write import toml
from meshcomm.errors import ConfigError
from meshcomm.train.callbacks import Callback, Evaluation, Start, Step, Summary
from meshcomm.train.run_files import TENSORBOARD, WANDB


@final
class Sink(Callback):
    """Sends named numbers such as `train/loss` to one package. A failure is reported once on stderr, and the run continues.

    TensorBoard: event files in `folder`/tensorboard. Points after the step `after` are hidden.
    Weights & Biases: a run in `folder`/wandb, offline unless WANDB_MODE is set. `wandb sync` uploads the run. Its
    project, name and entity are set by wandb's own environment variables. Resumed training is logged as a new run.

    Created on the rank that writes metrics.jsonl.

    folder: the run's folder.
    settings: the run's configuration, as in config.json.
    after: the last step of the earlier run that this run resumes, or 0.
    """

    def __init__(self, package: str, folder: Path, settings: Mapping[str, Any], after: int) -> None:
        self._package, self._folder, self._settings, self._after = package, folder, settings, after
        # A SummaryWriter or a wandb.Run.
        self._writer: Any = None

    def on_start(self, start: Start) -> None:
        """Open the package's writer."""
        self._writer = self._attempt(self._wandb if self._package == "wandb" else self._tensorboard)

    def on_step(self, step: Step) -> None:
        """Write the numbers of the step."""
        self._attempt(self._write, "train", step)

    def on_eval(self, evaluation: Evaluation) -> None:
        """Write the validation loss."""
        self._attempt(self._write, "validation", evaluation)

    def on_end(self, summary: Summary, error: BaseException | None) -> None:
        """Close the package's writer."""
        self._attempt(self._close, error is not None)

    def _tensorboard(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        purged = self._after + 1 if self._after else None
        writer: Any = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=purged)
        writer.add_text("config", f"```json\n{json.dumps(self._settings, indent=2)}\n```", self._after)
        return writer

    def _wandb(self) -> Any:
        import wandb

        (self._folder / WANDB).mkdir(parents=True, exist_ok=True)
        return wandb.init(
            dir=str(self._folder.absolute()),
            config={**self._settings, "resumed": self._after},
            mode=None if os.environ.get("WANDB_MODE") else "offline",
            reinit="create_new",  # does not touch a run that the program has opened
        )

    def _write(self, group: str, line: Step | Evaluation) -> None:
        numbers = {
            f"{group}/{key.removeprefix('validation_')}": value
            for key, value in line.facts.items()
            if isinstance(value, int | float) and key != "step"
        }
        if self._writer is not None and self._package == "wandb":
            self._writer.log(numbers, step=line.step)
        elif self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, line.step)

    def _close(self, failed: bool) -> None:
        if self._writer is not None and self._package == "wandb":
            self._writer.finish(exit_code=int(failed))
        elif self._writer is not None:
            self._writer.close()

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:  # any, because it is from another package
            self._writer = None
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            more = f"metrics no longer go to {self._package}; the run continues: {text}"
            print(f"meshcomm: {more}", file=sys.stderr, flush=True)
            return None


def check_sinks(train: TrainConfig) -> None:
    """Raise ConfigError if `train.log_to` names a package that is not installed."""
    for name in train.log_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name} is not installed on this host",
                given=f"train.log_to = {toml(list(train.log_to))}",
                expected=f"the package {name} on the host of the first rank",
                hint=f"pip install {name}, or train.log_to = {toml([n for n in train.log_to if n != name])}",
            )

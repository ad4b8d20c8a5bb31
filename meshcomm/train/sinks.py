"""A callback that sends metrics beyond metrics.jsonl: to TensorBoard, or to Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

from meshcomm.config import TrainConfig
from meshcomm.config.write import toml
from meshcomm.errors import ConfigError
from meshcomm.train.callbacks import Callback, Evaluation, Start, Step, Summary
from meshcomm.train.run_files import TENSORBOARD, WANDB


@final
class TensorBoard:
    """Event files in `folder`/tensorboard, by torch.utils.tensorboard. What came after the step `after` is hidden."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / TENSORBOARD), purge_step=after + 1 if after else None)
        self._writer.add_text("config", f"```json\n{json.dumps(settings, indent=2)}\n```", after)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """See Sink."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self, failed: bool) -> None:
        """See Sink."""
        self._writer.close()


@final
class WeightsAndBiases:
    """A run of Weights & Biases in `folder`/wandb, offline unless WANDB_MODE says otherwise; `wandb sync` sends it.

    Its project, name and entity are those of wandb's own variables. A training that is resumed is another run.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], after: int) -> None:
        import wandb

        (folder / WANDB).mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            dir=str(folder.absolute()),
            config={**settings, "resumed": after},
            mode=None if os.environ.get("WANDB_MODE") else "offline",
            reinit="create_new",  # a run that the program has opened stays as it is
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """See Sink."""
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        """See Sink."""
        self._run.finish(exit_code=int(failed))


# By package.
_WRITERS: Final = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


@final
class Sink(Callback):
    """Numbers by name, such as `train/loss`, to one package. Where it fails, stderr says so once, and the run goes on.

    Made on the rank that writes metrics.jsonl. folder: of the run. settings: its configuration, as config.json
    has it. after: the last step of an earlier run that this one resumes, 0 if none.
    """

    def __init__(self, package: str, folder: Path, settings: Mapping[str, Any], after: int) -> None:
        self._package, self._given = package, (folder, settings, after)
        self._writer: TensorBoard | WeightsAndBiases | None = None

    def on_start(self, start: Start) -> None:
        """Open the package's own writer."""
        self._writer = self._attempt(_WRITERS[self._package], *self._given)

    def on_step(self, step: Step) -> None:
        """Write the numbers of the step."""
        self._write("train", step)

    def on_eval(self, evaluation: Evaluation) -> None:
        """Write the validation loss."""
        self._write("validation", evaluation)

    def on_end(self, summary: Summary, error: BaseException | None) -> None:
        """Close it."""
        if self._writer is not None:
            self._attempt(self._writer.close, error is not None)

    def _write(self, group: str, facts: Step | Evaluation) -> None:
        numbers = {
            f"{group}/{key.removeprefix('validation_')}": value
            for key, value in asdict(facts).items()
            if isinstance(value, int | float) and key != "step"
        }
        if self._writer is not None:
            self._attempt(self._writer.write, facts.step, numbers)

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:  # any, as it is another package's
            self._writer = None
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            more = f"metrics no longer go to {self._package}, and the run goes on: {text}"
            print(f"meshcomm: {more}", file=sys.stderr, flush=True)
            return None


def check_sinks(train: TrainConfig) -> None:
    """Raise ConfigError where `train.log_to` names a package that is not installed."""
    for name in train.log_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name} is not installed on this host",
                given=f"train.log_to = {toml(list(train.log_to))}",
                expected=f"the package {name} on the host of the first rank",
                hint=f"pip install {name}, or train.log_to = {toml([n for n in train.log_to if n != name])}",
            )

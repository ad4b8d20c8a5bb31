"""Where metrics go beside metrics.jsonl: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

from meshcomm.config import TrainConfig
from meshcomm.config.write import toml
from meshcomm.errors import ConfigError
from meshcomm.train.report import Callback, Evaluation, Start, Step, Summary
from meshcomm.train.run_files import TENSORBOARD, WANDB


class Sink(ABC):
    """One place that metrics go to. Made when the run begins, on the rank that writes metrics.jsonl.

    Args:
        folder: of the run.
        settings: its configuration, as config.json has it.
        after: the last step that was done before, 0 for none.
    """

    package: str
    """What must be installed."""

    @abstractmethod
    def __init__(self, folder: Path, settings: Mapping[str, Any], after: int) -> None: ...

    @abstractmethod
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers by name, as `train/loss`, after a step; steps never go back."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """The run is over. failed: by an error."""


@final
class TensorBoard(Sink):
    """Event files in `folder`/tensorboard, by torch.utils.tensorboard. What came after `after` is hidden."""

    package = "tensorboard"

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
class WeightsAndBiases(Sink):
    """A run of Weights & Biases in `folder`/wandb, offline unless WANDB_MODE says otherwise; `wandb sync` sends it.

    Its project, name and entity are those of wandb's own variables. A training that is resumed is another run.
    """

    package = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], after: int) -> None:
        import wandb

        folder.joinpath(WANDB).mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            dir=str(folder.absolute()),
            config={**settings, "resumed": after},
            mode=None if os.environ.get("WANDB_MODE") else "offline",
            # One that the program has made is its own.
            reinit="create_new",
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """See Sink."""
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        """See Sink."""
        self._run.finish(exit_code=int(failed))


_KINDS: Final[Mapping[str, type[Sink]]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_sinks(train: TrainConfig) -> None:
    """Raise ConfigError where `train.log_to` names what is not installed."""
    for name in train.log_to:
        package = _KINDS[name].package
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed on this host",
                given=f"train.log_to = {toml(list(train.log_to))}",
                expected=f"the package {package} for Python {sys.version_info[0]}.{sys.version_info[1]}, on the host of "
                "the first rank",
                hint=f"pip install {package}, or train.log_to = {toml([n for n in train.log_to if n != name])}",
            )


@final
class Forward(Callback):
    """Tells one sink. Where it fails, that is said on stderr once, and the run goes on without it."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any], after: int) -> None:
        self._name = name
        self._make = lambda: _KINDS[name](folder, settings, after)
        self._sink: Sink | None = None

    def on_start(self, start: Start) -> None:
        """Open it."""
        self._sink = self._attempt(self._make)

    def on_step(self, step: Step) -> None:
        """Write what is known of the step."""
        self._write(step.step, "train", step)

    def on_eval(self, evaluation: Evaluation) -> None:
        """Write the validation loss."""
        self._write(evaluation.step, "validation", evaluation)

    def on_end(self, summary: Summary, error: BaseException | None) -> None:
        """Close it."""
        if (sink := self._sink) is not None:
            self._attempt(lambda: sink.close(error is not None))

    def _write(self, number: int, group: str, facts: Step | Evaluation) -> None:
        if (sink := self._sink) is None:
            return
        numbers = {
            f"{group}/{key.removeprefix('validation_')}": value
            for key, value in asdict(facts).items()
            if isinstance(value, int | float) and key != "step"
        }
        self._attempt(lambda: sink.write(number, numbers))

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        # Whatever a package of somebody else's raises.
        except Exception as error:
            self._sink = None
            text = " ".join(str(error).split())
            print(
                f"meshcomm: metrics no longer go to {self._name}, and the run goes on: {type(error).__name__}: {text}",
                file=sys.stderr,
                flush=True,
            )
            return None

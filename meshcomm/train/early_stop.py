"""Has the training come far enough, or no further? Judged after each evaluation."""

from __future__ import annotations

import math
from typing import NamedTuple, final

from meshcomm.config import TrainConfig
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank
from meshcomm.train.report import Callback, Evaluation


class Best(NamedTuple):
    """The lowest validation loss so far, None before the first that is finite; the step that it followed, and how many
    evaluations there were since then.
    """

    loss: float | None = None
    step: int = 0
    since: int = 0


@final
class EarlyStop(Callback):
    """`train.patience`, `min_delta` and `target_loss`. best: where a run that is resumed had come.

    A run that had ended by them ends again at once, unless they have changed.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig, best: Best) -> None:
        self._mesh, self._train = mesh, train
        self.best = best
        self._judge()

    def on_eval(self, evaluation: Evaluation) -> None:
        """Judge. Called by: every rank; with one of the settings, a gather of one number per dim."""
        train, best = self._train, self.best
        if train.patience is None and train.target_loss is None:
            return
        # Equal but for what devices of different kinds round: all decide by the same rank's number.
        loss = float(of_every_rank(self._mesh, evaluation.validation_loss)[0])
        falls = math.isfinite(loss) and (best.loss is None or loss < best.loss - train.min_delta)
        self.best = Best(loss, evaluation.step) if falls else best._replace(since=best.since + 1)
        self._judge(loss)

    def _judge(self, last: float | None = None) -> None:
        train, (loss, step, since) = self._train, self.best
        last = loss if last is None else last
        if train.target_loss is not None and last is not None and last <= train.target_loss:
            self.reason = f"the validation loss is {last:.4f}, train.target_loss = {train.target_loss:g}"
        elif train.patience is not None and since >= train.patience:
            by = f" by more than {train.min_delta:g}" if train.min_delta else ""
            lowest = "" if loss is None else f": it was {loss:.4f} after step {step}"
            self.reason = f"the validation loss has not fallen{by} in {since} evaluations{lowest}"
        self.stop = bool(self.reason)

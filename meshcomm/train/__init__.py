"""Training as a config says, of its model or yours: the Trainer, what it tells, and its checkpoints."""

from meshcomm.train.checkpoint import Attempt, Checkpoints, find_attempt
from meshcomm.train.pretrained import save_pretrained
from meshcomm.train.report import Callback, Evaluation, Resumed, Start, Step, Summary
from meshcomm.train.schedule import learning_rate
from meshcomm.train.trainer import Trainer, run

__all__ = [
    "Attempt",
    "Callback",
    "Checkpoints",
    "Evaluation",
    "Resumed",
    "Start",
    "Step",
    "Summary",
    "Trainer",
    "find_attempt",
    "learning_rate",
    "run",
    "save_pretrained",
]

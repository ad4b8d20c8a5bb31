"""Training from a config, with its model or yours: the Trainer, its callbacks, and its checkpoints."""

from meshcomm.train.callbacks import Callback, Evaluation, Resumed, Start, Step, Summary
from meshcomm.train.checkpoint.checkpoints import Checkpoints
from meshcomm.train.checkpoint.lease import Attempt, find_attempt
from meshcomm.train.export import save_pretrained
from meshcomm.train.steps import learning_rate
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

"""A transformer on bytes of real text, trained in parallel as a config says."""

from meshcomm.train.checkpoint import Attempt, Checkpoints, find_attempt
from meshcomm.train.loop import learning_rate, run, trainer_for
from meshcomm.train.pretrained import save_pretrained
from meshcomm.train.report import Evaluation, Reporter, Resumed, Silent, Start, Step, Summary

__all__ = [
    "Attempt",
    "Checkpoints",
    "Evaluation",
    "Reporter",
    "Resumed",
    "Silent",
    "Start",
    "Step",
    "Summary",
    "find_attempt",
    "learning_rate",
    "run",
    "save_pretrained",
    "trainer_for",
]

"""A transformer on bytes of real text, trained in parallel as a config says."""

from meshcomm.train.loop import learning_rate, run, trainer_for
from meshcomm.train.report import Reporter, Silent, Start, Step, Summary

__all__ = ["Reporter", "Silent", "Start", "Step", "Summary", "learning_rate", "run", "trainer_for"]

"""Experts: a mixture-of-experts layer whose experts are spread along one dim of the mesh."""

from meshcomm.parallel.expert.experts import Experts, ExpertWeights, separate

__all__ = ["ExpertWeights", "Experts", "separate"]

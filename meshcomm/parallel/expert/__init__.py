"""Experts: a mixture-of-experts layer whose experts are spread along one dim of the mesh."""

from meshcomm.parallel.expert.experts import Experts, ExpertWeights, expert_gradient_dims, separate

__all__ = ["ExpertWeights", "Experts", "expert_gradient_dims", "separate"]

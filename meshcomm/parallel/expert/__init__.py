"""Expert parallelism: a mixture-of-experts layer whose experts are distributed along one dim of the mesh."""

from meshcomm.parallel.expert.experts import Experts, ExpertWeights
from meshcomm.parallel.expert.packed import separate, spread_experts

__all__ = ["ExpertWeights", "Experts", "separate", "spread_experts"]

"""Expert parallelism: mixture-of-experts layers whose experts are spread along one dim of a view."""

from meshcomm.parallel.expert.exchange import Load
from meshcomm.parallel.expert.experts import Experts, ExpertWeights, expert_gradient_dims, separate

__all__ = ["ExpertWeights", "Experts", "Load", "expert_gradient_dims", "separate"]

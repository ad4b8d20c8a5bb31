"""Expert parallelism: mixture-of-experts layers whose experts are spread along one dim of a view."""

from meshcomm.parallel.expert.experts import Experts
from meshcomm.parallel.expert.load import Load
from meshcomm.parallel.expert.parameters import separate
from meshcomm.parallel.expert.placement import expert_gradient_dims
from meshcomm.parallel.expert.weights import ExpertWeights

__all__ = ["ExpertWeights", "Experts", "Load", "expert_gradient_dims", "separate"]

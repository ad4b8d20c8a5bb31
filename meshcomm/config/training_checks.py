"""Can this be trained on these sizes, and on which sizes nearby? All questions, in their order."""

from __future__ import annotations

from collections.abc import Iterator

from meshcomm.config.architecture import ModelConfig
from meshcomm.config.batch_checks import batch_problems
from meshcomm.config.combination_checks import combination_problems
from meshcomm.config.context_checks import context_problems
from meshcomm.config.data import DataConfig
from meshcomm.config.expert_checks import expert_problems
from meshcomm.config.mesh import MeshConfig
from meshcomm.config.parallel import PARTS, ParallelConfig
from meshcomm.config.part_checks import expert_view_problems, unknown_parts, unused_dims
from meshcomm.config.pipeline_checks import stage_problems
from meshcomm.config.problems import Broken, Problem
from meshcomm.config.tensor_checks import tensor_problems
from meshcomm.config.train import TrainConfig
from meshcomm.config.training_setup import Setup


def training_problems(
    mesh: MeshConfig,
    parallel: ParallelConfig,
    model: ModelConfig,
    data: DataConfig | None,
    train: TrainConfig,
    broken: Broken,
) -> Iterator[Problem]:
    """What is wrong between the sections of a training file. A size of -1 is not judged."""
    if broken.touches("mesh.dims", "mesh.views", *(f"parallel.{part}" for part in PARTS)):
        return
    unknown = list(unknown_parts(mesh, parallel, model))
    yield from unknown
    if any(problem.key != "parallel.expert" for problem in unknown):
        return
    yield from unused_dims(mesh, parallel)
    if unknown:
        return
    setup = Setup(mesh, parallel, model, data, train, broken)
    yield from expert_view_problems(setup)
    yield from tensor_problems(setup)
    yield from stage_problems(setup)
    yield from batch_problems(setup)
    yield from context_problems(setup)
    yield from expert_problems(setup)
    yield from combination_problems(setup)

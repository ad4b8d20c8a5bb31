"""A step that logs nothing waits for nothing, if calls are queued on the device as with NCCL."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import TrainingError
from meshcomm.parallel.results import Done
from meshcomm.parallel.tensor import local, whole
from meshcomm.testing import Pool
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl, host_syncs, no_host_sync
from meshcomm.train import Trainer, learning_rate
from meshcomm.train.data import batches_of
from meshcomm.train.data import load as text
from tests.train import every_setting
from tests.train.checkpoint.test_checkpoints import TINY
from tests.train.runs import gradient_node

pytestmark = pytest.mark.long

WARM = 8
STEPS = WARM + 5


def tiny(*overrides: str) -> Config:
    few = (f"train.steps={STEPS}", "train.warmup_steps=2", "mesh.validate_calls=8")
    return load_config(TINY, [*few, *every_setting.overrides(), *overrides])


def trained(config: Config, strict: bool = True) -> tuple[list[Done], int, dict[str, Tensor]]:
    """The results of all steps, the host syncs after the first steps, and the weights."""
    nccl = config.mesh.backend == NAME
    with emulated_nccl() if nccl else nullcontext(), meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config).engine
        batches = batches_of(trainer, text(trainer.sections.data))
        given = [batches(step) for step in range(1, STEPS + 1)]

        def run(steps: range) -> None:
            for step in steps:
                trainer.step(*given[step - 1], learning_rate(trainer.sections.train, step), step)
                mesh.step(step)

        run(range(1, WARM + 1))
        found = trainer.results()
        before = host_syncs() if nccl else 0
        with no_host_sync() if nccl and strict else nullcontext():
            run(range(WARM + 1, STEPS + 1))
        syncs = host_syncs() - before if nccl else 0
        found += trainer.results()
        weights = {name: whole(each).clone() for name, each in trainer.named_parameters()}
        return found, syncs, weights


MESHES = {
    "dp tp": ["mesh.dims={ pp = 1, dp = 2, tp = 2 }"],
    "dp sp": ["mesh.dims={ pp = 1, dp = 2, tp = 2 }", "parallel.options.sequence_parallel=true"],
    "pp tp": ["mesh.dims={ pp = 2, dp = 1, tp = 2 }"],
    "fsdp": [
        *("mesh.dims={ pp = 1, fsdp = 4, tp = 1 }", "parallel.shard=fsdp"),
        *("parallel.data=", "parallel.options.bucket_mb="),
    ],
    "ring": ["mesh.dims={ pp = 1, dp = 2, cp = 2, tp = 1 }", "parallel.context=cp"],
}


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(each, marks=[pytest.mark.parity] * (each in ("dp tp", "dp sp", "ring", "pp tp")))
        for each in MESHES
    ],
)
@pytest.mark.deep_cases(r"\[fsdp\]")
def test_a_step_that_logs_nothing_waits_for_nothing(pool: Pool, dims: str) -> None:
    config = tiny(*MESHES[dims])
    plain = pool.run(trained, config, ranks=4)
    queued = pool.run(trained, load_config(config, [f"mesh.backend={NAME}"]), ranks=4)
    for (done, _, weights), (same, syncs, others) in zip(plain, queued, strict=True):
        assert syncs == 0
        assert [each.number for each in same] == list(range(1, STEPS + 1))
        for a, b in zip(same, done, strict=True):
            assert (a.loss, a.gradient_norm) == pytest.approx((b.loss, b.gradient_norm), rel=1e-5)
        assert all(torch.allclose(weights[name], others[name], atol=1e-5) for name in weights)


def spoilt(config: Config, how: str) -> tuple[str, list[int], bool]:
    """Six steps, the fourth spoilt. The error or the faults, the steps with results, and whether steps 4 to 6 changed weights."""
    with emulated_nccl(), meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config).engine
        batches = batches_of(trainer, text(trainer.sections.data))
        now = [0]
        if how == "gradient" and mesh.rank == 3:
            weight = dict(trainer.named_parameters())["layers.0.attn.wq.weight"]
            # A hook on the parameter would be refused.
            node = gradient_node(weight)
            node.register_prehook(
                lambda grads: tuple(grad * math.nan for grad in grads) if now[0] == 4 else grads
            )
        before: list[Tensor] = []
        for step in range(1, 7):
            now[0] = step
            tokens, targets = batches(step)
            if how == "token" and step == 4 and mesh.coord("dp") == 1:
                tokens[1, 2] = 300
            if step == 4:
                before = [local(each.detach()).clone() for _, each in trainer.named_parameters()]
            trainer.step(tokens, targets, 1e-2, step)
        changed = any(
            not torch.equal(local(each.detach()), old)
            for (_, each), old in zip(trainer.named_parameters(), before, strict=True)
        )
        try:
            found = trainer.results()
        except TrainingError as error:
            assert trainer.results() == []
            return str(error), [], changed
        assert all(math.isfinite(each.loss) for each in found if not each.fault)
        return "".join(each.fault for each in found), [each.number for each in found], changed


@pytest.mark.parametrize(
    ("how", "first", "dims"),
    [
        pytest.param("gradient", "gradient norm", "dp = 2, tp = 2", marks=pytest.mark.parity),
        pytest.param("token", "loss", "dp = 2, tp = 2", marks=pytest.mark.parity),
        ("token", "loss", "dp = 2, tp = 1"),
    ],
)
def test_what_is_not_finite_is_named_at_the_next_look(pool: Pool, how: str, first: str, dims: str) -> None:
    config = tiny(f"mesh.dims={{ pp = 1, {dims} }}", f"mesh.backend={NAME}")
    ranks = 4 if "tp = 2" in dims else 2
    ((error, _, changed), *others) = pool.run(spoilt, config, how, ranks=ranks)
    assert error.startswith(f"the {first} of step 4 is nan\n") and not changed
    if how == "gradient":
        assert "rank 1 (pp=0 dp=0 tp=1): nan in the gradient of layers.0.attn.wq.weight" in error
    else:
        assert f"rank {ranks // 2} (pp=0 dp=1 tp=0): tokens range from " in error
        assert "to 300, the vocabulary has 0 to 255\n" in error
    assert all(other == (error, [], False) for other in others)
    skipping = load_config(config, ['train.on_nonfinite="skip"'])
    for fault, numbers, changed in pool.run(spoilt, skipping, how, ranks=ranks):
        assert all(line in error for line in fault.splitlines())
        assert fault and numbers == [1, 2, 3, 4, 5, 6] and changed

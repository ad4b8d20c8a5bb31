"""Optimizers by name, groups of parameters, and their state in a checkpoint give the same results on every mesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.parallel import narrow_state, whole
from meshcomm.parallel.optimizer import KINDS, decay_groups
from meshcomm.testing import Pool
from meshcomm.train import Trainer, learning_rate
from meshcomm.train.agree import corpus_of
from meshcomm.train.data import batches_of
from meshcomm.train.parity import compare, in_float64, record, reference
from tests.train.test_steps import TINY

pytestmark = pytest.mark.long

MESHES = ["{ pp = 1, dp = 2, tp = 2 }", "{ pp = 1, dp = 4, tp = 1 }"]


def config_of(name: str, dims: str, *more: str) -> Config:
    args = {"sgd": "{ momentum = 0.9 }", "rmsprop": "{ momentum = 0.5, centered = true }"}.get(name, "{}")
    config, _ = in_float64(
        load_config(TINY, [f"mesh.dims={dims}", f'train.optimizer="{name}"', f"train.optimizer_args={args}"])
    )
    groups = 'train.groups={ "embed*" = { lr = 0.5 }, "*.wq.*" = { weight_decay = 0.0 } }'
    return load_config(config, [groups, "train.weight_decay=0.1", "train.lr=0.01", *more])


def recorded(config: Config) -> Any:
    with meshcomm.init(config) as mesh:
        return record(mesh, config, 3)


# The other optimizers share their code with one of these.
_OFTEN = ("adamw",)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in _OFTEN else pytest.mark.parity) for each in KINDS]
)
def test_every_optimiser_is_the_same_on_a_mesh(pool: Pool, name: str) -> None:
    shard = "parallel={ shard = 'dp', tensor = 'tp', pipeline = 'pp' }"
    (alone,) = pool.run(recorded, reference(config_of(name, MESHES[0])), ranks=1)
    for config in (config_of(name, MESHES[0]), config_of(name, MESHES[0], shard)):
        for found in pool.run(recorded, config, ranks=4):
            assert max(each.relative for each in compare(found, alone)) < 1e-9, name


def resumed(config: Config, folder: Path, save: bool) -> dict[str, Tensor]:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        batches = batches_of(trainer.engine, corpus_of(trainer.engine.sections))
        first = 1
        if not save:
            trainer.load(folder)
            first = 3
        for step in range(first, 5):
            if step == 3 and save:
                trainer.save(folder)
            trainer.engine.step(*batches(step), 0.01, step)
        trainer.results()
        return {name: whole(p).detach().clone() for name, p in trainer.engine.named_parameters()}


@pytest.mark.parity
@pytest.mark.parametrize("name", ["adagrad", "nadam"])
def test_state_is_put_back_on_another_mesh(pool: Pool, tmp_path: Path, name: str) -> None:
    ranks = pool.run(resumed, config_of(name, MESHES[0]), tmp_path / "saved", True, ranks=4)
    for found in pool.run(resumed, config_of(name, MESHES[1]), tmp_path / "saved", False, ranks=4):
        for key, value in found.items():
            torch.testing.assert_close(value, ranks[0][key], rtol=1e-9, atol=1e-11)


NARROW = 'train.state_dtype="bfloat16"'


def narrow(config: Config, at_once: int) -> tuple[Any, set[torch.dtype]]:
    with pytest.MonkeyPatch.context() as patch, meshcomm.init(config) as mesh:
        patch.setattr(narrow_state, "_AT_ONCE", at_once)
        kinds: set[torch.dtype] = set()

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            moments = [each for held in optimizer.state.values() for each in held.values() if each.ndim]
            kinds.update(each.dtype for each in moments)

        with register_optimizer_step_post_hook(stepped):
            return record(mesh, config, 3), kinds


@pytest.mark.parametrize("name", [pytest.param("adamw"), pytest.param("sgd", marks=pytest.mark.parity)])
@pytest.mark.deep
def test_moments_in_bfloat16_are_the_same_on_a_mesh(pool: Pool, name: str) -> None:
    shard = "parallel={ shard = 'dp', tensor = 'tp', pipeline = 'pp' }"
    ((alone, kinds),) = pool.run(narrow, reference(config_of(name, MESHES[0], NARROW)), 1 << 24, ranks=1)
    (wide,) = pool.run(recorded, reference(config_of(name, MESHES[0])), ranks=1)
    assert kinds == {torch.bfloat16}
    assert 1e-5 < max(each.relative for each in compare(alone, wide)) < 1e-1
    for config in (config_of(name, MESHES[0], NARROW), config_of(name, MESHES[0], shard, NARROW)):
        # With parts of at most 100 elements, most weights form a part by themselves.
        for found, kinds in pool.run(narrow, config, 100, ranks=4):
            assert max(each.relative for each in compare(found, alone)) < 1e-9
            assert kinds == {torch.bfloat16}


@pytest.mark.parametrize("more", [(NARROW, NARROW), (NARROW, ""), ("", NARROW)])
@pytest.mark.deep
def test_a_run_goes_on_with_moments_of_another_type(
    pool: Pool, tmp_path: Path, more: tuple[str, str]
) -> None:
    first, second = ([each] if each else [] for each in more)
    shard = "parallel={ shard = 'dp', tensor = 'tp', pipeline = 'pp' }"
    folder = tmp_path / "saved"
    ranks = pool.run(resumed, config_of("adamw", MESHES[0], shard, *first), folder, True, ranks=4)
    exact = 1e-9 if more == (NARROW, NARROW) else 1e-1
    for found in pool.run(resumed, config_of("adamw", MESHES[1], *second), folder, False, ranks=4):
        for key, value in found.items():
            torch.testing.assert_close(value, ranks[0][key], rtol=exact, atol=exact / 10)


class _RateInTensor(torch.optim.SGD):
    """A learning rate in a tensor must stay in a tensor, as with torchao's optimizers."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=torch.tensor(0.01, dtype=torch.float64))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(isinstance(group["lr"], Tensor) for group in self.param_groups)
        super().step()


def rated(config: Config, tensor: bool) -> Any:
    with meshcomm.init(config) as mesh:
        make = _RateInTensor if tensor else partial(torch.optim.SGD, lr=0.01)
        return Trainer(mesh, config, optimizer=make).run().losses


def test_a_rate_in_a_tensor_stays_in_it(pool: Pool, tmp_path: Path) -> None:
    config = config_of("adamw", MESHES[1], f'train.out="{tmp_path}"', "train.steps=3")
    losses = [pool.run(rated, config, tensor, ranks=4)[0] for tensor in (True, False)]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def refused(config: Config) -> str:
    with meshcomm.init(config) as mesh:
        try:
            _ = Trainer(mesh, config).engine
        except ConfigError as error:
            return error.what
    return ""


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("train.optimizer_args={ momentun = 0.9 }", "torch.optim.SGD has no argument momentun"),
        (
            "train.optimizer_args={ lr = 0.9 }",
            "torch.optim.SGD has no argument lr, which is a setting of [train]",
        ),
        ('train.groups={ "nothing*" = { lr = 0.1 } }', "no parameter matches nothing*"),
    ],
)
def test_what_no_optimiser_knows_is_told(pool: Pool, more: str, what: str) -> None:
    assert pool.run(refused, config_of("sgd", "{ pp = 1, dp = 1, tp = 1 }", more), ranks=1) == [what]


def test_wsd_stays_and_falls_at_the_end() -> None:
    train = load_config(TINY, ["train.steps=100", 'train.schedule="wsd"', "train.lr=1.0"]).train
    assert train is not None
    rates = [learning_rate(train, step) for step in range(1, 101)]
    assert rates[0] == 0.5 and rates[1:90] == [1.0] * 89 and rates[-1] == pytest.approx(0.1)
    # The decay takes the last tenth of all steps, so a longer run continues where the shorter one was stable.
    longer = train.model_copy(update={"steps": 200})
    assert [learning_rate(longer, step) for step in range(1, 91)] == rates[:90]


# -- optimizers that need a closure ----------------------------------------------------------------


class _Asserts(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See Optimizer."""
        assert closure is not None
        super().step(closure)


class _Says(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See Optimizer."""
        if closure is None:
            raise RuntimeError("Sharpness-aware steps require a closure")


class _Calls(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See Optimizer."""
        torch.enable_grad()(closure)()


class _Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See Optimizer."""
        assert self.param_groups[0]["lr"] > 1e9


@pytest.mark.parametrize("kind", [_Asserts, _Says, _Calls, _Broken])
def test_an_optimizer_that_fails_without_a_closure_is_named(kind: type[torch.optim.SGD]) -> None:
    config = load_config(
        {
            "mesh": {"dims": {"dp": 2}, "device": "cpu"},
            "parallel": {"data": "dp"},
            "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2},
        }
    )

    def body(mesh: Any) -> str:
        trainer = Trainer(
            mesh, config, torch.nn.Linear(3, 1), optimizer=kind, loss=torch.nn.functional.mse_loss
        )
        try:
            trainer.step(torch.full((2, 3), 1.0 + mesh.rank), torch.ones(2, 1))
        except UnsupportedOp as error:
            return str(error)
        except AssertionError:
            return "its own error"
        return ""

    for said in meshcomm.simulate(body, config):
        if kind is _Broken:
            assert said == "its own error"
        else:
            assert f"{kind.__name__} cannot take a step from gradients only" in said
            assert "fails without a closure" in said


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    groups = decay_groups(model)
    assert [group.get("weight_decay") for group in groups] == [None, 0.0]
    matrices = {id(p) for p in (model[0].weight, model[1].weight)}
    assert {id(p) for p in groups[0]["params"]} == matrices
    assert len(groups[1]["params"]) == 3

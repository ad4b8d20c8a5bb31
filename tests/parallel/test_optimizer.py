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
from meshcomm.config import Config, TrainConfig, load_config
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel import narrow_state, whole
from meshcomm.parallel.narrow_state import NarrowState
from meshcomm.parallel.optimizer import KINDS, decay_groups, optimizer_of
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
    # Rprop has no weight decay.
    decay = [] if name == "rprop" else [groups, "train.weight_decay=0.1"]
    return load_config(config, [*decay, "train.lr=0.01", *more])


def recorded(config: Config) -> Any:
    with meshcomm.init(config) as mesh:
        return record(mesh, config, 3)


# The other optimizers share their code with one of these.
_OFTEN = ("adamw",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each in _OFTEN else pytest.mark.parity)
        for each in KINDS
        if each != "muon"
    ],
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


def refused(mesh: Mesh, config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        _ = Trainer(mesh, config).engine
    return str(caught.value)


W1 = 'train.groups."*w1*"'
OWN = f"{W1}.optimizer_args"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["train.optimizer_args={ momentun = 0.9 }"], "torch.optim.SGD has no argument momentun"),
        (["train.optimizer_args={ lr = 0.9 }"], "train.optimizer_args cannot set lr|train.lr = ..."),
        (
            ["train.optimizer_args={ momentum = -1 }"],
            "train.optimizer_args = { momentum = -1 }|Invalid momentum",
        ),
        (
            ["train.optimizer_args={ nesterov = 1 }"],
            "train.optimizer_args.nesterov|of type bool|default is False",
        ),
        (
            ["train.optimizer_args={ nesterov = true }"],
            "take train.optimizer_args: Nesterov|{ nesterov = true }",
        ),
        (
            ["train.optimizer_args={ fused = true, foreach = true }"],
            "take train.optimizer_args: `fused`|foreach = true",
        ),
        ([f"{W1}.optimizer='adam'", f"{OWN}={{ betas = [0.9, 2.0] }}"], f"{OWN} = {{ betas = [0.9, 2.0] }}"),
        ([f"{W1}.optimizer='adam'", f"{OWN}={{ betas = 0.9 }}"], f"{OWN}.betas|tuple"),
        (
            [f"{W1}.optimizer='adam'", f"{OWN}={{ capturable = true }}"],
            f"{OWN} cannot set capturable|remove it",
        ),
        ([f"{W1}.optimizer='adam'", f"{OWN}={{ lr = 0.1 }}"], f"{OWN} cannot set lr|{W1}.lr = ..., a factor"),
        ([f"{W1}.optimizer='rprop'", f"{OWN}={{ step_sizes = 1 }}"], f"{OWN}.step_sizes|tuple[float, float]"),
        ([f"{W1}.optimizer='muon'", f"{OWN}={{ adjust_lr_fn = 'x' }}"], f"{OWN}|Adjust|adjust_lr_fn = "),
        *(
            (
                [f"{W1}.optimizer='muon'", f"{OWN}={{ ns_steps = {steps} }}"],
                f"{OWN}: ns_steps|from 1 to 99|{steps}",
            )
            for steps in (-1, 0, 100)
        ),
        (['train.groups={ "nothing*" = { lr = 0.1 } }'], "no parameter matches nothing*"),
        (
            ['train.groups={ "*.w?.*" = { lr = 0.1 }, "*w1*" = { lr = 2.0 }, "embed*" = { lr = 0.5 } }'],
            "applies *w1* to no parameter: an earlier pattern matches the same ones: *.w?.*|move *w1* to the top",
        ),
        (
            [f"{W1}.lr=0.1", 'train.frozen=["*ff*"]'],
            "applies *w1* to no parameter: all are frozen|remove *w1*",
        ),
    ],
)
def test_what_no_optimiser_takes_is_told(more: list[str], words: str) -> None:
    config = load_config(config_of("sgd", "{ pp = 1, dp = 2, tp = 1 }", "train.optimizer_args={}"), more)
    for text in meshcomm.simulate(refused, config, args=(config,)):
        assert all(word in text for word in words.split("|")), text


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("adamw", {}, (True, None)),
        ("adamw", {"fused": False}, (False, None)),
        ("adamw", {"foreach": True}, (None, True)),
        ("adamw", {"foreach": False}, (None, False)),
        ("adamw", {"amsgrad": True}, (True, None)),
    ],
)
def test_fused_and_foreach_are_those_of_the_user(name: str, args: Any, expected: tuple[Any, Any]) -> None:
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1, optimizer=name, optimizer_args=args)
    made = optimizer_of(train, torch.device("cpu"))([{"params": [torch.zeros(2, 2)]}])
    assert (made.defaults["fused"], made.defaults["foreach"]) == expected


def test_optimizers_of_groups_read_the_settings_of_train_and_their_own() -> None:
    groups = {
        "a": {"optimizer": "adam"},
        "b": {"optimizer": "adam", "optimizer_args": {"betas": [0.5, 0.6], "eps": 1e-3}},
        "c": {"optimizer": "muon", "optimizer_args": {"eps": 1e-5}},
        "d": {"optimizer": "rprop", "optimizer_args": {"etas": [0.4, 1.3]}},
    }
    section = {
        "steps": 1,
        "global_batch_size": 1,
        "micro_batch_size": 1,
        "optimizer": "sgd",
        "groups": groups,
    }
    section |= {"betas": [0.8, 0.9], "eps": 1e-4, "state_dtype": "bfloat16"}
    made = optimizer_of(TrainConfig.model_validate(section), torch.device("cpu"))
    parts = made([{"params": [torch.zeros(2, 2)], "pattern": p} for p in ("", *groups)]).parts  # type: ignore[attr-defined]
    assert "betas" not in parts[0].defaults
    held = [(part.defaults["betas"], part.defaults["eps"]) for part in parts[1:3]]
    assert held == [((0.8, 0.9), 1e-4), ((0.5, 0.6), 1e-3)]
    assert parts[3].defaults["eps"] == 1e-5 and parts[4].defaults["etas"] == (0.4, 1.3)
    assert [isinstance(part, NarrowState) for part in parts] == [True, True, True, True, False]


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

"""Random numbers by role: what modules and generators draw on each rank, in each step, and during recomputation."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, UnknownDim, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.models import ModelSpec, StageContext
from meshcomm.testing import Pool
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl, host_syncs, no_host_sync
from meshcomm.train import Trainer
from tests.models import own
from tests.models.families import config_of, differences

pytestmark = pytest.mark.long


class Block(own.Block):
    """A block with dropout on both residual branches, and on the inner activations if `inner` is above 0."""

    def __init__(self, inner: float) -> None:
        super().__init__(32, 4)
        self.drop, self.noise, self.drop_inner = nn.Dropout(0.2), nn.Dropout(0.1), nn.Dropout(inner)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same shape."""
        q, k, v = (
            each.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.drop(self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))
        y = self.down(self.drop_inner(F.gelu(self.up(self.after(x)))))
        return x + self.noise(y)


class Net(own.Own):
    """Tokens -> logits, with dropout before and after the blocks."""

    def __init__(self, inner: float) -> None:
        super().__init__(32, layers=0)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(4))
        self.first_drop, self.last_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens) int64 -> (samples, tokens, 256)."""
        x = self.first_drop(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.last_drop(self.norm(x)))


def _forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
    if here.stage.is_first:
        x = module.first_drop(module.tokens(x) + module.places(here.positions))
    for block in here.layers:
        x = here.through(block, x)
    return module.logits(module.last_drop(module.norm(x))) if here.stage.is_last else x


def alone() -> nn.Module:
    """The plain module, without a spec."""
    return Net(0.2)


def spec(inner: float = 0.0) -> ModelSpec:
    """The module with a full spec."""
    known = own.spec(32)
    attention = known.attention
    assert attention is not None and known.sequence is not None
    return replace(known, module=lambda: Net(inner), forward=_forward)


ALONE = {"build": "tests.parallel.test_random_numbers:alone"}
SPEC = {"build": "tests.parallel.test_random_numbers:spec"}
INNER = {**SPEC, "args": {"inner": 0.3}}


TWO: dict[str, Any] = {"stages_per_rank": 2}
DEEP: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (SPEC, "dp=2 fsdp=2", {"train": {"micro_batch_size": 2, "activation_checkpointing": "selective"}}),
    (
        INNER,
        "pp=2 dp=2",
        {**TWO, "schedule": "interleaved_1f1b", "train": {"activation_checkpointing": True}},
    ),
    (SPEC, "pp=2 dp=2", {**TWO, "schedule": "zero_bubble", "train": {"activation_checkpointing": 2}}),
]


@pytest.mark.parametrize(
    ("model", "dims", "more"),
    [(ALONE, "dp=2 fsdp=2", {}), *(pytest.param(*each, marks=pytest.mark.parity) for each in DEEP)],
    ids=str,
)
@pytest.mark.deep_cases(r"\[.*alone")
def test_what_is_drawn_is_what_one_process_draws(
    pool: Pool, model: dict[str, Any], dims: str, more: dict[str, Any]
) -> None:
    assert max(each.relative for each in differences(pool, config_of(model, dims, **more))) < 1e-9


class Mask(NamedTuple):
    """Where a dropout kept its input."""

    name: str
    kept: Tensor


def masks(config: Config, steps: Sequence[int]) -> tuple[dict[str, int], dict[int, list[Mask]], float]:
    """This rank's coords, the masks of each step in order, and a draw from the default generator afterwards."""
    with meshcomm.init(config) as mesh:
        engine = Trainer(mesh, config).engine
        found: dict[int, list[Mask]] = {}
        now = [0]
        for name, part in engine.modules.named_modules():
            if isinstance(part, nn.Dropout):
                part.register_forward_hook(
                    lambda _, __, y, name=name: found[now[0]].append(Mask(name, y.detach() != 0))
                )
        tokens = torch.arange(engine.microbatches * config.train.micro_batch_size * 32).view(-1, 32) % 251  # type: ignore[union-attr]
        torch.manual_seed(3)
        for step in steps:
            now[0], found[step] = step, []
            engine.step(tokens, tokens, 0.0, step)
        return mesh.coords, found, float(torch.rand(()))


@pytest.mark.parity
def test_masks_by_role(pool: Pool) -> None:
    config = config_of(
        INNER,
        "dp=2 cp=2",
        train={"global_batch_size": 4, "micro_batch_size": 1, "activation_checkpointing": True},
    )
    ranks = pool.run(masks, config, [2, 3], ranks=4)
    torch.manual_seed(3)
    assert {each[2] for each in ranks} == {float(torch.rand(()))}
    by_coords = {tuple(coords.values()): found for coords, found, _ in ranks}
    zero = by_coords[0, 0]
    # Two microbatches with 14 dropouts each. Backward reruns the four blocks, but stops before the last dropout of each.
    names = [name for name, _ in zero[2]]
    assert len(names) == 2 * (2 + 12 + 8)
    first, again = {mask.name: mask.kept for mask in zero[2][:14]}, zero[2][14:22]
    assert all(torch.equal(mask.kept, first[mask.name]) for mask in again)
    for coords, found in by_coords.items():
        for step in (2, 3):
            assert [mask.name for mask in found[step]] == names
            if coords != (0, 0):
                assert not any(
                    torch.equal(a.kept, b.kept) for a, b in zip(found[step], zero[step], strict=True)
                )
    assert not any(torch.equal(a.kept, b.kept) for a, b in zip(zero[2], zero[3], strict=True))
    assert not any(torch.equal(a.kept, b.kept) for a, b in zip(zero[2][:22], zero[2][22:], strict=True))
    shares = {name: mask.float().mean().item() for name, mask in zero[2]}
    assert shares["0.blocks.1.drop_inner"] == pytest.approx(0.7, abs=0.05)


def _with_dropouts(mesh: Mesh, config: Config) -> str:
    with pytest.raises(UnsupportedOp) as caught:
        Trainer(mesh, config).engine  # noqa: B018
    return str(caught.value)


def test_dropouts_along_tensor_are_refused() -> None:
    config = config_of(SPEC, "tp=2", train={"global_batch_size": 1})
    for told in meshcomm.simulate(_with_dropouts, config, args=(config,)):
        assert "the dropout in a module that is split along tp would depend on the mesh" in told
        assert "blocks.0.drop, blocks.0.noise, blocks.1.drop" in told and "ModelSpec(dropped=" in told


def test_a_step_draws_the_same_whatever_came_before_it(pool: Pool) -> None:
    config = config_of(INNER, "pp=2 dp=2", train={"global_batch_size": 4})
    for (_, found, _), (_, alone, _) in zip(
        pool.run(masks, config, [1, 2, 3], ranks=4), pool.run(masks, config, [3], ranks=4), strict=True
    ):
        assert len(found[3]) == len(alone[3])
        for mine, its in zip(found[3], alone[3], strict=True):
            assert mine.name == its.name and torch.equal(mine.kept, its.kept)


def given(config: Config) -> list[float]:
    """The losses of a module that the caller builds."""
    with meshcomm.init(config) as mesh:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.5))
        trainer = Trainer(mesh, config, net, loss=F.mse_loss)
        torch.manual_seed(mesh.rank)
        for _ in range(3):
            trainer.step(torch.ones(4, 4), torch.zeros(4, 4))
        return [done.loss for done in trainer.results()]


def test_a_module_that_is_made_draws_by_role_too(pool: Pool) -> None:
    config = load_config(
        {
            "mesh": {"dims": {"dp": 2}, "device": "cpu", "timeout_s": 60.0, "reports": ""},
            "parallel": {"data": "dp"},
            "train": {"steps": 3, "global_batch_size": 8, "micro_batch_size": 4},
        }
    )
    losses, others = pool.run(given, config, ranks=2)
    assert losses == others == pool.run(given, config, ranks=2)[0]


def queued(config: Config) -> int:
    """The host syncs of two steps after three warm-up steps."""
    with emulated_nccl(), meshcomm.init(config) as mesh:
        engine = Trainer(mesh, config).engine
        tokens = torch.arange(engine.microbatches * 32).view(-1, 32) % 251
        for step in range(1, 4):
            engine.step(tokens, tokens, 1e-3, step)
        engine.results()
        before = host_syncs()
        with no_host_sync():
            for step in range(4, 6):
                engine.step(tokens, tokens, 1e-3, step)
        syncs = host_syncs() - before
        engine.results()
        return syncs


@pytest.mark.parity
def test_setting_generators_waits_for_nothing(pool: Pool) -> None:
    config = config_of(
        INNER, "dp=4", train={"dtype": "float32", "activation_checkpointing": True, "steps": 20}
    )
    config = load_config(config, [f"mesh.backend={NAME}", "mesh.validate_calls=2"])
    assert pool.run(queued, config, ranks=4) == [0] * 4


# -- generators of a user's own -------------------------------------------------------------------


class Int(enum.IntEnum):
    SEVEN = 7


def _seeds(mesh: Mesh) -> tuple[int, int, int, int]:
    drawn = torch.rand(3, generator=mesh.generator(7, 1, along="dp"))
    assert torch.equal(drawn, torch.rand(3, generator=mesh.generator(7, 1, along=("dp",))))
    assert mesh.generator(7, along="dp").initial_seed() == mesh.seed(7, along="dp")
    sevens: tuple[Any, ...] = (
        np.int64(7),
        np.uint8(7),
        np.array(7),
        7.0,
        np.float32(7),
        torch.tensor(7),
        torch.tensor(7.0),
    )
    for seven in (*sevens, Int.SEVEN):
        assert mesh.seed(seven, np.str_("noise")) == mesh.seed(7, "noise") != mesh.seed("7", "noise")
    assert mesh.generator(np.int32(7)).initial_seed() == mesh.seed(7) and mesh.seed(True) == mesh.seed(1)
    return mesh.seed(7), mesh.seed(7, along="dp"), mesh.seed(7, along=("tp", "dp")), mesh.seed(7, "noise")


def test_seeds_differ_along_what_is_named_and_are_equal_along_the_rest() -> None:
    layout = {"mesh": {"dims": {"pp": 2, "dp": 2, "tp": 2}, "device": "cpu"}}
    found: Any = meshcomm.simulate(_seeds, load_config(layout))
    assert len({each[0] for each in found}) == 1
    # rank = 4 pp + 2 dp + tp
    assert [each[1] for each in found] == [found[2 * (rank // 2 % 2)][1] for rank in range(8)]
    assert len({each[1] for each in found}) == 2
    assert [each[2] for each in found] == [found[rank % 4][2] for rank in range(8)]
    assert len({each[2] for each in found}) == 4
    assert len({seed for each in found for seed in each}) == 1 + 2 + 4 + 1
    assert all(0 <= seed < 2**63 for each in found for seed in each)
    # The number is the same in every release and on every mesh.
    assert found[0][0] == 2152027014443372885


def _refused(mesh: Mesh) -> tuple[str, str]:
    with pytest.raises(UnknownDim) as unknown:
        mesh.seed(0, along="tpp")
    with pytest.raises(ConfigError) as nothing:
        mesh.seed(along="tp")
    for part in (0.5, float("nan"), None, object(), (1, 2), torch.ones(2), np.float64(1e-3), 1j):
        with pytest.raises(ConfigError, match=r"(?s)neither an integer nor text.*given.*expected.*try"):
            mesh.seed(0, part)  # type: ignore[arg-type]
    return str(unknown.value), str(nothing.value)


def test_seeds_are_refused_where_they_mean_nothing() -> None:
    told: Any = meshcomm.simulate(_refused, load_config({"mesh": {"dims": {"tp": 2}, "device": "cpu"}}))
    assert "tpp" in told[0][0] and "a seed needs a key" in told[0][1]

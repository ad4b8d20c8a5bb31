"""Parameters that a step does not use: an error on every rank, or gradients of zeros as in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.models import ModelSpec
from meshcomm.parallel import whole
from meshcomm.train import Trainer
from tests.models import own
from tests.train.runs import config_on

STEPS, BATCH, TOKENS = 3, 4, 8


class Block(own.Block):
    """`spare` is used by no sample; `some` by those whose first token is even."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.spare, self.some = nn.Linear(width, width), nn.Linear(width, width)
        self.even = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """See own.Block."""
        x = super().forward(x)
        return x + self.some(x) * self.even if self.even.any() else x


class Net(own.Own):
    """The model. A block of a later stage gets no tokens, so there no sample is even."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(layers=2)
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """See own.Own."""
        self.blocks[0].even = (x[:, 0] % 2 == 0)[:, None, None]
        return super().forward(x)


def _forward(module: Any, x: Tensor, here: Any) -> Tensor:
    if here.stage.is_first:
        next(iter(here.layers)).even = (x[:, 0] % 2 == 0)[:, None, None]
        x = module.tokens(x) + module.places(here.positions)
    for block in here.layers:
        x = here.through(block, x=x)
    return module.logits(module.norm(x)) if here.stage.is_last else x


def spec() -> ModelSpec:
    return replace(own.spec(), module=Net, forward=_forward)


def config_of(dims: str, **train: Any) -> Config:
    sizes = {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 1, "dtype": "float64"}
    more = {"check": False, "schedule": "constant", "lr": 0.01, **train}
    base = {
        "mesh": {"device": "cpu", "timeout_s": 30.0},
        "data": {"seq_len": TOKENS},
        "train": {**sizes, **more},
    }
    return config_on(base, dims)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 256, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    # The samples of the first half of the ranks are odd: those ranks do not use `some`.
    ids[:, 0] = ids[:, 0] // 2 * 2 + torch.tensor([1, 1, 0, 0])
    return ids[:, :-1], ids[:, 1:]


def by_hand() -> dict[str, Tensor]:
    """The weights after all steps in plain torch, with zeros where there is no gradient."""
    model = Net().double()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, vectors], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(1, STEPS + 1):
        inputs, targets = tokens(step)
        logits = model(inputs)
        model.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    return {f"model.{name}": parameter for name, parameter in model.named_parameters()}


def trained(config: Config) -> list[dict[str, Tensor] | str]:
    """The weights of each rank after all steps, or its error, in the simulator."""

    def body(mesh: Mesh) -> dict[str, Tensor] | str:
        trainer = Trainer(mesh, config, spec())
        each = BATCH // trainer.engine.data_size
        here = slice(trainer.engine.data_coord * each, (trainer.engine.data_coord + 1) * each)
        try:
            for step in range(1, STEPS + 1):
                trainer.step(*(part[here] for part in tokens(step)))
        except TrainingError as error:
            return str(error)
        trainer.results()
        return {name: whole(value).clone() for name, value in trainer.engine.own_weights().items()}

    return meshcomm.simulate(body, config)


@pytest.mark.parametrize("dims", ["dp=2", "fsdp=2", "tp=2", "pp=2", "fsdp=2 tp=2"])
def test_zeros_are_gradients_of_zeros(dims: str) -> None:
    # The check before training does the same on a small copy.
    config = config_of(dims, on_unused="zero", check=dims == "tp=2")
    expected, names = by_hand(), set[str]()
    for rank in trained(config):
        assert isinstance(rank, dict)
        names |= rank.keys()
        for name, value in rank.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-9, atol=1e-11, msg=name)
    assert names == expected.keys()


@pytest.mark.parametrize("dims", ["dp=2", "tp=2", "pp=2", "dp=2 tp=2"])
def test_every_rank_names_what_is_not_used(dims: str) -> None:
    config = config_of(dims, on_nonfinite="skip")
    for text in trained(config):
        assert isinstance(text, str)
        assert "parameters got no gradient in step 1" in text and "blocks.0.spare.weight" in text, text
        # Only the ranks with odd samples do not use it.
        assert ("blocks.0.some.bias" in text) == ("dp" in dims)

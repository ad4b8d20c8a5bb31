"""Muon for matrices and AdamW for the rest update a model on a mesh as torch.optim updates it on one process."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import MeshcommError
from meshcomm.models import ModelSpec
from meshcomm.parallel import whole
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.models import own
from tests.train.runs import config_on

pytestmark = pytest.mark.long

STEPS, CUT, BATCH, TOKENS, LR, DECAY = 3, 2, 4, 8, 0.01, 0.1
MUON = {"lr": 2.0, "weight_decay": 0.5}
ARGS: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}
# A weight of three parts, linear layers, a router, and stacks of experts.
MATRICES = ("*.qkv.weight", "*.out.weight", "*.up.weight", "*.down.weight", "*.router", "*.experts.*")


class Experts(nn.Module):
    """Packed experts."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(count, width, 8) * 0.3)
        self.narrow = nn.Parameter(torch.randn(count, 8, width) * 0.3)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """(n, width), (n, slots), (n, slots) -> (n, width)."""
        inner = torch.einsum("nw,nswi->nsi", x, self.wide[chosen]).tanh()
        return torch.einsum("nsi,nsiw,ns->nw", inner, self.narrow[chosen], weights)


class Mixed(own.Block):
    """A block with experts beside its linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.router, self.experts = nn.Parameter(torch.randn(4, width)), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same shape."""
        x = super().forward(x)
        rows = x.flatten(0, 1)
        weights, chosen = (rows @ self.router.T).softmax(-1).topk(2)
        y: Tensor = self.experts(rows, chosen, weights)
        return x + y.view_as(x)


class Net(own.Own):
    """The model: two dense blocks, or two with experts."""

    def __init__(self, experts: bool = False) -> None:
        torch.manual_seed(3)
        super().__init__(layers=2)
        if experts:
            self.blocks = nn.ModuleList(Mixed(16, 4) for _ in range(2))


def spec(experts: bool) -> ModelSpec:
    more: dict[str, Any] = (
        {"experts": {"blocks.*.experts": {"wide": (2, 1), "narrow": (1, 1)}}} if experts else {}
    )
    return replace(own.spec(), module=partial(Net, experts), **more)


def config_of(dims: str, **train: Any) -> Config:
    sizes = {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 1, "dtype": "float64"}
    group = {**MUON, "optimizer": "muon", "optimizer_args": ARGS}
    matrices = MATRICES if "ep" in dims else MATRICES[:4]
    base: dict[str, Any] = {
        "mesh": {"device": "cpu", "timeout_s": 60.0},
        "data": {"seq_len": TOKENS},
        "train": {**sizes, "lr": LR, "weight_decay": DECAY, "schedule": "constant", "check": False,
                  "groups": dict.fromkeys(matrices, group), **train},
    }  # fmt: skip
    roles: dict[str, Any] = {}
    if "ep" in dims:
        base["mesh"] |= {"views": {"experts": {"edp": -1, "ep": 2, **({"tp": 2} if "tp" in dims else {})}}}
        roles["expert"] = "ep"
    return config_on(base, dims.removesuffix(" ep"), **roles)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 256, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def is_matrix(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in MATRICES)


def by_hand(experts: bool) -> dict[str, Tensor]:
    """The weights of the model after all steps, with torch.optim alone."""
    model = Net(experts).double()
    matrices: list[nn.Parameter] = []
    stacks: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
    for name, parameter in model.named_parameters():
        if is_matrix(name):
            # torch.optim.Muon takes no stacks: here each expert is a parameter.
            each = [parameter] if parameter.ndim == 2 else [nn.Parameter(part) for part in parameter.data]
            stacks += [(parameter, each)] if parameter.ndim > 2 else []
            matrices += each
    others = [parameter for name, parameter in model.named_parameters() if not is_matrix(name)]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(matrices, LR * MUON["lr"], DECAY * MUON["weight_decay"], **ARGS)
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    for step in range(1, STEPS + 1):
        inputs, targets = tokens(step)
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        for stack, each in stacks:
            assert stack.grad is not None
            for one, gradient in zip(each, stack.grad, strict=True):
                one.grad = gradient
        muon.step()
        adamw.step()
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def trained(config: Config, saved: Path | None = None, first: int = 0) -> dict[str, Tensor]:
    """The whole weights after all steps. saved: a checkpoint of step CUT, which is loaded if `first` is CUT."""
    assert config.parallel is not None
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, spec(config.parallel.expert is not None))
        if first and saved is not None:
            trainer.load(saved)
        each = BATCH // trainer.engine.data_size
        here = slice(trainer.engine.data_coord * each, (trainer.engine.data_coord + 1) * each)
        for step in range(first + 1, STEPS + 1):
            trainer.step(*(part[here] for part in tokens(step)))
            if step == CUT and saved is not None:
                trainer.save(saved)
        trainer.results()
        return {name: whole(value).clone() for name, value in trainer.engine.own_weights().items()}


def check(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    assert {name for rank in found for name in rank} == expected.keys()
    for rank in found:
        for name, value in rank.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-10, msg=name)


def ranks_of(config: Config) -> int:
    return config.mesh.layout(None).world_size


OTHERS = ("dp=2", "fsdp=4", "dp=2 fsdp=2", "cp=2 fsdp=2", "dp=4 ep", "fsdp=2 tp=2 ep")


@pytest.mark.parametrize(
    "dims",
    ["pp=2 tp=2", "fsdp=4 ep", *(pytest.param(dims, marks=pytest.mark.parity) for dims in OTHERS)],
)
def test_matrices_are_orthogonalised_as_on_one_process(pool: Pool, dims: str) -> None:
    config = config_of(dims)
    check(pool.run(trained, config, ranks=ranks_of(config)), by_hand("ep" in dims))


def test_a_run_goes_on_on_another_mesh(pool: Pool, tmp_path: Path) -> None:
    expected, here, there = by_hand(False), config_of("fsdp=2 tp=2"), config_of("pp=2 dp=1")
    check(pool.run(trained, here, tmp_path / "saved", ranks=4), expected)
    check(pool.run(trained, there, tmp_path / "saved", CUT, ranks=2), expected)


def told(config: Config, saved: Path, **more: Any) -> str:
    """The error of a Trainer that is made, and loads a checkpoint."""
    with meshcomm.init(config) as mesh:
        try:
            Trainer(mesh, config, spec(False), **more).load(saved)
        except MeshcommError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("groups", "more", "words"),
    [
        # The first pattern that matches applies, so this matrix was updated by Muon.
        (
            {"*.qkv.weight": {"optimizer": "adamw"}, **{key: {"optimizer": "muon"} for key in MATRICES[1:4]}},
            {},
            ("optimizer's state of blocks.0.qkv.weight", "that of Muon", "that of AdamW"),
        ),
        ({}, {}, ("the optimizer's state", "that of AdamW+Muon", "that of AdamW")),
        (
            {"blocks*": {"optimizer": "muon"}},
            {},
            ("Muon updates only matrices", "blocks.0.norm.weight", "adamw"),
        ),
        (
            {"*.qkv.weight": {"optimizer": "muon"}},
            {"optimizer": torch.optim.AdamW},
            ("two optimizers are given", "*.qkv.weight"),
        ),
        (
            {"*.qkv.weight": {"optimizer": "muon", "optimizer_args": {"ns_step": 3}}},
            {},
            ("torch.optim.Muon has no argument ns_step", "ns_steps"),
        ),
        ({}, {"optimizer": torch.optim.LBFGS}, ("LBFGS cannot take a step from gradients only",)),
    ],
)
def test_mistakes_are_named_on_every_rank(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, groups: Any, more: Any, words: tuple[str, ...]
) -> None:
    saved = tmp_path_factory.getbasetemp() / "of_muon"
    if not saved.exists():
        pool.run(trained, config_of("dp=2"), saved, ranks=2)
    for text in pool.run(partial(told, **more), config_of("dp=2", groups=groups), saved, ranks=2):
        assert all(word in text for word in words), text

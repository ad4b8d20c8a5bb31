"""Linear layers multiply in float8 as torchao converts them on one process. On a CPU, torchao emulates the kernels."""

from __future__ import annotations

import dataclasses
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.parallel import build
from meshcomm.parallel.float8 import to_float8
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.parallel.test_loss_scale import BATCH, VOCAB, Net, batch, config_on, made, spec


def plain(recipe: str | None) -> list[float]:
    """The losses on one process, of torchao's own conversion. As on each mesh, a product has two of the four samples."""
    net = made()
    if recipe is not None:
        torchao = pytest.importorskip("torchao.float8")
        config = dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        torchao.convert_to_float8_training(
            net, module_filter_fn=lambda _, name: name != "head", config=config
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    losses = []
    for step in range(1, 5):
        optimizer.zero_grad()
        total = 0.0
        for tokens, targets in zip(*(part.split(2) for part in batch(step + 20)), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) * (2 / BATCH)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
    return losses


def trained(config: Config, emulate: bool) -> list[float] | str:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, meshcomm.init(config) as mesh:
        if emulate:
            patch.setattr(build, "to_float8", partial(to_float8, emulate=True))
        try:
            trainer = Trainer(mesh, config, spec())
            engine = trainer.engine
            for step in range(1, 5):
                size = BATCH // engine.data_size
                mine = slice(engine.data_coord * size, (engine.data_coord + 1) * size)
                trainer.step(*(part[mine] for part in batch(step + 20)))
            return [done.loss for done in trainer.results()]
        except MeshcommError as error:
            return str(error)


def narrow(dims: str, **more: Any) -> Config:
    settings = {"compute_dtype": "bfloat16", "micro_batch_size": 2, "lr": 0.01, "float8": "rowwise", **more}
    return config_on(dims, **settings)


@pytest.mark.parametrize(
    ("dims", "recipe", "tolerance"),
    [
        ("dp=2", "rowwise", 1e-4),
        ("pp=2", "rowwise", 1e-4),
        # A rank scales the rows of its part of a row-parallel layer.
        ("tp=2", "rowwise", 2e-4),
        # Weights are gathered in bfloat16, and rounded twice.
        ("fsdp=2", "tensorwise", 6e-4),
    ],
)
def test_losses_are_those_of_torchaos_conversion(
    pool: Pool, dims: str, recipe: str, tolerance: float
) -> None:
    pytest.importorskip("torchao")
    wanted, wide = plain(recipe), plain(None)
    assert max(abs(a / b - 1) for a, b in zip(wide, wanted, strict=True)) > 4e-4
    for found in pool.run(trained, narrow(dims, float8=recipe), True, ranks=2):
        assert found == pytest.approx(wanted, rel=tolerance)


def test_the_head_routers_and_odd_sizes_are_left_out() -> None:
    pytest.importorskip("torchao")
    net = Net()
    net.blocks[0].down, net.blocks[1].gate = torch.nn.Linear(32, 24), torch.nn.Linear(16, 16)
    names = to_float8(net, "rowwise", torch.device("cpu"), VOCAB, emulate=True)
    assert names == ["blocks.0.up", "blocks.1.up", "blocks.1.down"]
    assert type(net.blocks[1].down).__name__ == "Float8Linear" and type(net.head) is torch.nn.Linear


def test_it_is_refused_where_it_cannot_run(pool: Pool) -> None:
    torchao = find_spec("torchao") is not None
    for dims, more, emulate, words in (
        ("dp=2", {}, False, "this device cannot multiply in float8" if torchao else "meshcomm[float8]"),
        ("dp=2", {"micro_batch_size": 1}, True, "8 tokens of a microbatch"),
    ):
        for error in pool.run(trained, narrow(dims, **more), emulate, ranks=2):
            assert isinstance(error, str) and words in error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.compute_dtype=float16"], "no effect with compute_dtype"),
        (["train.compute_dtype="], "no effect"),
        (['parallel.options.schedule="zero_bubble"', "parallel.options.stages_per_rank=2"], "zero_bubble"),
        (['model={build="a:b", lora={rank=16}}'], "cannot be combined with model.lora"),
    ],
)
def test_combinations_without_effect_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(narrow("pp=2"), overrides)
    assert "float8" in str(caught.value) and words in str(caught.value)

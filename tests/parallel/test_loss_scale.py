"""In float16, the loss scale, the skipped steps and the losses are those of plain torch with a GradScaler."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.config.write import whole_toml
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.models import ModelSpec
from meshcomm.parallel import torch_private
from meshcomm.parallel.tensor import whole
from meshcomm.testing import Pool
from meshcomm.train import Callback, Trainer
from meshcomm.train import run as train
from tests.sizes import model_of, train_of
from tests.train.runs import metrics, roles_of, sizes_of

WIDTH, VOCAB, LENGTH, BATCH, STEPS, INTERVAL = 16, 48, 8, 4, 12, 3
# The embedding of this token makes gradients overflow, but not the loss.
LARGE, PLANTED = 7, (5, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        # A buffer that forward passes change, which a skipped step must not.
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def made() -> Net:
    torch.manual_seed(5)
    net = Net()
    with torch.no_grad():
        net.embed.weight[LARGE] *= 2000
        net.head.weight *= 0.02
    return net


def value(name: str, shape: tuple[int, ...]) -> Tensor:
    return dict(made().named_parameters())[name].detach()


def spec() -> ModelSpec:
    return ModelSpec(
        module=made,
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        layers="blocks",
        first=("embed",),
        last=("head",),
        split={"embed": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column"},
        initialise=value,
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB - 1, (BATCH, LENGTH), generator=draw)
    tokens[tokens == LARGE] += 1
    if step in PLANTED:
        tokens[0, 0] = LARGE
    return tokens, torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw)


def plain() -> tuple[list[tuple[float, float, bool]], list[Tensor]]:
    """Losses, scales and whether the step was skipped, and the weights and buffers, on one process without meshcomm."""
    net = made()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    found = []
    for step in range(1, STEPS + 1):
        tokens, targets = batch(step)
        calls = [block.calls.clone() for block in net.blocks]
        with torch.autocast("cpu", torch.float16):
            logits = net(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale
        if skipped:
            for block, before in zip(net.blocks, calls, strict=True):
                block.calls.copy_(before)
        found.append((loss.item(), scale, skipped))
    # AdamW's first updates hardly depend on gradients, so weights show which steps were applied.
    return found, [x.detach() for x in net.parameters()]


def config_on(dims: str, out: Path | None = None, **more: Any) -> Config:
    sizes = sizes_of(dims)
    copies = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    settings = train_of(STEPS, BATCH, BATCH // copies // 2, lr=1e-3, schedule="constant", check=False)
    settings |= {"clip_norm": 0.5, "compute_dtype": "float16"} | ({} if out is None else {"out": str(out)})
    return load_config(
        {
            "mesh": {"dims": sizes, "device": "cpu", "reports": ""},
            "parallel": roles_of(sizes),
            "data": {"seq_len": LENGTH},
            "train": settings | more,
        }
    )


Found = tuple[list[tuple[float, float, bool]], dict[str, Tensor], float]


def trained(config: Config, folder: Path | None, parts: tuple[range, ...]) -> Found:
    """The same with meshcomm. parts: the steps of each trainer, which loads what the one before has saved."""
    torch.set_num_threads(1)
    found = []
    with pytest.MonkeyPatch.context() as patch, meshcomm.init(config) as mesh:
        patch.setattr(torch_private, "GROWTH_INTERVAL", INTERVAL)
        for number, steps in enumerate(parts):
            trainer = Trainer(mesh, config, spec())
            if number:
                trainer.load(f"{folder}/{number}")
            engine = trainer.engine
            for step in steps:
                size = BATCH // engine.data_size
                mine = slice(engine.data_coord * size, (engine.data_coord + 1) * size)
                trainer.step(*(part[mine] for part in batch(step)))
            found += trainer.results()
            if folder is not None:
                trainer.save(f"{folder}/{number + 1}")
        weights = {name: whole(x).detach().clone() for name, x in engine.named_parameters()}
        calls = sum(float(x) for name, x in engine.modules.named_buffers() if name.endswith("calls"))
        calls /= sum(name.endswith("calls") for name, _ in engine.modules.named_buffers())
    return [(done.loss, float(done.loss_scale or 0), bool(done.fault)) for done in found], weights, calls


@pytest.mark.parametrize("dims", ["dp=2", "fsdp=2", "tp=2", "pp=2", "dp=2 tp=2"])
def test_scales_and_skipped_steps_are_those_of_a_grad_scaler(pool: Pool, dims: str, tmp_path: Path) -> None:
    wanted, weights = plain()
    skipped = [skip for _, _, skip in wanted]
    # The planted overflows and more than one scale, up and down.
    assert skipped[PLANTED[0] - 1] and not all(skipped)
    assert len({scale for _, scale, _ in wanted}) > 2
    ranks = math.prod(sizes_of(dims).values())
    # At the end of the first part, the scale is not the first one.
    parts = (range(1, 5), range(5, STEPS + 1))
    names = [name for name, _ in made().named_parameters()]
    for found, of_rank, calls in pool.run(trained, config_on(dims), tmp_path, parts, ranks=ranks):
        assert [row[1:] for row in found] == [row[1:] for row in wanted]
        assert [row[0] for row in found] == pytest.approx([row[0] for row in wanted], rel=2e-3)
        # Two microbatches in each applied step.
        assert calls == 2 * skipped.count(False)
        for name, x in zip(names, weights, strict=True):
            if name in of_rank:
                assert torch.allclose(of_rank[name], x, atol=2e-3)


def infinite_at_two(config: Config) -> tuple[int, str]:
    """The number of applied steps and the error of a trainer whose second loss is infinite."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return mean * (math.inf if torch.equal(targets, batch(2)[1][: len(targets)]) else 1.0)

    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, spec(), loss=loss)
        for step in (1, 2):
            trainer.step(*batch(step))
        try:
            return len(trainer.results()), ""
        except TrainingError as error:
            return 1, str(error)


def test_a_loss_that_is_not_finite_ends_the_run(pool: Pool) -> None:
    for how, wanted in (("stop", "the loss of step 2 is inf"), ("skip", "")):
        config = config_on("dp=1", on_nonfinite=how, micro_batch_size=BATCH)
        applied, error = pool.run(infinite_at_two, config, ranks=1)[0]
        assert applied == (1 if wanted else 2) and wanted in error


def run_built_in(config: Config) -> None:
    with meshcomm.init(config) as mesh:
        train(mesh, config, Callback())


def test_metrics_have_the_scale_and_a_run_of_overflows_ends(pool: Pool, tmp_path: Path) -> None:
    sizes = whole_toml(model_of(1, 16, 2, 2, 16))
    for scale, error in ((2.0, ""), (2.0**60, f"train.loss_scale = {2.0**49:g}, if larger gradients")):
        out = tmp_path / f"{scale:g}"
        config = config_on("dp=1", out, micro_batch_size=BATCH, loss_scale=scale)
        config = load_config(config, [f"model={sizes}", "data.max_bytes=4000"])
        with pytest.raises(AssertionError, match=re.escape(error)) if error else nullcontext():
            pool.run(run_built_in, config, ranks=1)
        lines = metrics(out)
        assert [line["loss_scale"] for line in lines] == [
            scale / 2 ** (step if error else 0) for step in range(len(lines))
        ]
        assert [bool(line.get("fault")) for line in lines] == [bool(error)] * (10 if error else STEPS)


def test_a_scale_without_float16_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect with compute_dtype"):
        config_on("dp=1", compute_dtype="bfloat16", loss_scale=2.0)

"""examples/finetune_llama and finetune_chat from the first command to the last: make, train, export, open."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.config import Config, load_config
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.forked_jobs import Job

pytestmark = pytest.mark.long

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, CHAT = EXAMPLES / "finetune_llama", EXAMPLES / "finetune_chat"


# Fewer steps and more evaluations. All other settings are the configuration's.
FEWER = [
    *("train.steps=6", "train.eval_every=2", "train.checkpoint_every=6", "train.warmup_steps=1"),
    "mesh.timeout_s=60",
]


def trained(config: Config, samples: Tensor) -> Tensor | None:
    """Train. On the last stage, return the logits of this rank's samples, gathered along tp."""
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        trainer.run()
        seen: list[Tensor] = []

        def see(module: Any, inputs: Any, output: Tensor) -> None:
            seen.append(output.detach())

        hook = trainer.modules[-1].register_forward_hook(see)
        mine = samples.chunk(mesh.data_world_size)[mesh.data_rank]
        trainer.evaluate([(mine, mine)])
        hook.remove()
        if mesh.coord("pp") != mesh.size("pp") - 1:
            return None
        return mesh.all_gather("tp", torch.cat(seen), axis=-1)


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_the_example_from_its_first_command_to_its_last(pool: Pool, tmp_path: Path) -> None:
    def called(script: str, *arguments: str) -> str:
        code, out, err = Job(pool, tmp_path, str(EXAMPLE / script), *arguments).finish()
        assert code == 0, err
        return out

    assert "172,608 parameters, 384 tokens" in called("make_model.py", "1")
    shutil.copy(EXAMPLE / "finetune.toml", tmp_path)
    config = load_config(tmp_path / "finetune.toml", [*FEWER, f"train.out={tmp_path / 'run'}"])
    assert config.model is not None and config.model.vocab_size == 384 and config.model.tied_embeddings
    assert config.mesh.dims == {"pp": 2, "dp": 2, "tp": 2}

    samples = torch.randint(384, (16, 64), generator=torch.Generator().manual_seed(0))
    parts = [each for each in pool.run(trained, config, samples, timeout_s=200.0) if each is not None]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    # Before training, all 384 tokens are about equally likely.
    assert math.log(384) > held_out[2] > held_out[4] > held_out[6]

    with chdir(tmp_path):
        result = CliRunner().invoke(app, ["export", "run", "tuned", "--pretrained"])
    assert result.exit_code == 0, result.output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    with torch.no_grad():
        theirs = model(samples).logits
    # Ranks 4 to 7 are the last stage: dp=0 tp=0, dp=0 tp=1, dp=1 tp=0, dp=1 tp=1.
    assert len(parts) == 4 and torch.equal(parts[0], parts[1])
    torch.testing.assert_close(torch.cat([parts[0], parts[2]]), theirs, rtol=1e-4, atol=1e-5)

    loss, sentence = called("evaluate.py", "tuned").splitlines()
    # The script leaves out one token of each sample.
    assert abs(float(loss.removeprefix("tuned: loss on held_out.txt ")) - held_out[6]) < 0.05
    assert sentence.startswith("tuned: On a mesh of pp 2 dp 2 tp 2 rank")
    written = (EXAMPLE / "finetune.toml").read_text().splitlines()
    assert (
        f"A config of {len([line for line in written if line])} lines" in (EXAMPLE / "README.md").read_text()
    )


@pytest.mark.parity
@pytest.mark.timeout(300)
def test_a_model_fine_tuned_on_conversations_answers(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft")

    def called(script: str, *arguments: str) -> str:
        code, out, err = Job(pool, tmp_path, str(CHAT / script), *arguments).finish()
        assert code == 0, err
        return out

    def right(folder: str) -> int:
        *_, last = called("ask.py", folder).splitlines()
        return int(last.removeprefix(f"{folder}: ").partition(" of 20 answers")[0])

    assert "180,800 parameters; chat.jsonl: 100 conversations" in called("make_model.py")
    assert right("llama") == 0
    shutil.copy(CHAT / "chat.toml", tmp_path)
    config = load_config(tmp_path / "chat.toml", [f"train.out={tmp_path / 'run'}"])
    pool.run(run_alone, config, ranks=2, timeout_s=200.0)
    with chdir(tmp_path):
        result = CliRunner().invoke(app, ["export", "run", "tuned", "--merged"])
    assert result.exit_code == 0, result.output
    assert right("tuned") >= 15
    written = (CHAT / "chat.toml").read_text().splitlines()
    lines = len([line for line in written if line])
    assert f"A config of {lines} lines" in (CHAT / "README.md").read_text()


def run_alone(config: Config) -> None:
    with meshcomm.init(config) as mesh:
        Trainer(mesh, config).run()

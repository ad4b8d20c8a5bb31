"""Models are read from a transformers folder and exported to one: on every mesh, and through a checkpoint and another mesh."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, MeshcommError, TrainingError
from meshcomm.models.weights import INDEX, SINGLE
from meshcomm.testing import Pool
from meshcomm.train import Callback, Trainer, export, run, save_pretrained
from meshcomm.train.checkpoint.folder import find_checkpoint
from meshcomm.train.checkpoint.lock import Lock
from meshcomm.train.export import export_pretrained
from tests.models.families import folder_of

pytestmark = pytest.mark.long

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "vocab_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "from", tied=True)


def made(path: Path, **options: Any) -> Path:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=options.get("tied", False))
    model = transformers.AutoModelForCausalLM.from_config(config).to(options.get("dtype", torch.float32))
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def config_of(
    folder: Path,
    out: Path,
    dims: dict[str, int],
    shard: bool = False,
    views: dict[str, Any] | None = None,
    **train: Any,
) -> Config:
    return load_config(
        {
            "mesh": {"dims": {"pp": 1, "dp": 1, "tp": 1} | dims, "device": "cpu", "timeout_s": 60.0}
            | ({"views": views} if views else {}),
            "parallel": {"pipeline": "pp", "shard" if shard else "data": "dp", "tensor": "tp"}
            | ({"expert": "ep"} if views else {}),
            "model": {"pretrained": str(folder), "dropout": 0.0},
            "data": {"seq_len": 16, "max_bytes": 100_000, "tokenizer": "bytes"},
            "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 1, "out": str(out), **train},
        }
    )


def logits(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(40).reshape(2, 20) * 7 % 256
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def through(config: Config, target: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        save_pretrained(trainer, target, dtype=dtype, shard_bytes=shard_bytes)


_EXPERT = {"expert": {"pp": 2, "edp": 1, "ep": 2, "tp": 1}}
# Fused and transposed weights; folders that name each expert, on a mesh with a dim for experts and without.
OTHERS = [
    pytest.param("gpt2", {}, marks=pytest.mark.parity),
    pytest.param("qwen3_moe", {}, marks=pytest.mark.parity),
    ("mixtral", _EXPERT),
    pytest.param("qwen3_moe", _EXPERT, marks=pytest.mark.parity),
    pytest.param("mixtral", {}, marks=pytest.mark.parity),
]


@pytest.mark.parametrize(("family", "views"), OTHERS, ids=str)
@pytest.mark.deep
def test_every_layout_of_weights_survives(
    pool: Pool, tmp_path: Path, family: str, views: dict[str, Any]
) -> None:
    source, out = folder_of(family, tmp_path / "from", weights=True), tmp_path / "run"
    dims = {"pp": 2, "dp": 2} if views else {"pp": 2, "tp": 2}
    pool.run(through, config_of(source, out, dims, views=views), tmp_path / "to", None, 60_000, ranks=4)
    assert torch.equal(logits(tmp_path / "to"), logits(source))
    assert logits(source).abs().max() > 0.1
    theirs, ours = held(source), held(tmp_path / "to")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    # The weights also survive a checkpoint that one process exports.
    still = {"checkpoint_every": 1, "steps": 1, "lr": 1e-30}
    pool.run(trained, config_of(source, out, dims, views=views, **still), None, ranks=4)
    export_pretrained(out, tmp_path / "left")
    assert torch.equal(logits(tmp_path / "left"), logits(source))


def held(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    found: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("shard_bytes", [10_000_000, 9_000])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dims", "shard"), [({"pp": 2, "tp": 2}, False), ({"dp": 2, "tp": 2}, True)])
@pytest.mark.deep
def test_a_folder_comes_out_of_a_mesh_as_it_went_in(
    pool: Pool, tmp_path: Path, dims: dict[str, int], shard: bool, tied: bool, shard_bytes: int
) -> None:
    source, target = made(tmp_path / "from", tied=tied), tmp_path / "to"
    config = config_of(source, tmp_path / "run", dims, shard)
    pool.run(through, config, target, None, shard_bytes, ranks=4)
    assert torch.equal(logits(target), logits(source))
    files = sorted(path.name for path in target.glob("*.safetensors"))
    several = shard_bytes < 100_000
    assert (len(files) > 1) == several and (target / INDEX).is_file() == several
    assert (files == [SINGLE]) != several
    assert all(path.stat().st_size < shard_bytes + 10_000 for path in target.glob("*.safetensors"))
    assert (target / "tokenizer.json").read_text() == "{}" and (target / "generation_config.json").is_file()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.deep
def test_bfloat16_becomes_float32_and_bfloat16_again(pool: Pool, tmp_path: Path) -> None:
    source, target = made(tmp_path / "from", dtype=torch.bfloat16), tmp_path / "to"
    config = config_of(source, tmp_path / "run", {"pp": 2, "tp": 2})
    pool.run(through, config, target, torch.bfloat16, 10_000_000, ranks=4)
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(logits(target), logits(source)) and logits(target).dtype == torch.bfloat16


def trained(config: Config, target: Path | None) -> list[str]:
    with meshcomm.init(config) as mesh:
        known = Known()
        run(mesh, config, known)
        if target is not None:
            trainer = Trainer(mesh, config)
            trainer.load(find_checkpoint(Path(config.train.out if config.train else "")))
            save_pretrained(trainer, target)
        return known.changes


class Known(Callback):
    changes: list[str]

    def on_start(self, start: Any) -> None:
        self.changes = [] if start.resumed is None else list(start.resumed.differences)


@pytest.mark.parity
def test_trained_resumed_on_another_mesh_and_exported(pool: Pool, folder: Path, tmp_path: Path) -> None:
    out, live, left = tmp_path / "run", tmp_path / "live", tmp_path / "left"
    pool.run(trained, config_of(folder, out, {"pp": 2, "tp": 2}, checkpoint_every=2), None, ranks=4)
    assert export_pretrained(out, tmp_path / "two").step == 2
    # The resumed run reads its weights from the checkpoint, so the source folder may be moved.
    moved = folder.rename(tmp_path / "moved")
    (moved / SINGLE).unlink()
    more = {"steps": 4, "checkpoint_every": 2, "resume": True}
    changes = pool.run(trained, config_of(moved, out, {"dp": 2, "tp": 2}, True, **more), live, ranks=4)
    assert any("model.pretrained: " in line for line in changes[0]), changes[0]
    result = CliRunner().invoke(app, ["export", str(out), str(left), "--pretrained", "--shard-gb", "0.00001"])
    assert result.exit_code == 0, result.output
    assert f"{out}/checkpoints/step-000004 -> {left}: step 4, 38 tensors, " in result.output.replace("\n", "")
    assert torch.equal(logits(left), logits(live)) and (left / INDEX).is_file()
    assert not torch.equal(logits(left), logits(tmp_path / "two"))
    assert (left / "tokenizer.json").is_file()
    half = tmp_path / "half"
    result = CliRunner().invoke(app, ["export", str(out), str(half), "--pretrained", "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    with safe_open(half / SINGLE, "pt") as file:  # type: ignore[no-untyped-call]
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_a_checkpoint_of_another_model_is_refused(pool: Pool, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = config_of(folder, out, {"dp": 2}, checkpoint_every=2)
    pool.run(trained, config, None, ranks=2)
    lock = Lock.read(find_checkpoint(out))
    assert lock.config["pretrained"]["rope_parameters"]["rope_theta"] == 10000.0
    said = json.loads((folder / "config.json").read_text())
    other = shutil.copytree(folder, tmp_path / "other")
    said["rms_norm_eps"] = 0.5
    said["transformers_version"] = "9"
    (other / "config.json").write_text(json.dumps(said))
    config = config_of(other, out, {"dp": 2}, checkpoint_every=2, steps=4, resume=True)
    for what, given, _ in pool.run(refused, config, ranks=2):
        assert what.endswith("trains something different from the checkpoint: pretrained.rms_norm_eps")
        assert "pretrained.rms_norm_eps = 0.5, and 1e-06 in" in given


def refused(config: Config, target: Path | None = None) -> tuple[str, str, str]:
    with meshcomm.init(config) as mesh:
        try:
            if target is None:
                run(mesh, config, Callback())
            else:
                save_pretrained(Trainer(mesh, config), target)
        except MeshcommError as error:
            return error.what, error.given or "", error.hint or ""
    return "", "", ""


def test_a_rank_that_cannot_write_is_an_error_on_every_rank(pool: Pool, folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path / "run", {"pp": 2, "tp": 2})
    (tmp_path / "there").mkdir()
    for rank, (what, given, hint) in enumerate(pool.run(refused, config, tmp_path / "there", ranks=4)):
        assert (
            what.endswith(f"{tmp_path}/there exists already")
            and "a folder" in given
            and "another name" in hint
        )
        assert what.startswith("rank 0 (pp=0 dp=0 tp=0) could not write") == (rank > 0)
    # The first rank fails in the middle of a file.
    for what, given, _ in pool.run(failing, config, tmp_path / "to", ranks=4):
        assert f"could not write {tmp_path}/to" in what and "OSError: no space" in given
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from", "there"]


def of_two_folders(folders: list[Path], out: Path) -> str:
    """The error of ranks whose folders have different weights. Another path of the same weights is no difference."""
    with meshcomm.init(config_of(folders[0], out, {"dp": 2})) as mesh:
        assert Trainer(mesh, config_of(folders[-mesh.rank], out, {"dp": 2})).modules
        with pytest.raises(TrainingError) as caught:
            assert Trainer(mesh, config_of(folders[mesh.rank], out, {"dp": 2})).modules
    return str(caught.value)


def test_ranks_with_other_weights_in_their_folders_are_refused(
    pool: Pool, folder: Path, tmp_path: Path
) -> None:
    for name in ("other", "copy"):
        shutil.copytree(folder, tmp_path / name)
    weights = load_file(folder / SINGLE)
    weights["model.layers.2.mlp.up_proj.weight"] += 1
    save_file(weights, tmp_path / "other" / SINGLE)
    folders = [folder, tmp_path / "other", tmp_path / "copy"]
    for text in pool.run(of_two_folders, folders, tmp_path / "run", ranks=2):
        assert text.startswith("ranks disagree on model.pretrained_sha256")
        assert "folders with the same model and weights on every host" in text


def test_what_a_killed_save_left_is_no_hindrance(pool: Pool, folder: Path, tmp_path: Path) -> None:
    left = tmp_path / ".to.part"
    left.mkdir()
    (left / SINGLE).write_bytes(b"half")
    config = config_of(folder, tmp_path / "run", {"dp": 2})
    pool.run(through, config, tmp_path / "to", None, 10_000_000, ranks=2)
    assert torch.equal(logits(tmp_path / "to"), logits(folder))
    # It may be the draft of an export that is still running.
    assert (left / SINGLE).read_bytes() == b"half"


def own(config: Config, target: Path) -> str:
    """The error of exporting a program's own module despite [model] pretrained."""
    with meshcomm.init(config) as mesh, pytest.raises(ConfigError) as caught:
        save_pretrained(Trainer(mesh, config, torch.nn.Linear(2, 2)), target)
    return caught.value.what


def test_a_module_of_ones_own_is_refused(pool: Pool, folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path / "run", {})
    (said,) = pool.run(own, config, tmp_path / "to", ranks=1)
    assert said == "the model of this trainer cannot be written in transformers' format"
    assert not (tmp_path / "to").exists()


def failing(config: Config, target: Path) -> tuple[str, str, str]:
    def full(*_: Any) -> None:
        raise OSError("no space")

    with patch.object(export, "write_file", full):
        return refused(config, target)


def test_what_cannot_be_exported_so_is_said(pool: Pool, tmp_path: Path) -> None:
    config = load_config(
        "configs/quickstart.toml",
        ["mesh.dims={pp=1,dp=1,tp=1}", "train.steps=1", "train.warmup_steps=0", "train.checkpoint_every=1"],
    )
    config = load_config(
        config, [f"train.out={tmp_path / 'run'}", "data.max_bytes=100000", "data.seq_len=32"]
    )
    pool.run(trained, config, None, ranks=1)
    with pytest.raises(ConfigError, match="cannot be written in transformers' format"):
        export_pretrained(tmp_path / "run", tmp_path / "to")
    for options in (["--dtype", "bfloat16"], ["--shard-gb", "1"]):
        result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "to"), *options])
        assert result.exit_code == 2 and f"{options[0]} without --pretrained" in result.stderr
    result = CliRunner().invoke(app, ["export", str(tmp_path), "to", "--pretrained", "--dtype", "bfloat"])
    assert result.exit_code == 2 and 'did you mean "bfloat16"' in result.stderr, result.stderr

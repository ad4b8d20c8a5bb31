"""Models of transformers train on every mesh as on one process: loss, norm and weights, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcomm.config import Config, load
from meshcomm.train.parity import Difference, compare, in_float64, record, reference

transformers = pytest.importorskip("transformers")

import meshcomm  # noqa: E402
from meshcomm.testing import Pool  # noqa: E402
from meshcomm.train.parity import Record  # noqa: E402

MESHES = [
    "dp = 2, tp = 2",
    "pp = 2, tp = 2",
    "pp = 2, cp = 2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def config_of(folder: Path, dims: str) -> Config:
    sizes = dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    sizes |= {name.strip(): int(size) for name, size in (pair.split("=") for pair in dims.split(","))}
    parallel = {"pipeline": "pp", "data": "dp", "context": "cp", "tensor": "tp"}
    return load(
        {
            "mesh": {"dims": sizes, "device": "cpu", "timeout_s": 60.0},
            "parallel": parallel,
            "model": {"pretrained": str(folder)},
            "data": {"sequence": 32, "max_bytes": 200_000},
            "train": {"steps": 10, "global_batch": 8, "microbatch": 2, "clip_norm": 1.0},
        }
    )


def recorded(config: Config, steps: int) -> Record:
    with meshcomm.init(config) as mesh:
        return record(mesh, config, steps)


@pytest.mark.parametrize("dims", MESHES)
def test_llama_is_the_same_on_every_mesh(pool: Pool, folder: Path, dims: str) -> None:
    config, _ = in_float64(config_of(folder, dims))
    (alone,) = pool.run(recorded, reference(config), 10, ranks=1)
    ranks = pool.run(recorded, config, 10, ranks=4)
    found: list[Difference] = [each for rank in ranks for each in compare(rank, alone)]
    assert max(each.relative for each in found) < 1e-9
    assert {name for rank in ranks for name in rank.weights} == set(alone.weights)

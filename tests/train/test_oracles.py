"""Kinds of models on kinds of meshes, beside the programs in plain torch in tests/oracles: equal to 1e-9, or refused."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.models import ModelSpec
from meshcomm.parallel import whole
from meshcomm.parallel.tree import with_tensors
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.oracles import vision
from tests.oracles.kind import SAMPLES, SEED, STEPS, alone
from tests.train import oracle_cases_b
from tests.train.oracle_case import Case
from tests.train.runs import parallel_of, roles_of, sizes_of

MESHES: Final = ("dp=2", "fsdp=2", "tp=2", "pp=2", "cp=2", "dp=2 tp=2")


def vit() -> ModelSpec:
    block = {
        **{f"blocks.*.{name}": "column" for name in ("query", "key", "value", "up")},
        **{f"blocks.*.{name}": "row" for name in ("out", "down")},
    }
    return ModelSpec(module=vision.ViT, layers="blocks", split=block, loss=vision.VIT.loss)


CASES: dict[str, Case] = {
    "vision transformer": Case(
        vision.VIT, vit, {"pp=2": ("parallel.pipeline",), "cp=2": ("parallel.context",)}
    ),
    "batch norms": Case(
        vision.CONVNET,
        refused={
            "tp=2": ("tensor_parallel",),
            "pp=2": ("parallel.pipeline",),
            "cp=2": ("parallel.context",),
            "dp=2 tp=2": ("tensor_parallel",),
        },
        micro=8,
    ),
}
CASES |= oracle_cases_b.CASES


def config_of(dims: str, case: Case, out: str) -> Config:
    sizes = sizes_of(dims)
    copies = math.prod(size for name, size in sizes.items() if name in ("dp", "fsdp"))
    # A pipeline needs a microbatch for each stage.
    largest = SAMPLES // (copies * sizes.get("pp", 1))
    return load_config(
        {
            "mesh": {"dims": sizes, "device": "cpu", "timeout_s": 60.0, "reports": ""},
            "parallel": parallel_of(**roles_of(sizes)),
            "data": {"seq_len": 8},
            "train": {
                "steps": STEPS,
                "global_batch_size": SAMPLES,
                "micro_batch_size": min(case.micro, largest),
                "lr": 0.1,
                "schedule": "constant",
                "dtype": "float64",
                "seed": SEED,
                "out": out,
                **case.train,
            },
        }
    )


def trained(config: Config, name: str) -> tuple[list[float], dict[str, Tensor]] | str:
    """Like `alone`, on a mesh; the text of the error."""
    case = CASES[name]
    kind = case.kind
    with meshcomm.init(config) as mesh:
        try:
            torch.manual_seed(SEED)
            if case.on_mesh is not None:
                given = case.on_mesh(mesh)
            else:
                given = kind.module() if case.given is None else case.given()
            loss = None if isinstance(given, ModelSpec) else kind.loss
            trainer = Trainer(mesh, config, given, loss=loss, optimizer=kind.optimizer)
            engine = trainer.engine
            for step in range(1, STEPS + 1):
                inputs, targets = kind.batch(step)
                size, coord = engine.data_size, engine.data_coord

                def mine(x: Tensor, size: int = size, coord: int = coord) -> Tensor:
                    return x.chunk(size)[coord] if x.ndim and len(x) == SAMPLES else x

                trainer.step(*with_tensors(mine, (inputs, targets)))
            losses = [done.loss for done in trainer.results()]
            state = {key: whole(value).clone() for key, value in trainer.state().items()}
        except MeshcommError as error:
            return str(error)
    return losses, {key[6:]: value for key, value in state.items() if key.startswith("model.")}


def difference(found: Any, expected: Any) -> float:
    """The largest difference between losses, weights and buffers, relative to the largest element of each."""
    (losses, state), (theirs, values) = found, expected
    off = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, theirs, strict=True))
    for name, value in state.items():
        assert value.shape == values[name].shape, name
        most = max(1e-3, float(values[name].abs().max()))
        off = max(off, float((value - values[name]).abs().max()) / most)
    return off


@pytest.mark.parametrize("dims", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_as_on_one_process_or_is_refused(
    pool: Pool, name: str, dims: str, tmp_path: Path
) -> None:
    case = CASES[name]
    config = config_of(dims, case, str(tmp_path))
    refused = case.refused.get(dims)
    expected = alone(case.kind)
    for found in pool.run(partial(trained), config, name, ranks=math.prod(sizes_of(dims).values())):
        if refused is not None:
            assert isinstance(found, str), "was trained"
            assert all(word in found for word in refused), found
            continue
        assert not isinstance(found, str), found
        assert difference(found, expected) <= 1e-9

"""Kinds of models on kinds of meshes are equal to the plain torch programs in tests/oracles to 1e-9, or are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.models import ModelSpec
from meshcomm.models.spec import StageContext
from meshcomm.parallel import whole
from meshcomm.parallel.tree import with_tensors
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.oracles import diffusion, retrieval, sequence, vision
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
    return ModelSpec(
        module=vision.ViT,
        hidden_size=16,
        layers="blocks",
        first=("patches", "token", "places"),
        last=("norm", "head"),
        forward=_run_vit,
        split=block,
    )


def _run_vit(module: Any, x: Tensor, here: StageContext) -> Tensor:
    if here.stage.is_first:
        x = module.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([module.token.expand(len(x), -1, -1), x], 1) + module.places
    for block in here.layers:
        x = here.through(block, x)
    return module.head(module.norm(x[:, 0])) if here.stage.is_last else x


def dit() -> ModelSpec:
    block = {
        **{f"blocks.*.{name}": "column" for name in ("query", "key", "value", "up")},
        **{f"blocks.*.{name}": "row" for name in ("out", "down")},
    }
    return ModelSpec(
        module=diffusion.DiT,
        layers="blocks",
        split=block,
        attention=_attends_to_all,
        positions="positions",
    )


def _attends_to_all(module: Any, attend: Any) -> None:
    for block in module.blocks:
        block.attend = partial(attend, causal=False)


def encoder_decoder() -> ModelSpec:
    split = {
        **{f"**.{name}": "column" for name in ("query", "key", "value", "up", "head")},
        **{f"**.{name}": "row" for name in ("out", "down")},
        "embedding": "vocab",
    }
    split["head"] = split.pop("**.head")
    return ModelSpec(
        module=sequence.EncoderDecoder,
        vocab_size=sequence.VOCABULARY,
        hidden_size=16,
        tied=("embedding.weight", "head.weight"),
        split=split,
    )


def two_towers(module: Any = retrieval.TwoTowers) -> ModelSpec:
    return ModelSpec(
        module=module,
        forward=_run_towers,
        split={
            f"{name}.{part}": how
            for name in ("image", "text")
            for part, how in (("up", "column"), ("down", "row"))
        },
    )


def _run_towers(module: Any, x: Any, here: StageContext) -> Any:
    texts = module.text(module.words(x["words"]).mean(1))
    return retrieval.Pairs(module.image(x["image"]), texts, module.scale)


def loss_among_ranks(mesh: Mesh) -> Callable[[retrieval.Pairs, None], Tensor]:
    """Return the loss of this rank's pairs among the pairs of all ranks along data and shard."""
    dim = next((dim for dim in ("dp", "fsdp") if dim in mesh.dims), None)
    if dim is None:
        return retrieval.among_all

    def gathered(x: Tensor) -> Tensor:
        # Each rank compares other samples with these, so the gradients add up.
        return mesh.functional.all_gather(dim, x, grad="reduce_scatter")

    def loss(found: retrieval.Pairs, targets: None) -> Tensor:
        first = mesh.coord(dim) * len(found.images)
        return retrieval.contrast(gathered(found.images), gathered(found.texts), found, first)

    return loss


# The refusals for a module without a description of its parts.
OBJECT: Final = {
    "tp=2": ("tensor_parallel",),
    "pp=2": ("parallel.pipeline",),
    "cp=2": ("parallel.context",),
    "dp=2 tp=2": ("tensor_parallel",),
}

CASES: dict[str, Case] = {
    "vision transformer": Case(vision.VIT, vit, {"cp=2": ("parallel.context",)}, seq_len=17),
    "batch norms": Case(
        vision.CONVNET,
        refused=OBJECT,
        micro=8,
    ),
    "diffusion u-net": Case(diffusion.UNET, refused=OBJECT),
    "diffusion transformer": Case(diffusion.DIT, dit, {"pp=2": ("parallel.pipeline",)}, seq_len=16),
    "encoder and decoder": Case(
        sequence.ENCODER_DECODER,
        encoder_decoder,
        {"pp=2": ("parallel.pipeline",), "cp=2": ("parallel.context",)},
    ),
    "two towers": Case(
        retrieval.TWO_TOWERS,
        two_towers,
        {
            "pp=2": ("parallel.pipeline",),
            "cp=2": ("parallel.context",),
        },
        micro=8,
        loss=loss_among_ranks,
    ),
    "two towers that do not communicate": Case(
        retrieval.SCALAR_TOWERS,
        partial(two_towers, retrieval.scalar),
        {
            "fsdp=2": ("scalar parameters", "scale", "torch.ones(1)"),
            "pp=2": ("parallel.pipeline",),
            "cp=2": ("parallel.context",),
            "dp=2": ("divided among microbatches and ranks", "gather"),
            "dp=2 tp=2": ("divided among microbatches and ranks", "gather"),
        },
        micro=8,
    ),
    "clicks from sparse tables": Case(
        retrieval.CLICKS, refused={**OBJECT, "fsdp=2": ("sparse gradients", "tables.0")}
    ),
    "clicks with a lazy optimizer": Case(
        retrieval.LAZY_CLICKS, refused={**OBJECT, "fsdp=2": ("sparse gradients", "tables.0")}
    ),
}


CASES |= oracle_cases_b.CASES


def config_of(dims: str, case: Case, out: str, *, check: bool) -> Config:
    sizes = sizes_of(dims)
    parts = math.prod(size for name, size in sizes.items() if name in ("dp", "fsdp", "pp"))
    return load_config(
        {
            "mesh": {"dims": sizes, "device": "cpu", "timeout_s": 60.0, "reports": ""},
            "parallel": parallel_of(**roles_of(sizes)),
            "data": {"seq_len": case.seq_len + (-case.seq_len % 4 if "cp" in sizes else 0)},
            "train": {
                "steps": STEPS,
                "global_batch_size": SAMPLES,
                "micro_batch_size": min(case.micro, SAMPLES // parts),
                "lr": 0.1,
                "schedule": "constant",
                "dtype": "float64",
                "seed": SEED,
                "out": out,
                "check": check,
                **case.train,
            },
        }
    )


def trained(config: Config, name: str) -> tuple[list[float], dict[str, Tensor]] | str:
    """Like `alone`, on a mesh; or the text of the error."""
    case = CASES[name]
    kind = case.kind
    with meshcomm.init(config) as mesh:
        try:
            torch.manual_seed(SEED)
            if case.on_mesh is not None:
                given = case.on_mesh(mesh)
            else:
                given = kind.module() if case.given is None else case.given()
            loss = kind.loss if case.loss is None else case.loss(mesh)
            if isinstance(given, ModelSpec):
                given, loss = (given if given.loss else replace(given, loss=loss)), None
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


def difference(found: Any, expected: Any) -> Any:
    """The largest difference between losses, weights and buffers, relative to the largest element of each."""
    (losses, state), (theirs, values) = found, expected
    off = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, theirs, strict=True))
    for name, value in state.items():
        assert value.shape == values[name].shape, name
        most = max(1e-3, float(values[name].abs().max()))
        off = max(off, float((value - values[name]).abs().max()) / most)
    return off


def compared(pool: Pool, name: str, dims: str, folder: Path, *, check: bool) -> None:
    """Train on a mesh and compare, or see the refusal. check: whether the model is checked before its first step."""
    case = CASES[name]
    config = config_of(dims, case, str(folder), check=check)
    refused = case.refused.get(dims)
    expected = alone(case.kind)
    for found in pool.run(partial(trained), config, name, ranks=math.prod(sizes_of(dims).values())):
        if refused is not None:
            assert isinstance(found, str), "was trained"
            assert all(word in found for word in refused), found
            continue
        assert not isinstance(found, str), found
        assert difference(found, expected) <= 1e-9


def is_checked(name: str, dims: str) -> bool:
    """Whether the usual tests check the model: where a mesh is refused, and on one mesh that is not.

    The check takes as long as the steps, and computes what the test compares anyway.
    """
    refused = CASES[name].refused
    usual = "dp=2 tp=2" if name in ON_FOUR else "fsdp=2" if "tp=2" in refused else "tp=2"
    return dims in refused or dims == usual


# On four ranks: one model with split parts, one with a loss that communicates, and the refused ones. They stand for the same model
# along one dim of the two. Of similar models, one is sharded and split. fsdp=2 divides the samples as dp=2 does.
ON_FOUR: Final = ("encoder and decoder", "two towers")


@pytest.mark.parametrize("dims", MESHES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.deep_cases(
    r"\[(?!encoder and|two towers-|batch norms|diffusion u-net|clicks|Fourier operator).*-dp=2 tp=2\]"
    r"|\[(LSTM|graphs, mask as input|graphs, padded edges|detection, by batch)-(fsdp=2|tp=2)\]"
    r"|\[(repeated block|tied layers)-tp=2\]"
    rf"|\[({'|'.join(ON_FOUR)})-[dt]p=2\]"
    r"|\[(vision|diffusion) transformer-dp=2\]"
    r"|\[(tied embeddings|tied layers|repeated block|repeated in the list|transposed|transposed, split)-dp=2\]"
    r"|\[(GRU, packed|LSTM, residual around|Fourier filters|graphs, adjacency)-dp=2\]"
)
def test_a_model_trains_as_on_one_process_or_is_refused(
    pool: Pool, name: str, dims: str, tmp_path: Path
) -> None:
    compared(pool, name, dims, tmp_path, check=is_checked(name, dims))


# The test above checks each model on one mesh, and trains it on the others.
@pytest.mark.deep
@pytest.mark.parametrize("dims", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_trains_passes_the_check_on_every_mesh(
    pool: Pool, name: str, dims: str, tmp_path: Path
) -> None:
    if not is_checked(name, dims):
        compared(pool, name, dims, tmp_path, check=True)

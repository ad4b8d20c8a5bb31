"""A run starts from weights alone: each rank has its parts of what torch and safetensors read from the same files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.models import ModelSpec
from meshcomm.parallel.tensor import whole
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.models.families import folder_of
from tests.sizes import model_of, train_of
from tests.train.runs import roles_of, sizes_of

WIDTH, VOCAB, LENGTH = 4, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """The head has the weight of the embedding, so a state_dict has it twice."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    made = Net()
    for block in made.blocks:
        block.seen.copy_(torch.randn(3))
    return made


def spec() -> ModelSpec:
    return ModelSpec(
        module=Net,
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        layers="blocks",
        first=("embed",),
        last=("head",),
        tied=("embed.weight", "head.weight"),
        split={"embed": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column"},
    )


def config_on(dims: str, path: object, *overrides: str, **more: Any) -> Config:
    sizes = sizes_of(dims)
    return load_config(
        {
            "mesh": {"dims": sizes, "device": "cpu", "reports": ""},
            "parallel": roles_of(sizes),
            "data": {"seq_len": LENGTH},
            "train": train_of(4, 4, 1, check=False, init_from=str(path)),
            **more,
        },
        overrides,
    )


def tokens(rank: int) -> Tensor:
    return torch.arange(2 * LENGTH).reshape(2, LENGTH).add(rank) % VOCAB


def started(config: Config, made: str, folder: Path | None) -> tuple[dict[str, Tensor], int, int] | str:
    """The weights and buffers, the number of steps and of states of the optimizer; or the error. folder: saves there after a step."""
    with meshcomm.init(config) as mesh:
        try:
            trainer = Trainer(mesh, config, {"spec": spec, "net": Net, "config": lambda: None}[made]())
            engine = trainer.engine
            found = {name: whole(x).detach().clone() for name, x in engine.named_parameters()}
            found |= {name: x.clone() for name, x in engine.modules.named_buffers() if name.endswith("seen")}
            if folder is not None:
                x = torch.zeros(4 // engine.data_size, LENGTH, dtype=torch.int64)
                trainer.step(x, x)
                trainer.results()
                trainer.save(folder)
            return found, engine.done, len(engine.optimizer.state)
        except MeshcommError as error:
            return str(error)


def check(pool: Pool, dims: str, path: Path, made: str, wanted: dict[str, Tensor], **more: Any) -> None:
    ranks = math.prod(sizes_of(dims).values())
    names: set[str] = set()
    for found in pool.run(started, config_on(dims, path, **more), made, None, ranks=ranks):
        assert isinstance(found, tuple), found
        weights, step, states = found
        assert (step, states) == (0, 0)
        for name, x in weights.items():
            # A stage's number is in front of the names of buffers.
            called = name if name in wanted else name.partition(".")[2]
            assert torch.equal(x, wanted[called].to(x.dtype)), name
            names.add(called)
    assert names >= wanted.keys() - {"head.weight", "lm_head.weight"}


def with_torch(path: Path) -> Path:
    torch.save(net(1).state_dict(), path / "weights.pt")
    return path / "weights.pt"


def with_torch_around(path: Path) -> Path:
    """As training loops save it: beside the optimizer's state, of a module in DDP, in half precision."""
    state = {f"module.{name}": x.bfloat16() for name, x in net(1).state_dict().items()}
    torch.save(
        {"model": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "step": 3}, path / "x.pth"
    )
    return path / "x.pth"


def with_old_torch(path: Path) -> Path:
    torch.save(net(1).state_dict(), path / "weights.bin", _use_new_zipfile_serialization=False)
    return path / "weights.bin"


def with_safetensors(path: Path) -> Path:
    save_file({name: x.clone() for name, x in net(1).state_dict().items()}, path / "model.safetensors")
    return path


def with_one_safetensors(path: Path) -> Path:
    state = {name: x.clone() for name, x in net(1).state_dict().items() if name != "head.weight"}
    save_file(state, path / "one.safetensors")
    return path / "one.safetensors"


def with_dcp(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": net(1).state_dict(), "step": 3, "optimizer": {"a": torch.ones(2)}}
        dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def with_nested_dcp(path: Path) -> Path:
    """As torch's tutorial saves it: in a dictionary of the program, beside other models."""
    state = net(1).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        app = {"model": state, "ema": {name: -x for name, x in state.items()}, "optim": {"a": torch.ones(2)}}
        dcp.save({"app": app}, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


@pytest.mark.parametrize(
    ("write", "dims"),
    [
        (with_torch, "tp=2"),
        (with_torch_around, "fsdp=2"),
        (with_old_torch, "pp=2"),
        (with_safetensors, "pp=2"),
        (with_one_safetensors, "tp=2"),
        (with_dcp, "pp=2"),
        (with_dcp, "fsdp=2"),
        (with_nested_dcp, "tp=2"),
    ],
)
def test_files_of_others(pool: Pool, dims: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    wanted = net(1).state_dict()
    if write is with_torch_around:
        wanted = {name: x.bfloat16() for name, x in wanted.items()}
    check(pool, dims, write(tmp_path), "spec", wanted)


def test_a_given_module_starts_from_them_too(pool: Pool, tmp_path: Path) -> None:
    check(pool, "dp=2", with_torch(tmp_path), "net", net(1).state_dict())


def test_an_own_checkpoint_without_its_optimizer_on_other_meshes(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints/step-000001"
    first = pool.run(started, config_on("fsdp=2", with_torch(tmp_path)), "spec", folder, ranks=2)
    assert not isinstance(first[0], str)
    wanted = {f"model.{name}": torch.empty_like(x) for name, x in net(1).state_dict().items()}
    del wanted["model.head.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    wanted = {name.removeprefix("model."): x for name, x in wanted.items()}
    assert not torch.equal(wanted["embed.weight"], net(1).embed.weight)
    for dims, path in (("tp=2", folder), ("pp=2", tmp_path / "run"), ("dp=1", folder)):
        check(pool, dims, path, "spec", wanted)
    (folder / "lock.json").unlink()
    (error,) = pool.run(started, config_on("dp=1", folder), "spec", None, ranks=1)
    assert isinstance(error, str) and "lock.json is missing" in error


BUILT_IN = {"model": model_of(2, 8, 2, 2, 8, experts=2, experts_every=2), "data": {"seq_len": LENGTH}}


def test_the_built_in_model_starts_from_safetensors(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "names").mkdir()
    (found,) = pool.run(
        started, config_on("dp=1", "", "train.init_from=", **BUILT_IN), "config", None, ranks=1
    )
    assert isinstance(found, tuple)
    save_file({name: torch.randn_like(x) for name, x in found[0].items()}, tmp_path / "model.safetensors")
    check(pool, "pp=2 tp=2", tmp_path, "config", load_file(tmp_path / "model.safetensors"), **BUILT_IN)


def test_weights_of_equal_shapes_in_another_model_are_refused(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints/step-000001"
    (found,) = pool.run(
        started, config_on("dp=1", "", "train.init_from=", **BUILT_IN), "config", folder, ranks=1
    )
    assert isinstance(found, tuple)
    for more, words in (
        (["model.num_heads=4", "model.num_kv_heads=4"], "model.num_heads = 4, and 2 in "),
        (["model.rope_theta=500"], "model.rope_theta = 500.0, and 10000.0 in "),
        (["model.experts_per_token=1"], "model.experts_per_token = 1, and 2 in "),
    ):
        for error in pool.run(started, config_on("pp=2", folder, *more, **BUILT_IN), "config", None, ranks=2):
            assert isinstance(error, str) and words in error and "meshcomm export" in error, error
    # Settings of training may differ.
    more = ["model.dropout=0.1", "model.balance_loss=0.5"]
    assert isinstance(
        pool.run(started, config_on("pp=2", folder, *more, **BUILT_IN), "config", None, ranks=2)[0], tuple
    )


@pytest.mark.parametrize("kind", ["llama tied", "mixtral"])
def test_families_start_from_their_folders_and_from_a_state_dict(
    pool: Pool, kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of(kind, tmp_path / "family", weights=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "other")
    torch.save(model.state_dict(), tmp_path / "other.pt")
    for path in (tmp_path / "other", tmp_path / "other.pt"):
        check(pool, "fsdp=2", path, "config", model.state_dict(), model={"pretrained": str(folder)})


def test_all_that_does_not_fit_is_in_one_error_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    state = {name: x.clone() for name, x in net(1).state_dict().items()}
    del state["blocks.1.up.bias"]
    state |= {"blocks.1.up.bais": torch.ones(8), "blocks.0.down.weight": torch.ones(3, 8)}
    state["blocks.1.seen"] = torch.ones(3, dtype=torch.int64)
    torch.save(state, tmp_path / "x.pt")
    save_file(state, tmp_path / "x.safetensors")
    for path in (tmp_path / "x.pt", tmp_path / "x.safetensors"):
        for error in pool.run(started, config_on("pp=2", path), "spec", None, ranks=2):
            assert isinstance(error, str)
            for words in (
                "do not match the model",
                "1 missing: blocks.1.up.bias",
                "1 unexpected: blocks.1.up.bais",
                "2 that do not fit: blocks.0.down.weight, shape (3, 8)",
                "blocks.1.seen, dtype I64",
                'did you mean "blocks.1.up.bais"',
            ):
                assert words in error, error


class Code:
    def __reduce__(self) -> Any:
        return print, ("this runs",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK not a file of torch", "x.pt cannot be read"),
        ({"weights": Code()}, "x.pt cannot be read"),
        ({"model": net(1).state_dict(), "module": net(2).state_dict()}, "there are several models"),
        ([torch.ones(2)], "missing: "),
    ],
)
def test_files_that_hold_something_else_are_refused(
    pool: Pool, content: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    (error,) = pool.run(started, config_on("dp=1", path), "spec", None, ranks=1)
    assert isinstance(error, str) and words in error


def test_a_path_that_does_not_exist_is_named(pool: Pool, tmp_path: Path) -> None:
    (error,) = pool.run(started, config_on("dp=1", tmp_path / "none"), "spec", None, ranks=1)
    assert isinstance(error, str) and "train.init_from = " in error and "none" in error


def test_two_different_values_of_one_weight_are_refused(pool: Pool, tmp_path: Path) -> None:
    torch.save(net(1).state_dict() | {"head.weight": torch.ones(VOCAB, WIDTH)}, tmp_path / "x.pt")
    (error,) = pool.run(started, config_on("dp=1", tmp_path / "x.pt"), "spec", None, ranks=1)
    assert isinstance(error, str) and "are one weight in the model, but two in the files" in error
    assert "x.pt" in error and "model.tied_embeddings = false" in error


def test_a_damaged_folder_of_torch_is_named(pool: Pool, tmp_path: Path) -> None:
    folder = with_dcp(tmp_path)
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-20])
    (error,) = pool.run(started, config_on("dp=1", folder), "spec", None, ranks=1)
    assert isinstance(error, str) and "metadata cannot be read" in error and "save" in error.split("try:")[1]
    assert "checkpoint; start" not in error


def test_ranks_with_different_files_are_refused(pool: Pool, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        torch.save(net(rank).state_dict(), tmp_path / f"{rank}/weights.pt")
    for error in pool.run(started_apart, tmp_path, ranks=2):
        assert isinstance(error, str) and "ranks would start from different weights" in error


def started_apart(folder: Path) -> Any:
    import os

    return started(config_on("dp=2", folder / os.environ["RANK"] / "weights.pt"), "spec", None)


def test_random_weights_beside_them_are_refused(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "family")
    with pytest.raises(ConfigError, match=r"no effect: the weights are read from train\.init_from"):
        config_on("dp=1", "x", model={"pretrained": str(folder), "random_weights": True})


@pytest.mark.parametrize("inside", ["", "/checkpoints", "/checkpoints/step-000003"])
def test_a_run_does_not_start_from_its_own_folder(inside: str, tmp_path: Path) -> None:
    for resume in ("true", "false"):
        with pytest.raises(ConfigError, match=r"weights that are in its own folder[^$]*another train\.out"):
            config_on(
                "dp=1", f"{tmp_path}/run{inside}", f'train.out="{tmp_path}/run"', f"train.resume={resume}"
            )
    config_on("dp=1", f"{tmp_path}/run", f'train.out="{tmp_path}/run2"')

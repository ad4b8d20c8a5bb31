"""Weights are read in slices from every kind of folder. An error in a folder is raised on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ShapeError, TrainingError
from meshcomm.models import weights
from meshcomm.models.weights import INDEX, SINGLE, Folder, Source
from meshcomm.parallel.tensor import local, tensor_parallel, unsplit_state, whole
from meshcomm.parallel.tensor.parameters import split_parameter
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.transfer.fused import unfused

NAMES = {"a.weight": (8, 6), "a.bias": (8,), "b.weight": (6, 8)}


def tensors(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@contextmanager
def elements_read() -> Iterator[list[int]]:
    """The number of elements in each slice that is read meanwhile."""
    sizes: list[int] = []
    inner = Folder.piece

    class Piece:
        def __init__(self, folder: Folder, name: str) -> None:
            self._held = inner(folder, name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._held, name)

        def __getitem__(self, at: Any) -> Tensor:
            read: Tensor = self._held[at]
            sizes.append(read.numel())
            return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "piece", lambda self, name: Piece(self, name))
        yield sizes


def filled(path: Path, **options: Any) -> dict[str, Tensor]:
    """The state of a module after it has read its weights from a folder."""
    module = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 6, bias=False)})
    with Folder(path, **options) as folder:
        sources = {name: Source(name) for name in NAMES}
        folder.check(sources, list(NAMES))
        for name, parameter in module.named_parameters():
            folder.read(sources[name], parameter)
    return module.state_dict()


def test_one_file_and_several_with_an_index_give_the_same_bits(tmp_path: Path) -> None:
    given = tensors(NAMES)
    for name in ("one", "some"):
        (tmp_path / name).mkdir()
    save_file(given, tmp_path / "one" / SINGLE)
    places = {name: f"model-{n}.safetensors" for n, name in enumerate(given)}
    for name, place in places.items():
        save_file({name: given[name]}, tmp_path / "some" / place)
    (tmp_path / "some" / INDEX).write_text(json.dumps({"weight_map": places}))
    for name in ("one", "some"):
        found = filled(tmp_path / name)
        assert all(torch.equal(found[key], given[key]) for key in NAMES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_become_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    given = {name: tensor.to(dtype) for name, tensor in tensors(NAMES).items()}
    save_file(given, tmp_path / SINGLE)
    found = filled(tmp_path)
    assert all(torch.equal(found[key], given[key].float()) for key in NAMES)


def test_names_of_a_base_model_and_names_that_no_model_reads(tmp_path: Path) -> None:
    given = tensors(NAMES)
    held = {name.removeprefix("a."): tensor for name, tensor in given.items()}
    held["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    held["old.mask"] = torch.ones(3)
    save_file(held, tmp_path / SINGLE)
    found = filled(tmp_path, base="a", ignored=["^old"])
    assert all(torch.equal(found[key], given[key]) for key in NAMES)


def test_the_count_of_a_batch_norm_is_read(tmp_path: Path) -> None:
    save_file({"count": torch.tensor(7)}, tmp_path / SINGLE)
    count = torch.zeros((), dtype=torch.int64)
    with Folder(tmp_path) as folder:
        folder.read(Source("count"), count)
    assert count == 7


def broken(change: Callable[[Path, dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        given = tensors(NAMES)
        save_file(given, path / SINGLE)
        change(path, given)

    return make


def without(path: Path, given: dict[str, Tensor]) -> None:
    given["a.weigth"] = given.pop("a.weight")
    save_file(given, path / SINGLE)


def misshaped(path: Path, given: dict[str, Tensor]) -> None:
    save_file({**given, "b.weight": torch.zeros(6, 7)}, path / SINGLE)


def quantized(path: Path, given: dict[str, Tensor]) -> None:
    save_file({**given, "b.weight": torch.zeros(6, 8, dtype=torch.int8)}, path / SINGLE)


def cut_short(path: Path, given: dict[str, Tensor]) -> None:
    whole = (path / SINGLE).read_bytes()
    (path / SINGLE).write_bytes(whole[:-5])


def flipped(path: Path, given: dict[str, Tensor]) -> None:
    whole = bytearray((path / SINGLE).read_bytes())
    whole[20] ^= 0x40
    (path / SINGLE).write_bytes(bytes(whole))


def no_file(path: Path, given: dict[str, Tensor]) -> None:
    (path / SINGLE).unlink()
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, "gone.safetensors")}))


def no_index(path: Path, given: dict[str, Tensor]) -> None:
    (path / SINGLE).unlink()
    (path / INDEX).write_text('{"weight_map": [')


def index_lies(path: Path, given: dict[str, Tensor]) -> None:
    del given["a.bias"]
    (path / SINGLE).unlink()
    save_file(given, path / "part.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, "part.safetensors")}))


def nothing(path: Path, given: dict[str, Tensor]) -> None:
    (path / SINGLE).unlink()


BROKEN: dict[str, tuple[Any, str, str, str]] = {
    "names": (
        without,
        "do not match the model",
        "1 missing: a.weight\n1 unexpected: a.weigth",
        "did you",
    ),
    "shape": (misshaped, "b.weight does not fit the model", "shape (6, 7)", "config.json and weights"),
    "int8": (quantized, "b.weight does not fit the model", "dtype I8", "config.json and weights"),
    "cut": (cut_short, "cannot be read", "", "copy or download it again"),
    "flipped": (flipped, "cannot be read", "", "copy or download it again"),
    "no file": (no_file, "gone.safetensors cannot be read", "No such file", "copy or download it again"),
    "no index": (no_index, f"{INDEX} cannot be read", "", "copy or download it again"),
    "index lies": (index_lies, "part.safetensors cannot be read", "a.bias", "copy or download it again"),
    "nothing": (nothing, "there are no weights in", "without model.safetensors", "save_pretrained"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, how: str) -> None:
    change, what, given, hint = BROKEN[how]
    broken(change)(tmp_path)
    with pytest.raises((TrainingError, ShapeError)) as caught:
        filled(tmp_path)
    error = caught.value
    assert what in error.what and given in (error.given or "") and hint in (error.hint or "")
    assert error.expected


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 16)
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x


def split(folder: Path, transposed: bool, shard: bool) -> dict[str, Tensor]:
    """Load a fused weight and a row-split one on tp=2, sharded along dp=2 with `shard`, and gather them."""
    from torch.distributed.fsdp import fully_shard

    from meshcomm.parallel.memory import materialise, on_meta

    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        with on_meta():
            module = Fused()
        plan = {"qkv": {"style": "column", "parts": [8, 4, 4]}, "out": "row"}
        tensor_parallel(module, mesh, "tp", plan)
        if shard:
            fully_shard(module, mesh=mesh["dp"])
        materialise(module, mesh.device)

        with Folder(folder) as known, elements_read() as sizes:
            for name, parameter in unfused(dict(module.named_parameters()), module).items():
                known.read(Source(name, transposed and len(parameter.shape) == 2), parameter)
        assert sum(sizes) == sum(local(each).numel() for each in module.parameters())
        return unsplit_state(module)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_and_transposed_weights_are_read_by_slices(
    pool: Pool, tmp_path: Path, transposed: bool, shard: bool
) -> None:
    given = tensors({name: tuple(p.shape) for name, p in Fused().named_parameters()})
    held = {n: x.T.contiguous() if transposed and x.ndim == 2 else x for n, x in given.items()}
    save_file(held, tmp_path / SINGLE)
    for found in pool.run(split, tmp_path, transposed, shard, ranks=4):
        assert all(torch.equal(found[name], given[name]) for name in given)


STACKED = tuple((f"{e}.gate", f"{e}.up") for e in range(4))


def stacked(folder: Path) -> Tensor:
    """Load a parameter of many tensors, split along two axes, and gather it."""
    with meshcomm.init(dims={"ep": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        parameter = split_parameter(mesh, torch.zeros(4, 8, 5, dtype=torch.float64), {"ep": 0, "tp": 1})
        with Folder(folder) as known, elements_read() as sizes:
            known.read(Source(STACKED), parameter)
        assert sum(sizes) == local(parameter).numel()
        return whole(parameter).clone()


def test_a_parameter_of_three_axes_is_put_together_from_many(pool: Pool, tmp_path: Path) -> None:
    given = tensors({name: (5 if name.endswith("up") else 3, 5) for row in STACKED for name in row})
    save_file(given, tmp_path / SINGLE)
    expected = torch.stack([torch.cat([given[name] for name in row]) for row in STACKED])
    for found in pool.run(stacked, tmp_path, ranks=4):
        assert torch.equal(found, expected.double())
    with (
        Folder(tmp_path) as folder,
        pytest.raises(ShapeError, match=r"0\.gate and the tensors stacked with it do not fit the model"),
    ):
        folder.read(Source(STACKED), torch.empty(4, 8, 6))


def test_large_tensors_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is closed and reopened as its mapped pages add up, and every value is right."""
    limit, opened, inner = 8 * 6 * 2, list[Path](), weights.safe_open

    def counted(path: Path, framework: str) -> Any:
        opened.append(path)
        return inner(path, framework)

    monkeypatch.setattr(weights, "_MAPPED_BYTES", limit)
    monkeypatch.setattr(weights, "safe_open", counted)
    save_file(given := tensors(NAMES), tmp_path / SINGLE)
    with elements_read() as sizes:
        found = filled(tmp_path)
    assert all(torch.equal(found[key], given[key]) for key in NAMES)
    assert opened.count(tmp_path / SINGLE) >= 3
    assert max(sizes) * 8 <= limit and sum(sizes) == sum(x.numel() for x in given.values())
    assert load_file(tmp_path / SINGLE).keys() == NAMES.keys()


# -- through the door: a Llama on a mesh ----------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of several files, bf16, with tied embeddings."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, **heads))
    model.bfloat16().save_pretrained(path, max_shard_size="15KB")
    assert (path / INDEX).is_file()
    return path


def config_of(folder: Path, dims: dict[str, int], **train: Any) -> Config:
    sizes = {name: dims.get(name, 1) for name in ("pp", "dp", "tp")}
    return load_config(
        {
            "mesh": {"dims": sizes, "device": "cpu", "timeout_s": 60.0},
            "parallel": {"pipeline": "pp", "data": "dp", "tensor": "tp"},
            "model": {"pretrained": str(folder)},
            "data": {"seq_len": 16, "max_bytes": 100_000, "tokenizer": "bytes"},
            "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 1, **train},
        }
    )


def weights_of(config: Config) -> dict[str, Tensor]:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config).engine
        return {name: whole(parameter).clone() for name, parameter in trainer.named_parameters()}


def test_tied_embeddings_across_a_pipeline(pool: Pool, llama: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).state_dict()
    found = pool.run(weights_of, config_of(llama, {"pp": 2, "tp": 2}), ranks=4)
    names = set[str]()
    for mine in found:
        assert "model.embed_tokens.weight" in mine and "lm_head.weight" not in mine
        assert all(torch.equal(value, expected[name]) for name, value in mine.items())
        names |= mine.keys()
    assert names == expected.keys() - {"lm_head.weight"}


def refused(configs: dict[int, Config]) -> tuple[str, str, str]:
    """The error that this rank raises."""
    rank = int(os.environ["RANK"])
    config = configs.get(rank, configs[-1])
    with meshcomm.init(config) as mesh:
        try:
            _ = Trainer(mesh, config).engine
        except (TrainingError, ShapeError) as error:
            return error.what, error.given or "", error.hint or ""
    return "", "", ""


def test_a_folder_that_one_rank_cannot_read_is_an_error_on_every_rank(
    pool: Pool, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    dims = {"pp": 2, "tp": 2}
    configs = {-1: config_of(llama, dims), 2: config_of(tmp_path, dims)}
    for rank, (what, given, hint) in enumerate(pool.run(refused, configs, ranks=4)):
        words = f"there are no weights in {tmp_path}"
        expected = words if rank == 2 else f"rank 2 (pp=1 dp=0 tp=0) could not fill the model: {words}"
        assert what == expected and "model.safetensors" in given and "save_pretrained" in hint


def test_a_weight_that_only_the_last_stage_reads_is_missed_on_every_rank(
    pool: Pool, llama: Path, tmp_path: Path
) -> None:
    held: dict[str, Tensor] = {}
    for file in llama.glob("*.safetensors"):
        held |= load_file(file)
    held["model.norm.wieght"] = held.pop("model.norm.weight")
    save_file(held, tmp_path / SINGLE)
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    for _, given, _ in pool.run(refused, {-1: config_of(tmp_path, {"pp": 2})}, ranks=2):
        assert given == "1 missing: model.norm.weight\n1 unexpected: model.norm.wieght"

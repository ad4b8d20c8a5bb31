"""The weights of a checkpoint as one safetensors file in the published format. No damage of a checkpoint goes unnoticed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from meshcomm.commands import app
from meshcomm.errors import TrainingError, UnsupportedOp
from meshcomm.train.checkpoint.folder import commit, name_of, saving
from meshcomm.train.checkpoint.lock import Lock
from meshcomm.train.checkpoint.parts import parts_of
from meshcomm.train.checkpoint.reader import SAFETENSORS_NAMES as NAMES
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.checkpoint.writer import write_metadata, write_part
from meshcomm.train.export import export_weights
from meshcomm.train.export_files import new_folder

LOCK = Lock(40, 2.5, "f", {"device": "cpu"}, {"train": {"lr": 0.1}}, {"torch": "2"})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def state() -> dict[str, torch.Tensor]:
    """One tensor of random bits, NaN included, for each dtype; also a scalar, an empty tensor and odd names."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for dtype in NAMES:
        raw = torch.randint(256, (3, 5 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        found[f"model.{NAMES[dtype]}"] = (raw % 2 if dtype == torch.bool else raw).view(dtype)
    found["model.scalar"] = torch.tensor(7.0)
    found["model.empty"] = torch.zeros(0, 4, dtype=torch.float64)
    found['model.ü "quoted"\n'] = torch.tensor([float("nan"), -0.0, float("inf")])
    found["optimizer.x.step"] = torch.tensor(7.0)
    found["run.losses"] = torch.arange(40, dtype=torch.float64) / 7
    return found


def checkpoint(run: Path, tensors: dict[str, torch.Tensor], lock: Lock = LOCK) -> Path:
    """A complete checkpoint, written by one process."""
    path = run / "checkpoints" / name_of(lock.step)
    write_part(saving(path), 0, [(part, tensors[part.name]) for part in parts_of(tensors)])
    write_metadata(saving(path), [0])
    lock.write(saving(path))
    commit(path)
    return path


def test_an_exported_file_is_the_published_format_and_has_the_weights_bit_by_bit(tmp_path: Path) -> None:
    expected = {n.removeprefix("model."): t for n, t in state().items() if n.startswith("model.")}
    path = checkpoint(tmp_path / "run", state())
    file = tmp_path / "weights.safetensors"
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(file)])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{path} -> {file}: step 40, {len(expected)} tensors, ")
    as_json = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(file), "--json"]).stdout
    facts = {"source": str(path), "target": str(file), "step": 40, "tensors": len(expected)}
    assert json.loads(as_json) == facts | {"bytes": file.stat().st_size}
    # The safetensors package reads the file; it knows nothing about the writer.
    with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
        assert opened.metadata() == {"format": "pt"}
    found = load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)
    # All data are aligned: the header ends at a multiple of 8, and larger elements come first.
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    sizes = [expected[name].itemsize for name in json.loads(raw[8 : 8 + length]) if name in expected]
    assert length % 8 == 0 and sizes == sorted(sizes, reverse=True)
    with pytest.raises(TrainingError, match="there is no complete checkpoint in"):
        export_weights(tmp_path / "nothing", tmp_path / "y")


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """One bit of each file is flipped at a time: reading raises an error that names the file, or returns the saved bits."""
    expected = {"model.w": torch.arange(40.0), "model.b": torch.ones(2, dtype=torch.bfloat16)}
    older = checkpoint(tmp_path / "run", expected, dataclasses.replace(LOCK, step=30))
    path = checkpoint(tmp_path / "run", expected)
    refused = 0
    for file in sorted(path.iterdir()):
        content = bytearray(file.read_bytes())
        for place in range(0, len(content), 13):
            content[place] ^= 1 << place % 8
            file.write_bytes(content)
            content[place] ^= 1 << place % 8
            found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            error = None
            try:
                assert Lock.read(path).step == 40
                Saved(path).fill(found)
            except TrainingError as caught:
                error = caught
            if error is not None:
                refused += 1
                assert str(file) in (error.given or ""), (file, place)
                assert error.hint == f"move {path} away; train.resume = true continues from {older}"
                if file.suffix == ".distcp":
                    assert error.what in {f"the checkpoint is damaged: {n} in {file.name}" for n in expected}
            else:
                pytest.fail(f"a flipped bit was not noticed: {file}, byte {place}")
        file.write_bytes(content)
        file.unlink()
        with pytest.raises(TrainingError, match=r"damaged|is missing") as gone:
            Lock.read(path)
            Saved(path).fill(found)
        assert f"{file}: " in (gone.value.given or "") and "o such file" in (gone.value.given or "")
        file.write_bytes(content)
    assert refused > 100


@pytest.mark.parametrize(
    ("tensors", "cut", "kind", "words"),
    [
        ({"model.w": torch.ones(5000)}, 3000, TrainingError, r"damaged: model\.w in __0_0\.distcp"),
        ({"model.a": torch.ones(2, dtype=torch.complex64)}, 0, UnsupportedOp, "a safetensors file cannot hold"),
        ({"model.__metadata__": torch.ones(2)}, 0, UnsupportedOp, "a safetensors file cannot hold"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_leaves_no_file_and_the_old_one(
    tmp_path: Path, tensors: dict[str, torch.Tensor], cut: int, kind: type[Exception], words: str
) -> None:
    path = checkpoint(tmp_path / "run", tensors)
    old = (2).to_bytes(8, "little") + b"{}"
    (tmp_path / "x").write_bytes(old)
    (part,) = path.glob("*.distcp")
    if cut:
        part.write_bytes(part.read_bytes()[:cut])
    with pytest.raises(kind, match=words):
        export_weights(path, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == old
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "x"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_replaces_only_an_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    path = checkpoint(run, {"model.w": torch.ones(5)})
    for file in (run / "metrics.jsonl", run / "run.json", Path("train.toml"), Path("w.tmp")):
        file.write_text("[1, 2, 3, 4, 5]")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    for name, to in (("to_text", "train.toml"), ("to_pipe", "pipe"), ("to_new", "new"), ("loop", "loop")):
        Path(name).symlink_to(to)
    before = content(tmp_path)
    wrong = {
        "is not written into a checkpoint": [path / name for name in ("lock.json", "__0_0.distcp", "new")],
        "is not written into the checkpoints of a run": [run / "checkpoints" / "new"],
        "no safetensors file": [run / "metrics.jsonl", run / "run.json", "train.toml", "to_text"],
        "not a regular file": ["pipe", "to_pipe", "/dev/null"],
        "a folder": ["", "folder", "run"],
        "could not write": ["loop", "x" * 300],
    }
    for words, targets in wrong.items():
        for target in targets:
            done = CliRunner().invoke(app, ["export", "run", str(target)])
            assert done.exit_code == 2 and words in done.stderr.splitlines()[0], (target, done.output)
            assert "  given: " in done.stderr and "  expected: " in done.stderr, target
            assert words == "could not write" or "  try: " in done.stderr, target
    # A folder in a checkpoint would damage it, or be taken for a checkpoint.
    for target in (path / "folder", run / "checkpoints" / "step-000050"):
        with pytest.raises(TrainingError, match="is not written into"), new_folder(target):
            pytest.fail("the folder was created")
    with pytest.raises(TrainingError, match="exists already"), new_folder(Path("to_new")):
        pytest.fail("the folder was created")
    assert content(tmp_path) == before
    # A link is followed; an empty file and an earlier export are replaced.
    Path("empty").touch()
    for target in ("to_new", "to_new", "empty", run / "w", "w"):
        export_weights(run, Path(target))
        assert load_file(target)["w"].tolist() == [1.0] * 5
    assert Path("to_new").is_symlink() and Path("w.tmp").read_text() == "[1, 2, 3, 4, 5]"


@pytest.mark.parametrize("name", ["lock.json", ".metadata", "__0_0.distcp"])
def test_a_pipe_in_a_checkpoint_is_not_opened(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path / "run", {"model.w": torch.ones(5)})
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(TrainingError, match=re.escape(name)) as caught:
        export_weights(tmp_path / "run", tmp_path / "x")
    assert "not a regular file" in (caught.value.given or "")


def anonymous_bytes() -> int:
    """This process's own memory, without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file = tmp_path / "run", tmp_path / "x.safetensors"
    one = torch.arange(1 << 18)  # 2 MiB
    checkpoint(run, {f"model.{i:02}": one for i in range(24)})
    held: list[int] = []
    load = Saved.load

    def looked(self: Saved, name: str) -> Any:
        found = load(self, name)
        held.append(anonymous_bytes())
        return found

    monkeypatch.setattr(Saved, "load", looked)
    before = anonymous_bytes()
    export_weights(run, file)
    # One tensor and the part of a file that it is read from, or the output file; but not 24 tensors.
    assert len(held) == 24 and max(held) - before < 20 << 20
    assert all(torch.equal(each, one) for each in load_file(file).values())

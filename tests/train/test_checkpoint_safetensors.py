"""One safetensors file of a checkpoint, and back: the published format, and every bad file refused."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from meshcomm.cli import app
from meshcomm.errors import TrainingError, UnsupportedOp
from meshcomm.train import export
from meshcomm.train.checkpoint_folder import name_of
from meshcomm.train.checkpoint_reader import SAFETENSORS_NAMES as NAMES
from meshcomm.train.checkpoint_reader import Kind, Saved
from meshcomm.train.export import export_checkpoint, import_checkpoint, opened, write_checkpoint, write_file
from meshcomm.train.lock import Lock

LOCK = Lock(40, 2.5, "f", {"device": "cpu"}, {"train": {"lr": 0.1}}, {"torch": "2"})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def state() -> dict[str, torch.Tensor]:
    """One tensor of each dtype, random bits, among them no number; a scalar, an empty one, odd names."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for dtype in NAMES:
        raw = torch.randint(256, (3, 5 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        found[f"model.{NAMES[dtype]}"] = (raw % 2 if dtype == torch.bool else raw).view(dtype)
    found["optimizer.x.step"] = torch.tensor(7.0)
    found["model.empty"] = torch.zeros(0, 4, dtype=torch.float64)
    found['model.ü "quoted"\n'] = torch.tensor([float("nan"), -0.0, float("inf")])
    found["run.losses"] = torch.arange(40, dtype=torch.float64) / 7
    return found


def checkpoint(run: Path, tensors: dict[str, torch.Tensor], lock: Lock = LOCK) -> Path:
    path = run / "checkpoints" / name_of(lock.step)
    kinds = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_checkpoint(path, lock, kinds, tensors.__getitem__)
    return path


def package(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A file as the package of the format reads it, which knows nothing of what wrote it."""
    with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        return load_file(path), file.metadata()


def test_an_exported_checkpoint_is_the_published_format_and_comes_back_bit_by_bit(tmp_path: Path) -> None:
    expected = {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in state().items()}
    first = checkpoint(tmp_path / "run", state())
    file = tmp_path / "all.safetensors"
    moved = export_checkpoint(tmp_path / "run", file)
    assert moved == (first, file, 40, len(expected), file.stat().st_size)
    found, metadata = package(file)
    assert {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in found.items()} == expected
    assert metadata["format"] == "pt" and json.loads(metadata["meshcomm.lock"])["step"] == 40
    # Aligned: the header ends at a multiple of 8, and larger elements come first.
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    sizes = [expected[name][0].itemsize for name in header if name in expected]
    assert length % 8 == 0 and sizes == sorted(sizes, reverse=True)

    back = import_checkpoint(file, tmp_path / "other")
    assert back.target == tmp_path / "other" / "checkpoints" / "step-000040"
    assert (tmp_path / "other/checkpoints/latest").read_text() == "step-000040\n"
    assert dataclasses.replace(Lock.read(back.target), metadata="") == LOCK
    again = {name: torch.empty_like(tensor) for name, tensor in state().items()}
    Saved(back.target).fill(again)
    assert {name: bits(tensor) for name, tensor in again.items()} == {
        n: b for n, (_, _, b) in expected.items()
    }
    # And the way out again gives the same file.
    export_checkpoint(back.target, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == raw


def test_only_the_weights_by_the_names_of_modules(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint(run, state())
    file = tmp_path / "weights.safetensors"
    result = CliRunner().invoke(app, ["export", str(run), str(file), "--weights"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{run}/checkpoints/step-000040 -> {file}: step 40, ")
    found, metadata = package(file)
    assert metadata == {"format": "pt"}
    assert found.keys() == {name[6:] for name in state() if name.startswith("model.")}
    result = CliRunner().invoke(app, ["import", str(file), str(tmp_path / "new")])
    assert result.exit_code == 2 and not (tmp_path / "new").exists()
    assert f"{file} is not an exported checkpoint" in result.stderr
    assert "try:      meshcomm export RUN FILE, without --weights" in result.stderr


def test_import_does_not_hide_behind_a_later_checkpoint(tmp_path: Path) -> None:
    one = {"model.w": torch.ones(2)}
    checkpoint(tmp_path / "run", one)
    export_checkpoint(tmp_path / "run", tmp_path / "x")
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(TrainingError, match="has a checkpoint of step 40 or later already"):
        import_checkpoint(tmp_path / "x", tmp_path / "run")
    assert sorted((tmp_path / "run").rglob("*")) == before
    with pytest.raises(TrainingError, match="there is no complete checkpoint in"):
        export_checkpoint(tmp_path / "nothing", tmp_path / "y")


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """One bit of every file after the other: an error that names the file, or the very bits that were saved."""
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
                assert error.hint == f"move {path} away; train.resume = true goes on from {older}"
                if file.suffix == ".distcp":
                    assert error.what in {f"the checkpoint is damaged: {n} in {file.name}" for n in expected}
            else:
                # Of a .distcp, what lies between the records; of the others, every byte counts.
                assert file.suffix == ".distcp"
                assert {name: bits(t) for name, t in found.items()} == {
                    n: bits(t) for n, t in expected.items()
                }
        file.write_bytes(content)
        file.unlink()
        with pytest.raises(TrainingError, match=r"damaged|cannot be read") as gone:
            Lock.read(path)
            Saved(path).fill(found)
        assert f"{file}: " in (gone.value.given or "") and "o such file" in (gone.value.given or "")
        file.write_bytes(content)
    assert refused > 100


def test_a_damaged_checkpoint_leaves_no_file_and_the_old_one(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "run", {"model.w": torch.ones(5000)})
    (tmp_path / "x").write_bytes(b"old")
    (part,) = path.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:3000])
    with pytest.raises(
        TrainingError, match=r"the checkpoint is damaged: model\.w in __0_0\.distcp"
    ) as caught:
        export_checkpoint(path, tmp_path / "x")
    assert caught.value.given is not None and caught.value.expected is not None
    assert (tmp_path / "x").read_bytes() == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "x"]


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int = 0, end: int = 8, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x02\0\0\0", "header too small"),
        (file_of(b"[]"), "invalid JSON in header"),
        (file_of({"a": entry(dtype="C64", shape=(1,))}, b"x" * 8), "dtype 'C64'"),
        (file_of({"a": entry(), "b": entry(12, 20)}, b"x" * 20), "invalid offset for tensor `b`"),
        (file_of({"a": entry()}, b"x" * 7), "file not fully covered"),
        (file_of({"b": entry(8, 16), "a": entry()}, b"x" * 16), None),
        (file_of({}), None),
    ],
)
def test_every_file_that_is_not_as_published_is_refused(
    tmp_path: Path, content: bytes, words: str | None
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    if words is None:
        with opened(path) as (file, kinds):
            for name in kinds:
                assert bits(file.get_tensor(name)) == b"x" * 8
        return
    with pytest.raises(TrainingError, match="cannot be read as a safetensors file") as caught, opened(path):
        pass
    assert words in (caught.value.given or "") and caught.value.expected and caught.value.hint


def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for kinds in ({"a": Kind(torch.complex64, (2,))}, {"__metadata__": Kind(torch.float32, (2,))}):
        with pytest.raises(UnsupportedOp, match="a safetensors file cannot hold"):
            write_file(tmp_path / "x", kinds, {}, lambda name: torch.zeros(2))
    assert not list(tmp_path.iterdir())


def anonymous_bytes() -> int:
    """This process's own memory, without files that are mapped."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file, other = (tmp_path / name for name in ("run", "x.safetensors", "other"))
    kinds = {f"model.{i:02}": Kind(torch.float32, (1 << 18,)) for i in range(24)}  # 1 MiB each
    path = run / "checkpoints" / name_of(40)
    write_checkpoint(path, LOCK, kinds, lambda name: torch.full((1 << 18,), float(name[-2:])))
    held: list[int] = []

    def looking(function: Any) -> Any:
        def looked(*args: Any) -> Any:
            held.append(anonymous_bytes())
            result = function(*args)
            held.append(anonymous_bytes())
            return result

        return looked

    monkeypatch.setattr(Saved, "fill", looking(Saved.fill))
    monkeypatch.setattr(export, "_loaded", looking(export._loaded))
    for act, source, target in ((export_checkpoint, run, file), (import_checkpoint, file, other)):
        held.clear()
        before = anonymous_bytes()
        act(source, target)
        # A tensor and the part of a file that it is read from, or the file that it goes into; not 24.
        assert len(held) == 48 and max(held) - before < 10 << 20
    again = torch.empty(1 << 18)
    for name in kinds:
        Saved(other / "checkpoints" / name_of(40)).fill({name: again})
        assert again.min() == again.max() == float(name[-2:])

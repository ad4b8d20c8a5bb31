"""`meshcomm export` and `meshcomm import`: between checkpoints and safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def export(source: Path, target: Path, weights: bool) -> str:
    """Write a checkpoint, or a run's last one, into a safetensors file; what was done, as text."""
    from meshcomm.train.export import export_checkpoint

    return _moved(export_checkpoint(source, target, weights=weights))


def import_file(source: Path, out: Path) -> str:
    """Make a checkpoint of the run `out` from an exported file; what was done, as text."""
    from meshcomm.train.export import import_checkpoint

    return _moved(import_checkpoint(source, out))


def _moved(moved: Any) -> str:
    size = f"{moved.tensors} tensors, {moved.bytes / 1e6:.1f} MB"
    return f"{moved.source} -> {moved.target}: step {moved.step}, {size}"

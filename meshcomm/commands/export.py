"""`meshcomm export`: write a checkpoint's weights to a file or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from meshcomm.commands.app import AsJson, command, show_facts
from meshcomm.errors import ConfigError
from meshcomm.show.page import Facts, Line

_DTYPES: Final = ("float32", "bfloat16", "float16")


@command()
def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A checkpoint, or a run's folder, whose last checkpoint is exported.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The safetensors file to write, new or written by an earlier export (a symlink is followed); "
            "or the new folder.",
        ),
    ],
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained", help="Write a folder that from_pretrained in transformers or peft can read."
        ),
    ] = False,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="Write the full model to a folder, with [model.lora] merged into its weights."
        ),
    ] = False,
    ema: Annotated[
        bool,
        typer.Option("--ema", help="Write the moving averages of train.ema in place of the weights."),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the weights in a folder: float32, bfloat16 or float16. Default: the dtype of the weights."
        ),
    ] = None,
    shard_gb: Annotated[
        float | None, typer.Option(min=0, help="Maximum file size in a folder, in GB. Default: 5.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a checkpoint's weights to one safetensors file, or to a folder for transformers, in one process.

    With --json, the result has source (the checkpoint), target, step, tensors (their number) and bytes.
    """
    if pretrained and merged:
        raise ConfigError(
            "two kinds of output are requested",
            given="--pretrained, --merged",
            expected="one of them",
            hint="use --merged for the full model, or --pretrained for only the adapters",
        )
    options = {"--dtype": dtype, "--shard-gb": shard_gb}
    named = [name for name, value in options.items() if value is not None]
    if named and not (pretrained or merged):
        raise ConfigError(
            f"{' and '.join(named)} without --pretrained or --merged",
            given=", ".join(named),
            expected="--dtype and --shard-gb only with one of these options",
            hint="meshcomm export RUN FOLDER --pretrained",
        )
    if dtype not in (None, *_DTYPES):
        from meshcomm.layout.names import did_you_mean

        raise ConfigError(
            f"weights cannot be written as {dtype}",
            given=f"--dtype {dtype}",
            expected=" or ".join(_DTYPES),
            hint=did_you_mean(dtype, _DTYPES) or "remove it to keep the dtype of the weights",
        )
    import torch

    from meshcomm.train.export import SHARD_BYTES, export_merged, export_pretrained, export_weights

    if pretrained or merged:
        most = SHARD_BYTES if shard_gb is None else int(shard_gb * 1e9)
        kind = None if dtype is None else getattr(torch, dtype)
        write = export_merged if merged else export_pretrained
        moved = write(source, target, dtype=kind, shard_bytes=most, ema=ema)
    else:
        moved = export_weights(source, target, ema=ema)
    paths = {"source": str(moved.source), "target": str(moved.target)}
    show_facts({**moved._asdict(), **paths}, json, view, width=10_000)


def view(facts: Facts) -> Line:
    """Return the checkpoint, the file or folder, and their size on one line."""
    size = f"{facts['tensors']} tensors, {facts['bytes'] / 1e6:.1f} MB"
    return Line(f"{facts['source']} -> {facts['target']}: step {facts['step']}, {size}")

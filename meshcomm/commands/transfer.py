"""`meshcomm transfer`: what sending a model's weights from one mesh to another costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshcomm.commands.app import (
    AsJson,
    Overrides,
    World,
    checked_world,
    command,
    discovered_topology,
    show_facts,
    world_of,
)
from meshcomm.show.page import Cells, Facts, Line, View, page_view

if TYPE_CHECKING:
    from meshcomm.config import Config
    from meshcomm.dryrun.weights import SplitModel
    from meshcomm.layout import Layout
    from meshcomm.transfer.plan import Entry


@command()
def transfer(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="The configuration of the ranks that send: TOML, JSON or YAML."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The configuration of the ranks that receive.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Transfer the weights of this transformers model, of which only config.json is read, instead of [model] "
            "of SOURCE.",
        ),
    ] = None,
    cast: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="The dtype in which floating-point weights are sent, such as bfloat16. Default: that of the source.",
        ),
    ] = None,
    stripes: Annotated[
        str | None,
        typer.Option(
            metavar="DIM,...",
            help="Dims of TARGET along which copies receive different stripes and gather them from each other; an empty "
            "value for none. Default: those that meshcomm.link chooses.",
        ),
    ] = None,
    bucket: Annotated[
        str, typer.Option("--bytes", help="How much a rank sends, and receives, at once, such as 64MiB.")
    ] = "64MiB",
    same_ranks: Annotated[
        bool,
        typer.Option(
            "--same-ranks",
            help="Both meshes have the ranks of their configurations, from 0 by default. Otherwise, TARGET's ranks come "
            "after SOURCE's.",
        ),
    ] = False,
    world: World = None,
    target_world: Annotated[
        int | None,
        typer.Option(
            "--target-world-size",
            callback=checked_world,
            help="Number of processes of TARGET; required if a size is -1.",
        ),
    ] = None,
    json: AsJson = False,
    overrides: Overrides = None,
    target_overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--target-set", metavar="KEY=VALUE", help="Override a setting of TARGET. --set is for SOURCE."
        ),
    ] = None,
) -> None:
    """Compare what sending a model's weights from one mesh to another costs with the least possible.

    The weights are those of [model] of SOURCE, split as the training of SOURCE and of TARGET splits them, by the roles in
    [parallel]. In a configuration of only a mesh, tp (or tensor) splits layers, ep (or expert) of a view distributes
    experts, and ranks along other dims hold copies. [topology] is SOURCE's. Nothing is started or loaded.
    """
    from meshcomm.config import load_config
    from meshcomm.dryrun.weights import split_model
    from meshcomm.errors import ConfigError
    from meshcomm.show.units import read_bytes
    from meshcomm.transfer.explain import cost

    bucket_bytes = read_bytes(bucket)
    settings = load_config(source, overrides or ()), load_config(target, target_overrides or ())
    if model is None and settings[0].model is None:
        raise ConfigError(
            "no model whose weights are transferred",
            given=f"{settings[0].source} without [model]",
            expected="a [model] section, or a folder with a config.json",
            hint="--model FOLDER",
        )
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(
            f"{model / 'config.json'} does not exist",
            given=f"--model {model}",
            expected="the folder of a transformers model",
            hint="model.save_pretrained(folder)",
        )
    if target_world is None and -1 in settings[1].mesh.dims.values():
        raise ConfigError(
            f"the number of processes of {target} is unknown",
            given=f"mesh.dims with a size of -1 in {target}",
            expected="their number, or a size for each dim",
            hint="--target-world-size N, or --target-set mesh.dims.DIM=N",
        )
    if model is None and settings[1].model not in (None, settings[0].model):
        ours, theirs = (config.model.model_dump() for config in settings if config.model is not None)
        keys = [key for key in ours if ours[key] != theirs.get(key)]
        raise ConfigError(
            "the two configurations have different models",
            given=", ".join(
                f"{key} = {ours[key]} in {source}, {theirs.get(key)} in {target}" for key in keys
            ),
            expected="the same [model] in both, or none in TARGET",
            hint="--model FOLDER, for the model of another folder on both sides",
        )
    described = _model(settings[0], model)
    worlds = world_of(settings[0], world), world_of(settings[1], target_world)
    sides = [
        split_model(config, size, described, settings[0])
        for config, size in zip(settings, worlds, strict=True)
    ]
    layouts = sides[0].layout, sides[1].layout if same_ranks else _after(sides[0].layout, sides[1].layout)
    dims = None if stripes is None else [dim.strip() for dim in stripes.split(",") if dim.strip()]
    entries, rows = _entries(sides[0], sides[1], cast)
    result = cost(*layouts, entries, discovered_topology(settings[0]), dims, bucket_bytes)
    show_facts(result.facts() | {"weights": rows}, json, view)


def _model(settings: Config, folder: Path | None) -> dict[str, Any]:
    from meshcomm.config.pretrained import dropouts_of
    from meshcomm.config.write import plain

    if folder is not None:
        dropout = {"dropout": 0.0} if dropouts_of(str(folder)) else {}
        return {"pretrained": str(folder), "random_weights": True, **dropout}
    assert settings.model is not None
    described: dict[str, Any] = plain(settings.model.model_dump(exclude_unset=True))
    return described


def _after(source: Layout, target: Layout) -> Layout:
    """Return the target with the ranks that come after those of the source."""
    from meshcomm.layout import Layout

    shift = int(source.ranks.max()) + 1 - int(target.ranks.min())
    return Layout(target.dims, [rank + shift for rank in target.ranks.tolist()], target.views, target.merge)


def _entries(source: SplitModel, target: SplitModel, cast: str | None) -> tuple[list[Entry], list[Facts]]:
    """Return the tensors of a transfer, and a row for all weights with the same splits whose names differ in numbers."""
    from meshcomm.errors import ConfigError
    from meshcomm.transfer.plan import Entry

    if different := sorted(source.weights.keys() ^ target.weights.keys()):
        raise ConfigError(
            "the two trainings name the weights differently",
            given=f"{', '.join(different[:8])}, on one side only",
            expected="the same names on both sides",
        )
    entries: list[Entry] = []
    rows: dict[Any, Any] = {}
    for name, weight in source.weights.items():
        dtype = _dtype(cast) if cast and weight.dtype.is_floating_point else weight.dtype
        given, wanted = weight.placement, target.weights[name].placement
        entries.append(Entry(name, dtype.itemsize, given, wanted))
        facts = {
            "name": re.sub(r"(?<![^.])\d+(?![^.])", "*", name),
            "shape": list(given.shape),
            "dtype": str(dtype).removeprefix("torch."),
            "source": _split_text(given),
            "target": _split_text(wanted),
        }
        row = rows.setdefault(repr(facts), facts | {"tensors": 0})
        row["tensors"] += 1
    return entries, list(rows.values())


def _split_text(placement: Any) -> str:
    return str(placement).partition(" at ")[0] or "whole"


def _dtype(name: str) -> Any:
    import torch

    from meshcomm.errors import ConfigError

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"{name!r} is not a floating-point dtype",
            given=f"--cast {name}",
            expected="a floating-point dtype of torch",
            hint="--cast bfloat16",
        )
    return dtype


def view(facts: Facts) -> View:
    """Return the splits of the weights, the bytes and the seconds for a rich console."""
    from meshcomm.show.transfer import transfer_page

    head, *rest = transfer_page(facts)
    weights = Cells.of(
        facts["weights"],
        {
            "weights": "name",
            ">tensors": "tensors",
            "shape": lambda row: " ".join(map(str, row["shape"])),
            "dtype": "dtype",
            "source": "source",
            "target": "target",
        },
    )
    return page_view([head, weights, Line(""), *rest])

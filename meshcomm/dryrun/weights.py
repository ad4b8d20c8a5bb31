"""The splits that training gives each weight of a model, read from stages that are built without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from meshcomm.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from meshcomm.config.write import plain
from meshcomm.dryrun.hollow import Hollow
from meshcomm.dryrun.rank import Passes, alone, pretended_world
from meshcomm.errors import ConfigError
from meshcomm.layout import Layout
from meshcomm.mesh.opening import init
from meshcomm.models import model_of
from meshcomm.parallel.build import LocalModel
from meshcomm.parallel.splits import Sections
from meshcomm.transfer.fused import unfused
from meshcomm.transfer.placement import Placement
from meshcomm.transfer.tensors import memory_of, placement_of

# The settings of a training that do not change how weights are split, where a configuration leaves them out.
_DATA: Final[Mapping[str, Any]] = {"seq_len": 4096}
_TRAIN: Final[Mapping[str, Any]] = {"steps": 1, "micro_batch_size": 1}


class SplitWeight(NamedTuple):
    """A parameter or persistent buffer. dtype: in which a rank holds it."""

    placement: Placement
    dtype: torch.dtype


class SplitModel(NamedTuple):
    """The weights of a model by name, in order, and the layout that their placements are on."""

    layout: Layout
    weights: dict[str, SplitWeight]


def split_model(settings: Config, world: int, model: Mapping[str, Any], like: Config) -> SplitModel:
    """Return how the training of `settings` splits the weights of a model.

    Without [parallel], the dim tp, or tensor, splits layers, the dim ep, or expert, of a view distributes experts, and ranks
    along all other dims hold copies. model: the content of a [model] section. like: where [data] and [train] are taken from if
    `settings` has none.

    One rank of each pipeline stage is built in turn, without memory for the weights. No file of weights is read. Raises ConfigError,
    and what building the model raises; LayoutError in a process that has initialized torch.distributed.
    """
    config, sections = _training(settings, world, dict(model), like)
    layout, pipeline = config.plan(world).layout, sections.parallel.pipeline
    ranks = [layout.rank_of(0)] if pipeline is None else layout.group_of(layout.rank_of(0), pipeline).tolist()
    placements: dict[str, dict[int, SplitWeight]] = {}
    for coord, rank in enumerate(ranks):
        # The opened mesh may have merged dims that the plan does not have.
        layout, weights = _of_rank(config, sections, rank, world)
        for name, weight in weights.items():
            placements.setdefault(name, {})[coord] = weight
    together = {}
    for name, by_coord in placements.items():
        weight, *others = by_coord.values()
        assert all(other == weight for other in others), name
        at = {} if pipeline is None or len(by_coord) == len(ranks) else {pipeline: tuple(by_coord)}
        placement = Placement(weight.placement.axes, tuple(at.items()))
        together[name] = weight._replace(placement=placement)
    return SplitModel(layout, together)


def _training(settings: Config, world: int, model: dict[str, Any], like: Config) -> tuple[Config, Sections]:
    """Return the configuration whose mesh is opened, and the sections of the training."""
    data, train = dict(_DATA), dict(_TRAIN)
    for name, values in (("data", data), ("train", train)):
        section = getattr(settings, name) or getattr(like, name)
        values.update({} if section is None else plain(section.model_dump(exclude_unset=True)))
    parallel = settings.parallel or ParallelConfig(**_usual_roles(settings))
    sizes = {**settings.mesh.sizes(world, settings.source)}
    if settings.train is None:
        batches = parallel.copies(sizes) * (1 if settings.parallel is None else 2 * parallel.stages(sizes))
        train["global_batch_size"] = batches * train["micro_batch_size"]
    sections = Sections(parallel, ModelConfig(**model), DataConfig(**data), TrainConfig(**train))
    if settings.parallel is None:
        for name in ("num_heads", "num_kv_heads"):
            number, dim = getattr(sections.model, name), parallel.tensor
            shared = name == "num_kv_heads" and number and dim is not None and sizes[dim] % number == 0
            if number is not None and dim is not None and number % sizes[dim] and not shared:
                raise ConfigError(
                    f'the heads cannot be split along "{dim}": {name} is not divisible',
                    given=f"{name} = {number}, {dim} = {sizes[dim]} in {settings.source}",
                    expected=f"a size of {dim} that divides {number}",
                    hint=f'fewer ranks along {dim}; link.transfer can repeat heads, as in "n/{dim}:{number} k"',
                )
        # A training has no dims along which all ranks do the same, but a mesh has.
        return settings.model_copy(update=dict.fromkeys(sections._fields)), sections
    return settings.model_copy(update=sections._asdict()).resolved(world), sections


def _usual_roles(settings: Config) -> dict[str, str]:
    """Return the roles of dims whose names say that they split weights, where there is no [parallel]."""
    in_views = [dim for view in settings.mesh.views.values() for dim in view]
    roles = {}
    for role, names, dims in (
        ("tensor", ("tp", "tensor"), [*settings.mesh.dims]),
        ("expert", ("ep", "expert"), in_views),
    ):
        if known := [name for name in names if name in dims]:
            roles[role] = known[0]
    return roles


def _of_rank(
    config: Config, sections: Sections, rank: int, world: int
) -> tuple[Layout, dict[str, SplitWeight]]:
    assert sections.model is not None and sections.data is not None
    passes, opened = Passes(), alone(config)
    assert isinstance(opened, Config)
    with pretended_world(rank, world), init(opened) as mesh, Hollow(passes.ledger(True), passes):
        built = LocalModel(
            mesh, sections, model_of(sections.model, sections.data, sections.train), filled=False
        )
        parameters = dict(built.named)
        buffers = {
            name: tensor
            for module in built.modules
            for name, tensor in module.state_dict(keep_vars=True).items()
            if not isinstance(tensor, torch.nn.Parameter)
        }
        weights = {}
        for name, held in unfused({**parameters, **buffers}, *built.modules).items():
            placement = placement_of(held, mesh.layout, mesh.rank)
            weights[name] = SplitWeight(placement, memory_of(held).dtype)
        return mesh.layout, weights

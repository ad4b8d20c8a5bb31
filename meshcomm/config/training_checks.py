"""Can this model and batch be trained on these sizes, and on which sizes nearby?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from meshcomm.config.mesh import MeshConfig
from meshcomm.config.nearest import nearest
from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.training import PARTS, ModelConfig, ParallelConfig, Part, TrainConfig
from meshcomm.config.wording import toml
from meshcomm.layout.names import nearest_name


def training_problems(
    mesh: MeshConfig, parallel: ParallelConfig, model: ModelConfig, train: TrainConfig, broken: Broken
) -> Iterator[Problem]:
    """What is wrong between the sections of a training file. A size of -1 is not judged."""
    if broken.touches("mesh.dims", "parallel.data", "parallel.tensor", "parallel.pipeline"):
        return
    dims = mesh.dims
    unknown = list(_unknown_dims(mesh, parallel))
    yield from unknown
    if unknown:
        return
    yield from _unused_dims(mesh, parallel)

    # None: no dim plays the part, or its size is open.
    used: Mapping[Part, str] = {part: dim for part, dim in parallel.parts.items() if dims[dim] >= 1}
    if "tensor" in used:
        yield from _tensor(used["tensor"], dims, model, broken)
    if "pipeline" in used and not broken.touches("model.layers"):
        yield from _stages(used["pipeline"], dims, model)
    copies_known = "data" in used or "data" not in parallel.parts
    if copies_known and not broken.touches("train.global_batch", "train.microbatch"):
        yield from _batches(used.get("data"), used.get("pipeline"), dims, parallel, train)


def _unknown_dims(mesh: MeshConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    for part, dim in parallel.parts.items():
        if dim in mesh.dims:
            continue
        near = nearest_name(dim, mesh.dims)
        of_view = any(dim in sizes for sizes in mesh.views.values())
        what = (
            f"{dim} is a merged dim"
            if dim in mesh.merge
            else f"{dim} is a view's dim"
            if of_view
            else f"no dim {dim}"
        )
        ways = [f'parallel.{part} = "{near}"'] if near is not None else []
        if dim not in mesh.merge and not of_view:
            ways.append(f"mesh.dims = {toml({dim: 1, **mesh.dims})}")
        yield Problem(
            f"parallel.{part}",
            what,
            given=f"{part} = {toml(dim)}, mesh.dims = {toml(mesh.dims)}",
            expected="one of mesh.dims: " + ", ".join(mesh.dims),
            hint=either([*ways, f"remove parallel.{part}"]),
        )


def _unused_dims(mesh: MeshConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    free = [part for part in PARTS if part not in parallel.parts]
    for dim, size in mesh.dims.items():
        if size > 1 and dim not in parallel.parts.values():
            played = ", ".join(f"{part} = {toml(name)}" for part, name in parallel.parts.items())
            yield Problem(
                f"mesh.dims.{dim}",
                f"no part of the training uses {dim}: its {size} ranks would all do the same",
                given=f"dims.{dim} = {size}; parallel has {played or 'no part'}",
                expected=f"size 1, or a part that {dim} plays",
                hint=either([f"mesh.dims.{dim} = 1", *(f'parallel.{part} = "{dim}"' for part in free)]),
            )


def _tensor(dim: str, dims: Mapping[str, int], model: ModelConfig, broken: Broken) -> Iterator[Problem]:
    size = dims[dim]
    known = [name for name in ("heads", "kv_heads", "ff") if not broken.touches(f"model.{name}")]
    numbers = {name: getattr(model, name) for name in known}
    split = [*numbers.values(), model.vocabulary]
    smaller = [f"mesh.dims.{dim} = {n}" for n in nearest(size, lambda n: all(x % n == 0 for x in split))]
    fits: dict[str, Callable[[int], bool]] = {
        "heads": lambda n: n % size == 0 and n % model.kv_heads == 0 and model.width % (2 * n) == 0,
        "kv_heads": lambda n: n % size == 0 and model.heads % n == 0,
        "ff": lambda n: n % size == 0,
    }
    for name, number in numbers.items():
        if number % size:
            yield Problem(
                f"model.{name}",
                f"{name} is not divisible by {dim}: {number} % {size} = {number % size}",
                given=f"{name} = {number}, mesh.dims.{dim} = {size}",
                expected=f"{name} divisible by mesh.dims.{dim}",
                hint=either([*smaller, *(f"model.{name} = {n}" for n in nearest(number, fits[name], 1))]),
            )
    if model.vocabulary % size:
        rest = model.vocabulary % size
        yield Problem(
            f"mesh.dims.{dim}",
            f"the {model.vocabulary} bytes are not divisible by {dim}: {model.vocabulary} % {size} = {rest}",
            given=f"{dim} = {size}",
            expected=f"a divisor of {model.vocabulary}",
            hint=either(smaller),
        )


def _stages(dim: str, dims: Mapping[str, int], model: ModelConfig) -> Iterator[Problem]:
    stages = dims[dim]
    if model.layers < stages:
        yield Problem(
            "model.layers",
            f"fewer layers than stages: {model.layers} < {stages}",
            given=f"layers = {model.layers}, mesh.dims.{dim} = {stages}",
            expected="at least one layer for each stage",
            hint=either([f"model.layers = {stages}", f"mesh.dims.{dim} = {model.layers}"]),
        )


def _batches(
    data: str | None,
    pipeline: str | None,
    dims: Mapping[str, int],
    parallel: ParallelConfig,
    train: TrainConfig,
) -> Iterator[Problem]:
    copies = 1 if data is None else dims[data]
    stages = 1 if pipeline is None or parallel.schedule == "gpipe" else dims[pipeline]
    batch, micro = train.global_batch, train.microbatch

    def fits(batch: int, copies: int, micro: int) -> bool:
        return batch % (copies * micro) == 0 and batch // (copies * micro) >= stages

    batches = [f"train.global_batch = {n}" for n in nearest(batch, lambda n: fits(n, copies, micro))]
    micros = [f"train.microbatch = {n}" for n in nearest(micro, lambda n: fits(batch, copies, n))]
    if batch % copies:
        others = nearest(copies, lambda n: fits(batch, n, micro), 1)
        yield Problem(
            "train.global_batch",
            f"not divisible by {data}: {batch} % {copies} = {batch % copies}",
            given=f"global_batch = {batch}, mesh.dims.{data} = {copies}",
            expected=f"equally many samples for each of the {copies} ranks along {data}",
            hint=either([*batches, *(f"mesh.dims.{data} = {n}" for n in others)]),
        )
    elif batch // copies % micro:
        each = batch // copies
        along = "" if data is None else f", mesh.dims.{data} = {copies}"
        yield Problem(
            "train.microbatch",
            f"does not divide a rank's samples: {batch}/{copies} = {each}, {each} % {micro} = {each % micro}",
            given=f"global_batch = {batch}, microbatch = {micro}{along}",
            expected=f"a divisor of {each}",
            hint=either([*micros, *batches[:1]]),
        )
    elif batch // copies // micro < stages:
        number = batch // copies // micro
        yield Problem(
            "train.microbatch",
            f"fewer micro-batches than stages: {batch}/{copies}/{micro} = {number} < {stages}",
            given=f"global_batch = {batch}, microbatch = {micro}, mesh.dims.{pipeline} = {stages}",
            expected="at least one micro-batch for each stage of 1f1b",
            hint=either([*micros[:1], *batches[:1], 'parallel.schedule = "gpipe"']),
        )

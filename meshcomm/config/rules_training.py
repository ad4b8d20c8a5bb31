"""What must hold between the mesh and how it is trained, whatever the model is?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain, count

from meshcomm.config.mesh import MeshConfig
from meshcomm.config.parallel import PARTS, ParallelConfig, Part, runs
from meshcomm.config.problems import FURTHEST, Broken, Near, Problem, remainder, shared
from meshcomm.config.section import rule
from meshcomm.config.training import Training
from meshcomm.config.write import toml, whole_toml
from meshcomm.layout.names import nearest_name
from meshcomm.layout.sizes import fold


def training_problems(training: Training) -> Iterator[Problem]:
    """What is wrong between the sections of a training file. A size of -1 is not judged."""
    if training.broken.touches("mesh.dims", "mesh.views", *(f"parallel.{part}" for part in PARTS)):
        return
    mesh, parallel = training.mesh, training.parallel
    unknown = list(unknown_dims(mesh, parallel, training.broken))
    if not unknown:
        yield from _unused_dims(mesh, parallel)
    # A dim that plays two parts is reported by the section itself.
    if list(parallel.parts.values()).count(str(parallel.expert)) == 1:
        unknown += _expert_dim(training)
    yield from unknown or training.problems()


def unknown_dims(mesh: MeshConfig, parallel: ParallelConfig, broken: Broken) -> Iterator[Problem]:
    """Parts that dims play which the mesh has not."""
    if not broken.touches("mesh.dims", *(f"parallel.{part}" for part in PARTS)):
        for part, dim in parallel.parts.items():
            if part != "expert" and dim not in mesh.dims:
                yield _unknown_dim(mesh, part, dim)


# -- every part has a dim, and every dim a part -----------------------------------------------------


def _unknown_dim(mesh: MeshConfig, part: Part, dim: str) -> Problem:
    near = nearest_name(dim, mesh.dims)
    of_view = any(dim in sizes for sizes in mesh.views.values())
    kind = "a merged dim" if dim in mesh.merge else "a view's dim" if of_view else ""
    ways = [f'parallel.{part} = "{near}"'] if near is not None else []
    if not kind:
        ways.append(f"mesh.dims = {whole_toml({dim: 1, **mesh.dims})}")
    return Problem(
        f"{dim} is {kind}" if kind else f"no dim {dim}",
        "one of mesh.dims: " + ", ".join(mesh.dims),
        [*ways, f"remove parallel.{part}"],
        given=f"{part} = {toml(dim)}, mesh.dims = {toml(mesh.dims)}",
        key=f"parallel.{part}",
    )


def _unused_dims(mesh: MeshConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Dims of the base that no part uses. A view's dims say only how its part lies."""
    # Experts are on a view's dim.
    free = [part for part in PARTS if part not in parallel.parts and part != "expert"]
    used = [dim for part, dim in parallel.parts.items() if part != "expert"]
    for dim, size in mesh.dims.items():
        if size > 1 and dim not in used:
            played = ", ".join(f"{part} = {toml(name)}" for part, name in parallel.parts.items())
            yield Problem(
                f"no part of the training uses {dim}: its {size} ranks would all do the same",
                f"size 1, or a part that {dim} plays",
                [f"mesh.dims.{dim} = 1", *(f'parallel.{part} = "{dim}"' for part in free)],
                given=f"dims.{dim} = {size}; parallel has {played or 'no part'}",
                key=f"mesh.dims.{dim}",
            )


def _expert_dim(training: Training) -> Iterator[Problem]:
    """The expert's dim is in exactly one view, and not in the base."""
    mesh, dim = training.mesh, training.dim("expert")
    homes = [view for view, sizes in mesh.views.items() if dim in sizes]
    if len(homes) == 1 and dim not in mesh.dims:
        return
    if dim in mesh.dims:
        what = f"{dim} is one of mesh.dims, along which all weights would be split"
    elif homes:
        what = f"{dim} is in {len(homes)} views: {', '.join(homes)}"
    else:
        what = f"{dim} is a merged dim" if dim in mesh.merge else f"no dim {dim} in a view"
    of_views = dict.fromkeys(n for sizes in mesh.views.values() for n in sizes if n not in mesh.dims)
    others = [name for name in of_views if name != dim]
    ways: list[str] = []
    if others and not homes:
        near = nearest_name(dim, others)
        ways = [f'parallel.expert = "{name}"' for name in ([near] if near is not None else others)]
    elif not homes:
        name = _free("ep", mesh) if dim in mesh.dims or dim in mesh.merge else dim
        change = "" if name == dim else f" and parallel.expert = {toml(name)}"
        ways = [way + change for way in _view_ways(training, name, _free("expert", mesh))]
    yield Problem(
        what,
        "a dim of one of mesh.views that is no dim of mesh.dims"
        + (f": {', '.join(others)}" if others else ", such as ep"),
        [*ways, "remove parallel.expert"],
        given=f"expert = {toml(dim)}, mesh.dims = {toml(mesh.dims)}, mesh.views = {toml(mesh.views)}",
        key="parallel.expert",
    )


@rule(Training, "parallel.expert")
def _expert_view(training: Training) -> Iterator[Problem]:
    mesh, parallel = training.mesh, training.parallel
    view = parallel.expert_view(mesh.views)
    if view is None or parallel.expert is None or parallel.expert in mesh.dims:
        return
    kept: tuple[Part, ...] = ("pipeline", "tensor")
    for part in kept:
        dim = parallel.parts.get(part)
        if dim is not None and dim not in mesh.views[view]:
            yield Problem(
                f"does not hold {dim}, which plays {part}",
                f"{dim} = {mesh.dims[dim]} in its place: experts lie along {part} as all weights do",
                _view_ways(training, parallel.expert, view),
                given=f"views.{view} = {toml(mesh.views[view])}, mesh.dims = {toml(mesh.dims)}, {part} = {toml(dim)}",
                key=f"mesh.views.{view}",
            )


def _view_ways(training: Training, expert: str, view: str) -> list[str]:
    fit = fitting_view(training.mesh, training.parallel, getattr(training.model, "experts", 0), expert, view)
    return [] if fit is None else [f"mesh.views.{view} = {whole_toml(fit)}"]


def fitting_view(
    mesh: MeshConfig, parallel: ParallelConfig, experts: int, expert: str, view: str
) -> Mapping[str, int] | None:
    """A view in which the dim `expert` takes the ranks along data, shard and context.

    view: its name, and perhaps the one that it would replace. None where no view can: those dims do not lie
    side by side, or the size of one of the others is open or not known.
    """
    parts = (parallel.pipeline, parallel.tensor)
    kept = {dim: mesh.dims.get(dim, 0) for dim in parts if dim is not None}
    # Other dims of size 1 need not be there.
    order = [dim for dim, size in mesh.dims.items() if size != 1 or dim in kept]
    inside = [index for index, dim in enumerate(order) if dim not in kept]
    first, last = (inside[0], inside[-1]) if inside else (0, -1)
    between = [dim for dim in order[first : last + 1] if dim in kept]
    if any(kept[dim] != 1 for dim in between) or any(size < 1 for size in kept.values()):
        return None
    split = [mesh.dims[order[index]] for index in inside]
    ranks = -1 if -1 in split else math.prod(split)
    size = ranks if ranks < 1 or not experts else math.gcd(ranks, experts)
    replaced = mesh.views.get(view, {})
    beside = next((n for n in replaced if n not in mesh.dims and n != expert), None) or _free("edp", mesh)
    return {
        **{dim: kept[dim] for dim in order[:first]},
        beside: 1 if ranks < 1 else ranks // size,
        expert: size,
        **{dim: kept[dim] for dim in (*between, *order[last + 1 :])},
    }


def _free(name: str, mesh: MeshConfig) -> str:
    """`name`, or one like it that the mesh does not use yet."""
    used = {*mesh.dims, *mesh.merge, *mesh.views, *(dim for sizes in mesh.views.values() for dim in sizes)}
    return next(new for new in chain([name], (f"{name}{n}" for n in count(2))) if new not in used)


# -- samples and tokens -----------------------------------------------------------------------------


@rule(Training, "train.global_batch", "data", "shard")
def _samples_of_a_rank(training: Training) -> Iterator[Problem]:
    split = training.size("data") * training.size("shard")
    batch = training.train.global_batch
    parts: list[Part] = [part for part in training.parallel.parts if part in ("data", "shard")]
    names = [training.dim(part) for part in parts]
    if batch % split:
        yield Problem(
            f"not divisible by {'*'.join(names)}: {remainder(batch, split)}",
            f"equally many samples for each of the {split} ranks along {' and '.join(names)}",
            [Near("train.global_batch", 2, FURTHEST), *(Near(training.key(part)) for part in parts)],
        )


@rule(Training, "train.global_batch", "train.microbatch", "data", "shard")
def _microbatches_of_a_rank(training: Training) -> Iterator[Problem]:
    split, micro = training.size("data") * training.size("shard"), training.train.microbatch
    batch = training.train.global_batch
    if batch % split == 0 and batch // split % micro:
        each = batch // split
        yield Problem(
            f"does not divide a rank's samples: {shared(batch, split)}{remainder(each, micro)}",
            f"a divisor of {each}",
            [Near("train.microbatch", 2), Near("train.global_batch", 1, FURTHEST)],
            key="train.microbatch",
        )


@rule(Training, "train.microbatch", "train.global_batch", "data", "shard", "pipeline", "parallel.schedule")
def _microbatches_of_a_pipeline(training: Training) -> Iterator[Problem]:
    parallel, train, ranks = training.parallel, training.train, training.size("pipeline")
    split = training.size("data") * training.size("shard") * train.microbatch
    number, schedule = train.global_batch // split, parallel.schedule
    if train.global_batch % split or runs(schedule, number, ranks):
        return
    dim = training.dim("pipeline")
    quotient = f"{train.global_batch}/{split // train.microbatch}/{train.microbatch} = {number}"
    one_stage = " and parallel.stages_per_rank = 1" if parallel.stages_per_rank > 1 else ""
    ways: list[str | Near] = [
        Near("train.microbatch"),
        Near("train.global_batch", 1, FURTHEST),
        f'parallel.schedule = "gpipe"{one_stage}',
    ]
    if number < ranks:
        stages, each = (
            ("stages", "stage of 1f1b")
            if schedule == "1f1b"
            else (f"ranks along {dim}", f"rank of {schedule}")
        )
        what = f"fewer micro-batches than {stages}: {quotient} < {ranks}"
        yield Problem(what, f"at least one micro-batch for each {each}", ways)
    elif schedule == "interleaved_1f1b":
        what = f"micro-batches are not a multiple of {dim}: {quotient}, {remainder(number, ranks)}"
        yield Problem(what, f"whole rounds of {ranks} micro-batches, one for each rank along {dim}", ways)
    else:
        rounds = number // ranks
        yield Problem(
            f"micro-batches do not fall into {rounds} equal rounds: {quotient}, "
            f"{number} // {ranks} = {rounds}, {remainder(number, rounds)}",
            f"as many micro-batches in each round of {schedule}, at least one for each rank along {dim}",
            ways,
        )


@rule(Training, "data.sequence", "context", "parallel.attention")
def _chunks_of_tokens(training: Training) -> Iterator[Problem]:
    assert training.data is not None
    sequence, context = training.data.sequence, training.size("context")
    ring = training.parallel.attention == "ring"
    by = context * (2 if ring and context > 1 else 1)
    if sequence % by:
        dim = training.dim("context")
        yield Problem(
            f"not divisible by {'2*' if ring else ''}{dim}: {remainder(sequence, by)}",
            "two chunks of equal length for each rank, one early and one late: zig-zag"
            if ring
            else f"equally many tokens for each of the {context} ranks along {dim}",
            [Near("data.sequence", 2, FURTHEST), Near(f"mesh.dims.{dim}")],
        )


@rule(Training, "data.sequence", "context", "tensor", "parallel.sequence_parallel")
def _tokens_along_tensor(training: Training) -> Iterator[Problem]:
    assert training.data is not None
    sequence, context, tensor = training.data.sequence, training.size("context"), training.size("tensor")
    judged = training.parallel.sequence_parallel and not list(_chunks_of_tokens(training))
    if judged and sequence // context % tensor:
        dim = training.dim("tensor")
        yield Problem(
            f"a rank's tokens are not divisible by {dim}: {shared(sequence, context)}"
            f"{remainder(sequence // context, tensor)}",
            f"equally many tokens for each of the {tensor} ranks along {dim}",
            [Near("data.sequence", 2, FURTHEST), "parallel.sequence_parallel = false"],
        )


@rule(Training, "train.eval_every", "data.validation", "data.validation_files", "data.validation_split")
def _evaluated(training: Training) -> Iterator[Problem]:
    assert training.data is not None
    data, every = training.data, training.train.eval_every
    if every and not data.validates:
        yield Problem(
            "nothing to evaluate: the data has no validation part",
            "data.validation, data.validation_files or data.validation_split beside it",
            ["data.validation = 0.05", "train.eval_every = 0"],
            given=f"eval_every = {every}",
        )
    files = "validation_files" if data.validation_files else "validation_split"
    if not every and (data.validation_files or data.validation_split):
        yield Problem(
            "no effect: nothing is evaluated",
            "train.eval_every of 1 or more",
            ["train.eval_every = 100", f"remove data.{files}"],
            given="eval_every = 0",
            key=f"data.{files}",
        )


# -- what cannot be had together --------------------------------------------------------------------


@rule(Training, "parallel.shard", "parallel.expert", "parallel.pipeline", "parallel.tensor")
def _sharded_experts(training: Training) -> Iterator[Problem]:
    """Experts' copies are shards along one dim of their view, and copies of these along another: FSDP takes two."""
    mesh, parallel = training.mesh, training.parallel
    view = parallel.expert_view(mesh.views)
    if parallel.shard is None or view is None or parallel.expert in mesh.dims:
        return
    sizes = mesh.views[view]
    left = [dim for dim in parallel.expert_gradient_dims(mesh.views) if sizes[dim] != 1]
    if len(left) > 2:
        yield Problem(
            f"has {', '.join(left)} beside the dims of expert, pipeline and tensor: experts are sharded along one dim and "
            "copied along one other",
            "two of them at most",
            [*_view_ways(training, str(parallel.expert), view), "remove parallel.shard"],
            given=f"views.{view} = {toml(sizes)}, shard = {toml(parallel.shard)}, expert = {toml(parallel.expert)}",
            key=f"mesh.views.{view}",
        )


@rule(Training, "train.compile", "parallel.overlap")
def _compiled_rings(training: Training) -> Iterator[Problem]:
    if training.train.compile and training.parallel.overlap:
        yield Problem(
            "overlap has no effect in compiled blocks, which gather the sequence at once",
            "one of both",
            ["parallel.overlap = false", "train.compile = false"],
            key="parallel.overlap",
        )


@rule(Training, "train.compile", "parallel.schedule")
def _compiled_halves(training: Training) -> Iterator[Problem]:
    # torch 2.13 refuses modules from torch.compile here; compiled in place, the backward graph
    # ran twice for each micro-batch, once for the inputs and once for the weights.
    zero_bubble = training.parallel.schedule == "zero_bubble" and training.open_size("pipeline") != 1
    if training.train.compile and zero_bubble:
        yield Problem(
            "cannot compile for zero_bubble: a compiled block's backward pass is one piece, and this schedule "
            "runs the halves for inputs and weights at different times",
            "one of them",
            ["train.compile = false", 'parallel.schedule = "interleaved_1f1b"'],
        )


@rule(Training, "train.profile_ranks", "mesh.dims")
def _profiled_ranks(training: Training) -> Iterator[Problem]:
    mesh, sizes = training.mesh, training.mesh.dims.values()
    if mesh.ranks is None and min(sizes) < 1:
        return
    known = range(math.prod(sizes)) if mesh.ranks is None else mesh.ranks
    outside = [rank for rank in training.train.profile_ranks if rank not in known]
    if outside:
        yield Problem(
            f"rank {outside[0]} is not in the mesh",
            f"ranks of the mesh: {fold(mesh.ranks) if mesh.ranks is not None else f'0 to {known[-1]}'}",
            [f"train.profile_ranks = {toml([known[0]])}", "remove train.profile_ranks: all ranks"],
        )

"""Rules that relate the sections of a configuration. Each is checked once the sizes that it reads are numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from meshcomm.config.mesh import MeshConfig
from meshcomm.config.model import FACTS, ModelConfig
from meshcomm.config.parallel import PARTS, ParallelConfig, ParallelRole, runs
from meshcomm.config.pretrained import publishes_plan
from meshcomm.config.problems import Fit, Problem, multiples, nearest, quotient, remainder
from meshcomm.config.rules_mesh import may_use_nccl
from meshcomm.config.section import Rule, Table
from meshcomm.config.train import DataConfig, TrainConfig
from meshcomm.config.write import toml, whole_toml
from meshcomm.layout.names import nearest_name
from meshcomm.layout.sizes import divisors, is_name

if TYPE_CHECKING:
    from meshcomm.config.root import Config

T = TypeVar("T")
# The sections that each section requires. Code may provide the model and the data instead.
_NEEDS: Final = {
    "parallel": ("train",),
    "model": ("parallel", "train", "data"),
    "data": ("parallel", "train"),
    "train": ("parallel",),
}
_A_VIEW: Final = (
    "a view with the pipeline and tensor dims unchanged, and two dims for the rest: copies and experts"
)
# Maximum distance to search for a dim size that fits.
_MOST_SIZE: Final = 256


class _NotKnown(Exception):
    """A rule reads a section that is missing, or a size that is not known yet."""


@dataclass(frozen=True)
class Resolved:
    """A configuration as the cross-section rules see it: every size is a number.

    A rule is skipped if it reads a missing section, or a size of -1 that is unresolved because the number of processes is
    unknown. `Config.resolved` runs all rules with the number of processes.
    config: the configuration as written. sizes: the known sizes of dims, in the base mesh and in views.
    """

    config: Config
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, config: Config) -> Resolved:
        """Return the configuration with the sizes that it specifies."""
        mesh, number, sizes = config.mesh, config.mesh.count(None), dict[str, int]()
        for dims in (*mesh.views.values(), mesh.dims):
            sizes |= _known(dims, number)
        return cls(config, sizes)

    @property
    def mesh(self) -> MeshConfig:
        """The `[mesh]` section with every -1 resolved. A rule that reads it is skipped if a size is unknown."""
        mesh = self.config.mesh
        views = Table({name: self._numbers(view) for name, view in mesh.views.items()})
        return mesh.model_copy(update={"dims": self._numbers(mesh.dims), "views": views})

    def _numbers(self, dims: Iterable[str]) -> Table[str, int]:
        return Table({name: _present(self.sizes.get(name)) for name in dims})

    @property
    def parallel(self) -> ParallelConfig:
        """The `[parallel]` section. A rule that reads a missing section is skipped."""
        return _present(self.config.parallel)

    @property
    def model(self) -> ModelConfig:
        """The `[model]` section."""
        return _present(self.config.model)

    @property
    def data(self) -> DataConfig:
        """The `[data]` section."""
        return _present(self.config.data)

    @property
    def train(self) -> TrainConfig:
        """The `[train]` section."""
        return _present(self.config.train)

    def dim(self, part: ParallelRole) -> str:
        """Return the dim that has this role."""
        return _present(self.parallel.parts.get(part))

    def key(self, part: ParallelRole) -> str:
        """Return the key of the setting for the size of the dim with this role."""
        view = self.config.expert_view if part == "expert" else None
        return f"mesh.{'dims' if view is None else f'views.{view}'}.{self.dim(part)}"

    def size(self, part: ParallelRole) -> int:
        """Return the number of ranks along the dim with this role, or 1 if no dim has the role."""
        dim = self.parallel.parts.get(part)
        return 1 if dim is None else _present(self.sizes.get(dim))

    def written(self, names: str) -> str:
        """Format settings (`model.num_heads`) and the sizes of roles' dims (`tensor`) for a report. names: separated by
        spaces.
        """
        return ", ".join(filter(None, map(self._written, names.split())))

    def _written(self, name: str) -> str:
        section, _, key = name.partition(".")
        if key:
            return str(getattr(self, section).written(key))
        part = next(part for part in PARTS if part == name)
        return f"{self.key(part)} = {self.size(part)}" if part in self.parallel.parts else ""


def problems(resolved: Resolved, rules: Iterable[Rule]) -> Iterator[Problem]:
    """Yield the problems that the rules find, with the dim sizes that would fix each problem."""
    rules = list(rules)
    for problem in broken(rules, resolved):
        ways = (_sizes_that_fit(resolved, rules, problem, way) for way in problem.tries)
        yield replace(problem, tries=list(chain.from_iterable(ways)))


def broken(rules: Iterable[Rule], resolved: Resolved) -> Iterator[Problem]:
    """Yield the problems that the rules find, without sizes that would fix them."""
    for rule in rules:
        with suppress(_NotKnown):
            yield from rule(resolved)


def _sizes_that_fit(resolved: Resolved, rules: list[Rule], problem: Problem, way: str | Fit) -> list[str]:
    """Return a fix as text. A size fits if it solves this problem and causes no new one."""
    if isinstance(way, str):
        # The folder's config.json says how large its model is.
        model, facts = resolved.config.model, tuple(f"model.{name} = " for name in FACTS)
        return [] if model is not None and model.pretrained and way.startswith(facts) else [way]
    part = next(part for part in PARTS if part == way.part)
    dim, mesh = resolved.dim(part), resolved.config.mesh
    known = {other.what for other in chain(broken(rules, resolved), mesh.problems())} - {problem.what}
    fitting: list[int] = []
    size = resolved.sizes[dim]
    for candidate in nearest(size, range(max(1, size - _MOST_SIZE), size + _MOST_SIZE), 2 * _MOST_SIZE):
        changed = replace(resolved, sizes={**resolved.sizes, dim: candidate})
        other_mesh = mesh.model_copy(update={"dims": Table({**mesh.dims, dim: candidate})})
        if known.issuperset(other.what for other in chain(broken(rules, changed), other_mesh.problems())):
            fitting.append(candidate)
        if len(fitting) == way.most:
            break
    return [f"{resolved.key(part)} = {candidate}" for candidate in fitting]


def _known(sizes: Mapping[str, int], number: int | None) -> dict[str, int]:
    """Return the known sizes. A single -1 is replaced by the size that the number of ranks leaves for it."""
    known = {name: size for name, size in sizes.items() if size > 0}
    product = math.prod(known.values())
    if number and len(known) == len(sizes) - 1 and -1 in sizes.values() and number % product == 0:
        return {name: known.get(name, number // product) for name in sizes}
    return known


def _present(value: T | None) -> T:
    if value is None:
        raise _NotKnown
    return value


# -- sections ---------------------------------------------------------------------------------------


def _sections(resolved: Resolved) -> Iterator[Problem]:
    """Check that all sections needed for training are present.

    Without the other sections, [parallel] only assigns roles, for a program's own training loop.
    """
    present = [name for name in _NEEDS if getattr(resolved.config, name) is not None]
    needed = {name for section in present for name in _NEEDS[section]}
    missing = [name for name in _NEEDS if name in needed.difference(present)]
    if not missing or present == ["parallel"]:
        return
    absent, there = (" ".join(f"[{name}]" for name in names) for names in (missing, present))
    what = "missing" if len(missing) == 1 else f"{len(missing)} sections are missing"
    expected = "all of [parallel] [model] [data] [train] ([model] and [data] only if no code provides them), only a mesh, "
    expected += "or only [parallel] for the roles of dims"
    yield Problem(", ".join(missing), what, expected, [f"add {absent}", f"remove {there}"], there)


def _device_to_bind(resolved: Resolved) -> Iterator[Problem]:
    process, mesh = resolved.config.process, resolved.config.mesh
    if process.device_id is True and mesh.device == "cpu":
        ways = ['process.device_id = "auto"', 'mesh.device = "cuda"']
        what, given = "no effect: device cpu has nothing to bind", 'device_id = true, mesh.device = "cpu"'
        yield Problem("process.device_id", what, '"auto" or false on cpu', ways, given)


def _elastic(resolved: Resolved) -> Iterator[Problem]:
    elastic, mesh, parallel = resolved.config.elastic, resolved.config.mesh, resolved.config.parallel
    if not elastic.min:
        return
    given = f"elastic.{elastic.written('min')}, {mesh.written('dims')}"
    copies = (
        []
        if parallel is None
        else [name for part, name in parallel.parts.items() if part in ("data", "shard")]
    )
    for dim, least in elastic.min.items():
        size = mesh.dims.get(dim)
        fitting = [name for name in copies if mesh.dims.get(name, 0) >= least or mesh.dims.get(name) == -1]
        ways = [f"elastic.min = {{ {name} = {least} }}" for name in fitting]
        ways = (
            ways
            or [f"elastic.min = {{ {name} = 1 }}" for name in copies if name in mesh.dims]
            or ["remove elastic.min"]
        )
        parts = [] if parallel is None else [part for part, name in parallel.parts.items() if name == dim]
        if size is None:
            expected = f"one of {', '.join(copies or mesh.dims)}"
            yield Problem(f"elastic.min.{dim}", "not a dim of the mesh", expected, ways, given)
        elif least > size != -1:
            ways = [f"elastic.min.{dim} = {size - 1}"] * (size > 1)
            what = f"more than the mesh has along {dim}: {least} > {size}"
            yield Problem(f"elastic.min.{dim}", what, f"at most {size}", ways, given)
        elif parts and not {"data", "shard"} & {*parts}:
            what = f"the model needs every rank along {dim}, which has the role {parts[0]}"
            yield Problem(f"elastic.min.{dim}", what, "a dim with the role data or shard", ways, given)
    for key in ("ranks", "rank_order"):
        if getattr(mesh, key) is not None:
            what = f"a mesh with {key} cannot change its size"
            yield Problem(
                "elastic.min",
                what,
                f"no mesh.{key}",
                [f"remove mesh.{key}"],
                f"{key} = {toml(getattr(mesh, key))}",
            )


def _network_of_nccl(resolved: Resolved) -> Iterator[Problem]:
    mesh = resolved.config.mesh
    settings = {} if may_use_nccl(mesh) else resolved.config.network.nccl_settings()
    what = "no effect: no group of this mesh runs on NCCL"
    for key, value in settings.items():
        given = f"{key} = {toml(value)}, {mesh.written('device backend')}"
        ways = [f"remove network.{key}", 'mesh.device = "cuda" and mesh.backend = "nccl"']
        yield Problem(f"network.{key}", what, "the nccl backend", ways, given)


def _tokenizer(resolved: Resolved) -> Iterator[Problem]:
    model, data = resolved.config.model, resolved.data
    pretrained = None if model is None else model.pretrained
    if data.tokenizer_of(pretrained) is not None or not data.texts_from:
        return
    if data.eos is not None:
        ways = ['data.tokenizer = "tokenizer.json"', "remove data.eos"]
        what = "no effect without a tokenizer: bytes have no end-of-document token"
        yield Problem("data.eos", what, "data.tokenizer", ways, data.written("eos"))


def _documents(resolved: Resolved) -> Iterator[Problem]:
    model, eos_id = resolved.config.model, resolved.data.eos_id
    if eos_id is not None and model is not None and model.given("vocab_size") and eos_id >= model.vocab_size:
        given = f"eos_id = {eos_id}, model.vocab_size = {model.vocab_size}"
        ways = [f"model.vocab_size = {eos_id + 1}", "data.eos_id of the tokenizer that made the tokens"]
        what = "no document would end: this token is outside the model's vocabulary"
        yield Problem("data.eos_id", what, f"0 to {model.vocab_size - 1}", ways, given)


def _evaluation(resolved: Resolved) -> Iterator[Problem]:
    data, every = resolved.data, resolved.train.eval_every
    if every and not data.validates and resolved.train.evaluate is None:
        expected = "data.validation, data.validation_files or train.evaluate"
        ways = ["data.validation = 0.05", "train.eval_every = 0"]
        what = "nothing to evaluate: the data has no validation part"
        yield Problem("train.eval_every", what, expected, ways, f"eval_every = {every}")
    if not every and data.validation_files:
        ways = ["train.eval_every = 100", "remove data.validation_files"]
        what = "no effect: nothing is evaluated"
        yield Problem("data.validation_files", what, "train.eval_every of 1 or more", ways, "eval_every = 0")


def _weights(resolved: Resolved) -> Iterator[Problem]:
    train = resolved.train
    if train.init_from is not None and Path(train.init_from).resolve().is_relative_to(
        Path(train.out).resolve()
    ):
        # A new run in this folder renames what is there, and a resumed one goes on from it.
        ways = ["another train.out", "remove train.init_from, and set train.resume = true"]
        what = "the run would start from weights that are in its own folder"
        given = resolved.written("train.init_from train.out")
        yield Problem("train.init_from", what, "a path outside train.out", ways, given)
    if resolved.train.init_from is not None and resolved.model.random_weights:
        ways = ["remove model.random_weights", "remove train.init_from"]
        what = "no effect: the weights are read from train.init_from"
        given = resolved.written("model.random_weights train.init_from")
        yield Problem("model.random_weights", what, "one of them", ways, given)


# -- every role has a dim, and every dim has a role --------------------------------------------------


def _parts(resolved: Resolved) -> Iterator[Problem]:
    """Check that every dim with a role is a dim of the mesh itself, not of a view, and that every dim has a role.

    Along a dim without a role, all ranks would do the same work.
    """
    mesh, parallel = resolved.config.mesh, resolved.parallel
    if not mesh.dims or not all(map(is_name, mesh.dims)):
        return  # [mesh] reports this
    # The expert dim is in a view.
    used = {part: dim for part, dim in parallel.parts.items() if part != "expert"}
    unknown = [
        _unknown_dim(mesh, part, dim, used.values()) for part, dim in used.items() if dim not in mesh.dims
    ]
    yield from unknown
    if unknown or resolved.config.train is None:
        return
    free = [part for part in PARTS if part not in parallel.parts and part != "expert"]
    for dim in mesh.dims:
        size = resolved.sizes.get(dim, 1)
        if size > 1 and dim not in used.values():
            played = ", ".join(f"{part} = {toml(name)}" for part, name in parallel.parts.items())
            what = f"no part of the training uses {dim}: its {size} ranks would all do the same work"
            ways = [f"mesh.dims.{dim} = 1", *(f'parallel.{part} = "{dim}"' for part in free)]
            given = f"dims.{dim} = {size}; parallel has {played or 'no role'}"
            yield Problem(f"mesh.dims.{dim}", what, f"size 1, or a role for {dim}", ways, given)


def _unknown_dim(mesh: MeshConfig, part: ParallelRole, dim: str, used: Collection[str]) -> Problem:
    # Of the dims without a role, one that is close in letters, or else each that is larger than 1.
    free = [name for name in mesh.dims if name not in used]
    near = nearest_name(dim, free)
    left = [name for name in free if mesh.dims[name] != 1]
    of_view = any(dim in sizes for sizes in mesh.views.values())
    kind = "a merged dim" if dim in mesh.merge else "a view's dim" if of_view else ""
    ways = [f'parallel.{part} = "{name}"' for name in (left if near is None else [near])]
    if not kind and not left:
        added = dict.fromkeys((name for name in used if name not in mesh.dims), 1)
        ways.append(f"mesh.dims = {whole_toml({**added, **mesh.dims})}")
    what = f"{dim} is {kind}" if kind else f"no dim {dim}"
    expected = "one of mesh.dims: " + ", ".join(mesh.dims)
    given = f"{part} = {toml(dim)}, mesh.dims = {toml(mesh.dims)}"
    return Problem(
        f"parallel.{part}", what, expected, ways if left else [*ways, f"remove parallel.{part}"], given
    )


def _expert_dim(resolved: Resolved) -> Iterator[Problem]:
    """Check that the expert dim is in exactly one view and not in the base mesh."""
    mesh, parallel, _ = resolved.config.mesh, resolved.parallel, resolved.train
    dim = resolved.dim("expert")
    homes = [view for view, sizes in mesh.views.items() if dim in sizes]
    # A dim with two roles is reported by [parallel].
    if (len(homes) == 1 and dim not in mesh.dims) or list(parallel.parts.values()).count(dim) > 1:
        return
    if dim in mesh.dims:
        what = f"{dim} is one of mesh.dims, along which all weights would be split"
    elif homes:
        what = f"{dim} is in {len(homes)} views: {', '.join(homes)}"
    else:
        what = f"{dim} is a merged dim" if dim in mesh.merge else f"no dim {dim} in a view"
    of_views = dict.fromkeys(name for sizes in mesh.views.values() for name in sizes)
    others = [name for name in of_views if name not in (dim, *mesh.dims)]
    near = nearest_name(dim, others)
    names = [] if homes else others if near is None else [near]
    ways: list[str | Fit] = [*(f'parallel.expert = "{name}"' for name in names), "remove parallel.expert"]
    expected = "a dim of one of mesh.views that is not in mesh.dims"
    expected += (
        f": {', '.join(others)}" if others else ", such as ep in mesh.views.expert = { edp = 2, ep = 4 }"
    )
    given = f"expert = {toml(dim)}, mesh.dims = {toml(mesh.dims)}, mesh.views = {toml(mesh.views)}"
    yield Problem("parallel.expert", what, expected, ways, given)


def _expert_view(resolved: Resolved) -> Iterator[Problem]:
    """Check that experts are split along pipeline and tensor like all other weights and, with shard, along at most two
    other dims.
    """
    mesh, parallel, _ = resolved.config.mesh, resolved.parallel, resolved.train
    view = _present(parallel.expert_view(mesh.views))
    if parallel.expert in mesh.dims:
        return
    sizes, path = mesh.views[view], f"mesh.views.{view}"
    given = f"views.{view} = {toml(sizes)}"
    for part, dim in parallel.parts.items():
        if part in ("pipeline", "tensor") and dim in mesh.dims and dim not in sizes:
            what, dims = f"does not contain {dim}, which has the role {part}", toml(mesh.dims)
            expected = (
                f"a view with {dim} = {mesh.dims[dim]}: experts are split along {part} like all other weights"
            )
            listed = f"{given}, mesh.dims = {dims}, {part} = {toml(dim)}"
            yield Problem(path, what, expected, [_A_VIEW], listed)
    # FSDP supports two dims: one along which weights are sharded, and one along which they are replicated.
    copied = [dim for dim in parallel.expert_gradient_dims(mesh.views) if sizes[dim] != 1]
    if parallel.shard is not None and len(copied) > 2:
        what = f"has {', '.join(copied)} in addition to the expert, pipeline and tensor dims"
        expected = "at most two: experts are sharded along one and replicated along the other"
        ways, given = [_A_VIEW, "remove parallel.shard"], f"{given}, {parallel.written('shard expert')}"
        yield Problem(path, what, expected, ways, given)


# -- samples and tokens -----------------------------------------------------------------------------


def _global_batch(resolved: Resolved) -> Iterator[Problem]:
    train, ranks = resolved.train, resolved.size("data") * resolved.size("shard")
    batch, micro = train.global_batch_size, train.micro_batch_size
    # A pipeline's schedule also needs a suitable number of micro-batches.
    parallel = resolved.parallel
    stages = resolved.sizes.get(parallel.pipeline or "", 1)
    suits = partial(runs, parallel.options.schedule, ranks=stages)
    number = batch // (ranks * micro)
    full = number // stages * stages
    numbers = {n for n in (number, number + 1, full, full + stages, stages) if n and suits(n)}
    batches = nearest(batch, (n * ranks * micro for n in numbers))
    if batch % ranks:
        parts: list[ParallelRole] = [part for part in parallel.parts if part in ("data", "shard")]
        names = [resolved.dim(part) for part in parts]
        what = f"not divisible by {'*'.join(names)}: {remainder(batch, ranks)}"
        expected = f"the same number of samples for each of the {ranks} ranks along {' and '.join(names)}"
        ways: list[str | Fit] = [*(f"train.global_batch_size = {n}" for n in batches), *map(Fit, parts)]
        given = resolved.written("train.global_batch_size data shard")
        yield Problem("train.global_batch_size", what, expected, ways, given)
    elif (samples := batch // ranks) % micro:
        what = f"does not divide a rank's samples: {quotient(batch, ranks)}{remainder(samples, micro)}"
        fits = (n for n in divisors(samples) if suits(samples // n))
        fitting = [f"train.micro_batch_size = {n}" for n in nearest(micro, fits)]
        given = resolved.written("train.global_batch_size train.micro_batch_size data shard")
        ways = [*fitting, f"train.global_batch_size = {batches[0]}"]
        yield Problem("train.micro_batch_size", what, f"a divisor of {samples}", ways, given)


def _microbatches(resolved: Resolved) -> Iterator[Problem]:
    """Check that the number of microbatches fits the pipeline's schedule."""
    parallel, train, ranks = resolved.parallel, resolved.train, resolved.size("pipeline")
    copies = resolved.size("data") * resolved.size("shard")
    batch, micro, schedule = train.global_batch_size, train.micro_batch_size, parallel.options.schedule
    number = batch // (copies * micro)
    if batch % (copies * micro) or runs(schedule, number, ranks):
        return
    dim = resolved.dim("pipeline")
    arithmetic = f"{batch}/{copies}/{micro} = {number}"
    if number < ranks:
        few, one = ("stages", "stage") if schedule == "1f1b" else (f"ranks along {dim}", "rank")
        what = f"fewer micro-batches than {few}: {arithmetic} < {ranks}"
        expected = f"at least one micro-batch for each {one} with {schedule}"
    elif schedule == "interleaved_1f1b":
        what = f"micro-batches are not a multiple of {dim}: {arithmetic}, {remainder(number, ranks)}"
        expected = f"full rounds of {ranks} micro-batches, one for each rank along {dim}"
    else:
        rounds = number // ranks
        division = f"{number} // {ranks} = {rounds}, {remainder(number, rounds)}"
        what = f"micro-batches do not fall into {rounds} equal rounds: {arithmetic}, {division}"
        expected = f"rounds with the same number of micro-batches, at least one for each rank along {dim}"
    one_stage = " and parallel.options.stages_per_rank = 1" if parallel.options.stages_per_rank > 1 else ""
    ways = [
        f"train.global_batch_size = {-(-number // ranks) * ranks * copies * micro}",
        f'parallel.options.schedule = "gpipe"{one_stage}',
    ]
    names = "train.micro_batch_size train.global_batch_size data shard pipeline parallel.options.schedule"
    given = resolved.written(names)
    yield Problem("train.micro_batch_size", what, expected, ways, given)


def _tokens(resolved: Resolved) -> Iterator[Problem]:
    """Check that samples divide evenly along context and, with sequence_parallel, along tensor."""
    parallel, seq_len = resolved.parallel, resolved.data.seq_len
    context = resolved.size("context")
    ring = parallel.options.attention == "ring"
    chunks = context * (2 if ring and context > 1 else 1)
    tensor = resolved.size("tensor") if parallel.options.sequence_parallel else 1
    fitting = [f"data.seq_len = {n}" for n in multiples(seq_len, math.lcm(chunks, context * tensor))]
    if seq_len % chunks:
        dim = resolved.dim("context")
        what = f"not divisible by {'2*' if ring else ''}{dim}: {remainder(seq_len, chunks)}"
        expected = f"the same number of tokens for each of the {context} ranks along {dim}"
        if ring:
            expected = "two chunks of equal length for each rank, one early and one late (zigzag order)"
        ways: list[str | Fit] = [*fitting, Fit("context")]
        given = resolved.written("data.seq_len context parallel.options.attention")
        yield Problem("data.seq_len", what, expected, ways, given)
    elif (tokens := seq_len // context) % tensor:
        dim = resolved.dim("tensor")
        division = f"{quotient(seq_len, context)}{remainder(tokens, tensor)}"
        what = f"a rank's tokens are not divisible by {dim}: {division}"
        expected = f"the same number of tokens for each of the {tensor} ranks along {dim}"
        ways = [*fitting, "parallel.options.sequence_parallel = false"]
        given = resolved.written("data.seq_len context tensor parallel.options.sequence_parallel")
        yield Problem("data.seq_len", what, expected, ways, given)


# -- the model on the mesh --------------------------------------------------------------------------


def _split_along_tensor(resolved: Resolved) -> Iterator[Problem]:
    # The embedding and head of a folder's model stay unsplit if they cannot be split. Models built by code decide this.
    model, size = resolved.model, resolved.size("tensor")
    if size > 1 and not publishes_plan(model.pretrained):
        what = "transformers publishes no plan for splitting the folder's model"
        ways: list[str | Fit] = [Fit("tensor"), 'model.build = "module:function", which returns a ModelSpec']
        given = resolved.written("model.pretrained tensor")
        yield Problem("parallel.tensor", what, "a family with a plan, or one rank along the dim", ways, given)
        return
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        number = getattr(model, name)
        # Ranks may share key and value heads.
        if number is not None and number % size and (name != "num_kv_heads" or size % number):
            dim, given = resolved.dim("tensor"), resolved.written(f"model.{name} tensor")
            what = f"{name} is not divisible by {dim}: {remainder(number, size)}"
            fitting = multiples(number, size, 1) if name == "intermediate_size" else []
            ways = [Fit("tensor", 2), *(f"model.{name} = {n}" for n in fitting)]
            divisor = " or a divisor" if name == "num_kv_heads" else ""
            yield Problem(f"model.{name}", what, f"a multiple{divisor} of mesh.dims.{dim}", ways, given)
    if model.is_built_in and (size - 1) * -(-model.vocab_size // size) >= model.vocab_size:
        what, given = "too small to be split along tensor", resolved.written("model.vocab_size tensor")
        yield Problem("model.vocab_size", what, "rows for every rank", [Fit("tensor", 2)], given)


def _stages(resolved: Resolved) -> Iterator[Problem]:
    num_layers, ranks = _present(resolved.model.num_layers), resolved.size("pipeline")
    each = resolved.parallel.options.stages_per_rank
    if ranks > 1 and num_layers < ranks * each:
        stages = str(ranks) if each == 1 else f"{ranks}*{each} = {ranks * each}"
        ways: list[str | Fit] = [f"model.num_layers = {ranks * each}", Fit("pipeline")]
        if num_layers // ranks > 1:
            ways.insert(1, f"parallel.options.stages_per_rank = {num_layers // ranks}")
        given = resolved.written("model.num_layers pipeline parallel.options.stages_per_rank")
        what = f"fewer layers than stages: {num_layers} < {stages}"
        yield Problem("model.num_layers", what, "at least one layer for each stage", ways, given)


def _ulysses(resolved: Resolved) -> Iterator[Problem]:
    tensor, context, dim = resolved.size("tensor"), resolved.size("context"), resolved.dim("context")
    heads = [_present(resolved.model.num_heads), _present(resolved.model.num_kv_heads)]
    misfit = heads[0] % tensor or (heads[1] % tensor and tensor % heads[1])
    if resolved.parallel.options.attention != "ulysses" or context == 1 or misfit:
        return
    num_heads, num_kv_heads = (max(1, number // tensor) for number in heads)
    ways: list[str | Fit] = [Fit("context"), 'parallel.options.attention = "ring"']
    given = resolved.written("model.num_heads model.num_kv_heads tensor context parallel.options.attention")
    if num_heads % context:
        what = f"a rank's heads are not divisible by {dim}: "
        what += quotient(heads[0], tensor) + remainder(num_heads, context)
        expected = f"the same number of heads for each of the {context} ranks along {dim}, which exchange tokens for heads"
        yield Problem("model.num_heads", what, expected, ways, given)
    elif num_kv_heads % context and context % num_kv_heads:
        arithmetic = quotient(heads[1], tensor) + remainder(num_kv_heads, context)
        what = f"neither a rank's num_kv_heads nor {dim} divides the other: {arithmetic}, {remainder(context, num_kv_heads)}"
        expected = f"equally many kv heads on each of the {context} ranks along {dim}, or each kv head on equally many ranks"
        yield Problem("model.num_kv_heads", what, expected, ways, given)


def _windows(resolved: Resolved) -> Iterator[Problem]:
    model, dim, ring = resolved.model, resolved.dim("context"), resolved.parallel.options.attention == "ring"
    seq_len, _ = resolved.data.seq_len, _present(model.num_layers)
    short = [window for window in model.windows if window is not None and window < seq_len]
    if ring and short and resolved.size("context") > 1:
        what = "ring attention does not support a sliding window"
        given = resolved.written("model.pretrained data.seq_len context parallel.options.attention")
        given += f", a window of {min(short)} tokens in the folder's config.json"
        ways: list[str | Fit] = ['parallel.options.attention = "ulysses"', Fit("context")]
        expected = f"one rank along {dim}, or attention that splits the heads"
        yield Problem("parallel.options.attention", what, expected, ways, given)


def _experts(resolved: Resolved) -> Iterator[Problem]:
    model, dim, _ = resolved.model, resolved.dim("expert"), resolved.train
    if not model.experts:
        _present(resolved.config.expert_view)
        size = resolved.sizes.get(dim, 1)
        ways: list[str | Fit] = [f"model.experts = {-(-8 // size) * size}", "remove parallel.expert"]
        what, given = "no effect: the model has no experts", resolved.written("parallel.expert model.experts")
        yield Problem("parallel.expert", what, "model.experts of 1 or more", ways, given)
    elif model.experts % (size := resolved.size("expert")):
        what = f"experts is not divisible by {dim}: {remainder(model.experts, size)}"
        expected = f"the same number of experts for each of the {size} ranks along {dim}"
        ways = [f"model.experts = {n}" for n in multiples(model.experts, size)]
        yield Problem("model.experts", what, expected, ways, resolved.written("model.experts expert"))


# -- combinations that are not supported --------------------------------------------------------------


def _compiled_halves(resolved: Resolved) -> Iterator[Problem]:
    # torch 2.13 rejects modules from torch.compile for this schedule. When blocks were compiled in place, the
    # backward graph ran twice per microbatch: once for the inputs and once for the weights.
    halves = resolved.parallel.options.schedule == "zero_bubble"
    if resolved.train.compile and halves and resolved.sizes.get(resolved.dim("pipeline")) != 1:
        what = "cannot compile for zero_bubble: a compiled block's backward pass cannot be split, but this schedule "
        what += "runs the input and weight halves at different times"
        ways = ["train.compile = false", 'parallel.options.schedule = "interleaved_1f1b"']
        given = resolved.written("train.compile parallel.options.schedule")
        yield Problem("train.compile", what, "one of them", ways, given)


def _float8(resolved: Resolved) -> Iterator[Problem]:
    float8, model = resolved.train.float8, resolved.config.model
    if float8 is None:
        return
    others = {
        "model.lora": model is not None and model.lora is not None,
        'parallel.options.schedule = "zero_bubble"': resolved.parallel.options.schedule == "zero_bubble",
    }
    for other in (other for other, used in others.items() if used):
        what = f"float8 cannot be combined with {other}"
        ways = ["remove train.float8", f"another {other.partition(' ')[0]}, or none"]
        yield Problem("train.float8", what, "one of them", ways, f"float8 = {toml(float8)}")


def _compiled_documents(resolved: Resolved) -> Iterator[Problem]:
    if resolved.train.compile and resolved.data.document_mask:
        what = "cannot compile attention within documents: the visible tokens differ from batch to batch"
        ways = ["train.compile = false", "data.document_mask = false"]
        given = resolved.written("train.compile data.document_mask")
        yield Problem("train.compile", what, "one of them", ways, given)


RULES: Final[tuple[Rule, ...]] = (
    _sections, _device_to_bind, _elastic, _network_of_nccl, _tokenizer, _documents, _evaluation, _weights,
    _parts, _expert_dim, _expert_view,
    _global_batch, _microbatches, _tokens,
    _split_along_tensor, _stages, _ulysses, _windows, _experts,
    _compiled_halves, _compiled_documents, _float8,
)  # fmt: skip

"""Checks that a split model trains as the unsplit model does. The check runs before training, in one process.

A small copy of the program runs two steps in plain torch, and then, for each kind of parallelism that is used, on two simulated
ranks, in float64. Losses, gradients, buffers and updated weights are compared. If a specification or a published plan is
incomplete, the error names the kind of parallelism and the difference. So it does if a model or a loss computes something else
on a part of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from traceback import extract_tb
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from meshcomm.config import Config, load_config
from meshcomm.errors import MeshClosed, MeshcommError, RankFailed, TrainingError, UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.lines import source_line
from meshcomm.models.difference import difference_of, moved_of, noise_differs, split_differs
from meshcomm.models.one_step import STEPS, Communicates, Outcome, Program, copied, on_a_mesh, plain
from meshcomm.models.spec import ModelSpec, default_values
from meshcomm.models.spec_model import SpecModel
from meshcomm.parallel.context.split import AttentionKind
from meshcomm.parallel.loss import IGNORED
from meshcomm.parallel.memory import cast, seeded
from meshcomm.parallel.tree import first_tensor
from meshcomm.watching.callsite import is_ours

_SAMPLES, _TOKENS = 4, 16


@final
@dataclass(frozen=True)
class Use:
    """The kinds of parallelism used to train a model. attention: the kind of attention for context parallelism."""

    data: bool = False
    pipeline: bool = False
    tensor: bool = False
    sequence_parallel: bool = False
    context: bool = False
    attention: AttentionKind = "ring"
    expert: bool = False

    @property
    def kinds(self) -> dict[str, Use]:
        """A separate `Use` for each kind of parallelism, by the setting that enables that kind."""
        every = {
            "parallel.data": (self.data, Use(data=True)),
            "parallel.pipeline": (self.pipeline, Use(pipeline=True)),
            "parallel.tensor": (self.tensor, Use(tensor=True, sequence_parallel=self.sequence_parallel)),
            "parallel.context": (self.context, Use(context=True, attention=self.attention)),
            "parallel.expert": (self.expert, Use(expert=True)),
        }
        return {name: use for name, (used, use) in every.items() if used}


def config_for(program: Program, use: Use, microbatches: int = 0) -> Config:
    """Return the configuration of a mesh of two ranks for the one kind of parallelism in `use`, or of one rank if there is none.

    microbatches: if not 0, per step and rank, in place of the program's.
    """
    dims = {"dp": 2 if use.data or use.expert else 1}
    mesh: dict[str, Any] = {"dims": dims, "device": "cpu"}
    parallel: dict[str, Any] = {"data": "dp"}
    for part, dim, options in (
        ("tensor", "tp", {"sequence_parallel": use.sequence_parallel}),
        ("pipeline", "pp", {"schedule": "gpipe"}),
        ("context", "cp", {"attention": use.attention}),
    ):
        if getattr(use, part):
            dims[dim] = 2
            parallel |= {part: dim, "options": options}
    if use.expert:
        mesh["views"], parallel["expert"] = {"expert": {"ep": 2}}, "ep"
    train = {
        "schedule": "constant",
        "dtype": "float64",
        **program.train,
        "steps": STEPS,
        "global_batch_size": program.samples,
        "micro_batch_size": program.samples // (dims["dp"] * (microbatches or program.microbatches)),
    }
    return load_config(
        {"mesh": mesh, "parallel": parallel, "data": {"seq_len": program.tokens}, "train": train}
    )


def check_model(spec: ModelSpec, use: Use, *, family: bool = False, name: str = "the model") -> None:
    """Compare two steps of a small model before and after it is cut into stages and split.

    spec:   describes a model that fits into one process. Models with other inputs than tokens (`vocab_size` is 0) are not
            compared, and no loss is called except a family's own: `Trainer` compares these models and losses with its first batch.
    family: whether the model belongs to a model family of the transformers library.
    Raises: TrainingError, which names the kind of parallelism and the difference in losses, gradients or weights;
            UnsupportedOp if the specification lacks a part.
    """
    if not use.kinds or not is_of_tokens(spec, use, spec.module, name):
        return
    program = small_of(spec if family else replace(spec, loss=None), family=family)
    layers = program.model(config_for(program, Use())).num_layers
    check_steps(program._replace(layers=layers), use, name)


# Plain steps: every gradient has an effect in proportion to its size.
PLAIN: Final[Mapping[str, Any]] = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}


def small_of(
    spec: ModelSpec,
    batches: list[tuple[Tensor, Tensor]] | None = None,
    *,
    family: bool = False,
    train: Mapping[str, Any] = PLAIN,
    **more: Any,
) -> Program:
    """Return the small program of a spec. batches, train, more: see Program; if batches is None, random tokens."""
    values = values_of(spec)
    # Dropout by element position is not part of the module.
    spec = replace(spec, weights=None, dropped={}, initialise=lambda name, shape: values[name])

    def module() -> nn.Module:
        with seeded(0):
            built = spec.module()
        cast(built, torch.float64)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                parameter.copy_(values[name])
        return built

    def model(config: Config) -> SpecModel:
        assert config.train is not None and config.data is not None
        return SpecModel(
            replace(spec, loss=copied(spec.loss)), config.train, config.data.seq_len, family=family
        )

    batches = tokens_of(spec.vocab_size) if batches is None else batches
    tokens = first_tensor(batches[0][0]).shape[1] if spec.positions else 0
    # A user gives a family's model only tokens, and it may count positions differently.
    takes_positions = bool(spec.positions) and not family
    positions = {spec.positions: torch.arange(tokens).unsqueeze(0)} if takes_positions else {}
    return Program(
        module, model, batches, train, spec.loss, named=positions, family=family, tied=spec.tied, **more
    )


def tokens_of(vocab_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return random tokens, and targets of which different numbers count in each sample."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(STEPS):
        drawn = torch.randint(vocab_size, (2, _SAMPLES, _TOKENS), generator=generator)
        skipped = torch.arange(_TOKENS) < torch.arange(_SAMPLES)[:, None]
        batches.append((drawn[0], drawn[1].masked_fill(skipped, IGNORED)))
    return batches


def values_of(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the values of all parameters in float64.

    Noise is added, so that norm weights are not exactly 1 and biases are not 0, and each of them has an effect.
    """
    with seeded(0):
        module = spec.module()
    generator = torch.Generator().manual_seed(1)
    drawn = default_values(spec, 0) if spec.initialise is None else {}
    values: dict[str, Tensor] = {}
    shared: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in shared:
            value = drawn[name] if spec.initialise is None else spec.initialise(name, tuple(parameter.shape))
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.05
            shared[id(parameter)] = value + noise if value.is_complex() else value.double() + noise
        values[name] = shared[id(parameter)]
    if spec.tied is not None:
        values[spec.tied[1]] = values[spec.tied[0]]
    return values


def check_steps(program: Program, use: Use, name: str, *, said_later: bool = False) -> str:
    """Compare two steps of a small program on one process with those on two ranks, for each kind of parallelism in `use`.

    Without a kind of parallelism, only the division into microbatches is compared. said_later: whether to ignore errors that the
    model raises before it runs, because training will raise them too.
    Returns why the program is not compared, or "". Raises the errors of `check_model`.
    """
    runs = _Runs(program)
    try:
        alone, again = runs.alone(), _Runs(program).alone()
        noisy = runs.alone(silent=False).draws
    except (Communicates, MeshClosed):
        return "the model or the loss communicates"
    except Exception as error:
        words = str(error).splitlines()
        return (
            f"a small copy does not run on one process: {type(error).__name__}: {words[0] if words else ''}"
        )
    if not all(map(math.isfinite, alone.results.values())):
        noise = listed(alone.noise)
        with_constants = f" with constants for random numbers ({noise})" if noise else ""
        return f"the loss or the gradient norm of the first samples is not finite{with_constants}"
    by_other_means = "the model or the loss draws random numbers by other means than torch's operators"
    if difference_of(again, alone):
        if alone.draws:
            return by_other_means
        return "the model or the loss computes something else each time, from state outside the module"
    _check_all_learn(name, alone, program.train)
    try:
        for setting, kind in (use.kinds or {"train.micro_batch_size": Use()}).items():
            if not kind.pipeline or program.layers > 1:
                _check_kind(runs, kind, name, setting, noisy)
    except UnsupportedOp as error:
        if said_later and error.__cause__ is not None:
            return error.what
        raise
    if alone.draws:
        return by_other_means
    # One process draws noise for the whole batch at once, which no mesh can do.
    names = listed(alone.noise)
    return (
        f"the random numbers that it draws ({names}), which are constants in the comparison" if names else ""
    )


@final
class _Runs:
    """What a small program computes, on one process and on a mesh. On one process, each is computed once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._found: dict[Any, Outcome] = {}

    def of(self, use: Use) -> _Runs:
        """Return the runs that are compared for a kind of parallelism."""
        program = self.program
        if not (use.tensor or use.expert) or program.optimizer is None:
            return self
        # Ranks have parts of the parameters, for which `split_update` checks an optimizer.
        return _Runs(program._replace(optimizer=None, train={**program.train, **PLAIN}))

    def alone(self, pieces: int = 1, silent: bool = True) -> Outcome:
        """Return what one process computes. Arguments: see `plain`."""
        if (pieces, silent) not in self._found:
            config = config_for(self.program, Use())
            self._found[pieces, silent] = plain(self.program, config, silent=silent, pieces=pieces)
        return self._found[pieces, silent]

    def why_not_in(self, pieces: int) -> str:
        """Return the error if one process runs the microbatches one by one, or "" if there is none."""
        try:
            self.alone(pieces)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def on_one_rank(self, pieces: int) -> Outcome:
        """Return what an Engine computes on one rank, with dropout."""
        if pieces not in self._found:
            config = config_for(self.program, Use(), pieces)
            self._found[pieces] = on_a_mesh(self.program, config, silent=False)[0]
        return self._found[pieces]

    def on_two_ranks(self, use: Use, silent: bool) -> list[Outcome]:
        """Return what an Engine computes on each of two ranks."""
        config, noise = config_for(self.program, use), bool(self.alone().noise)
        return on_a_mesh(self.program, config, silent=silent, noise=noise)


def _check_kind(runs: _Runs, use: Use, name: str, setting: str, noisy: bool) -> None:
    """Compare one kind of parallelism. noisy: whether the program draws random numbers."""
    runs = runs.of(use)
    program, alone = runs.program, runs.alone()
    pieces = program.microbatches * (2 if use.data or use.expert else 1)
    # Ranks along context have other tokens, and draw other random numbers for them. The statistics of batch norms cover all
    # ranks.
    draws = noisy and not use.context and not (use.data and program.norms)
    try:
        ranks = [] if alone.draws else runs.on_two_ranks(use, True)
        louder = runs.on_two_ranks(use, False) if draws else []
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, MeshcommError):
            raise cause from error
        if why := runs.why_not_in(pieces):
            raise TrainingError(
                f"a step of {name} fails on one of its microbatches, also on one process",
                given=f"{why}, for {program.samples // pieces} of {program.samples} samples",
                expected="a model and a loss that are given one microbatch at a time, with any number of samples",
                hint="compute what depends on the number of samples from the tensors given, like torch.arange(len(outputs)). "
                "A loss that compares samples with each other gathers them along data and shard",
            ) from error
        lines = [frame for frame in extract_tb(cause.__traceback__) if not is_ours(frame.filename)]
        place = [
            f"at {source_line(frame.filename, frame.lineno)} in {frame.name}: {frame.line}"
            for frame in lines[-1:]
        ]
        blocks = (
            "blocks that take and return hidden states, because blocks of other stages return their first argument; "
            "or ModelSpec(forward=...), which runs only the blocks of its stage"
        )
        raise UnsupportedOp(
            f"{name} cannot be trained with {setting}",
            given="\n".join([f"a small model fails with {type(cause).__name__}: {cause}", *place]),
            expected="a model that computes the same results when it is split",
            hint=f"{blocks}; or remove {setting}"
            if use.pipeline
            else f"remove {setting}, or use your own ModelSpec",
        ) from error
    # A family's own loss may be a function of all samples of a microbatch, as the auxiliary loss of routers is.
    coupled = program.family and program.loss is not None
    for outcome in ranks:
        expected = runs.alone(pieces if coupled else 1)
        if difference := difference_of(outcome, expected):
            remains = bool(difference_of(outcome, runs.alone(pieces)))
            raise split_differs(name, setting, difference, remains, bool(moved_of(outcome, expected)))
    for outcome in louder:
        if difference := difference_of(outcome, runs.on_one_rank(pieces)):
            raise noise_differs(name, setting, difference)
    matters = bool(louder and ranks) and bool(difference_of(runs.alone(silent=False), alone))
    if matters and not difference_of(louder[0], ranks[0]):
        raise noise_differs(name, setting, "random numbers have no effect, as in eval mode")


def _check_all_learn(name: str, outcome: Outcome, train: Mapping[str, Any]) -> None:
    """Raise UnsupportedOp for parameters that have gradients and that the optimizer does not change."""
    if any(not factors.get("lr", 1.0) for factors in train.get("groups", {}).values()):
        return
    still = outcome.unchanged
    # An optimizer may update the weights only after several steps.
    if still and outcome.changed:
        raise UnsupportedOp(
            f"the optimizer never changes parameters of {name}",
            given=f"{listed(still)}, after {STEPS} steps on one process in which they have gradients",
            expected="parameters that learn, or parameters without a gradient",
            hint=f"train.frozen = [{still[0]!r}], if a parameter is not to learn",
        )


def _cause(error: BaseException) -> BaseException:
    """Return the exception that a simulated rank raised."""
    while isinstance(error, RankFailed) and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_of_tokens(spec: ModelSpec, use: Use, build: Callable[[], nn.Module], name: str) -> bool:
    """Return whether the inputs are tokens. Raises UnsupportedOp if they seem to be tokens of an unknown vocabulary.

    Training raises its own errors if the specification lacks the parts that `use` needs.
    """
    declared = (
        (use.tensor and spec.split)
        or (use.pipeline and spec.layers)
        or (use.context and (spec.attention or spec.forward))
        or (use.expert and spec.experts)
    )
    if not declared:
        return bool(spec.vocab_size)
    if (
        not spec.vocab_size
        and spec.loss is None
        and any(isinstance(part, nn.Embedding) for part in build().modules())
    ):
        raise UnsupportedOp(
            f"{name} cannot be compared with the unsplit model before training: its ModelSpec has no vocab_size",
            given="vocab_size = 0, no loss, and a module with an nn.Embedding",
            expected="vocab_size: the number of token IDs, and of logits that the head outputs",
            hint="ModelSpec(vocab_size=...); if the inputs are not tokens, ModelSpec(loss=...)",
        )
    return bool(spec.vocab_size)

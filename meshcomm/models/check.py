"""Checks that a split model trains as the unsplit model does. The check runs before training, in one process.

A small copy of the program runs two steps in plain torch, and then, for each kind of parallelism that is used, on two simulated
ranks, in float64. Losses, gradients, buffers and updated weights are compared. If a specification or a published plan is
incomplete, the error names the kind of parallelism and the difference. So it does if a model or a loss computes something else
on a part of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from traceback import extract_tb
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from meshcomm.config import Config, load_config
from meshcomm.errors import MeshClosed, MeshcommError, RankFailed, TrainingError, UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.models.difference import ROOM, difference_of, moved_of, noise_differs, split_differs
from meshcomm.models.family_code import wide
from meshcomm.models.one_step import STEPS, Communicates, Outcome, Small, copied, on_a_mesh, plain
from meshcomm.models.spec import ModelSpec, default_values
from meshcomm.models.spec_model import SpecModel
from meshcomm.parallel.build import cast, seeded
from meshcomm.parallel.context.split import AttentionKind
from meshcomm.parallel.loss import IGNORED, logits_of
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
        found = {
            "parallel.data": (self.data, Use(data=True)),
            "parallel.pipeline": (self.pipeline, Use(pipeline=True)),
            "parallel.tensor": (self.tensor, Use(tensor=True, sequence_parallel=self.sequence_parallel)),
            "parallel.context": (self.context, Use(context=True, attention=self.attention)),
            "parallel.expert": (self.expert, Use(expert=True)),
        }
        return {name: use for name, (used, use) in found.items() if used}


@final
@dataclass(frozen=True)
class Sizes:
    """The sizes of a small program. samples: of the global batch. tokens: of a sample, at least 1. microbatches: per step and
    rank. layers: that a pipeline divides. norms: whether there are batch norms.
    """

    samples: int = _SAMPLES
    tokens: int = _TOKENS
    microbatches: int = 2
    layers: int = 2
    norms: bool = False


def config_for(use: Use, sizes: Sizes, train: Mapping[str, Any]) -> Config:
    """Return the configuration of a mesh of two ranks along the dim of `use`, or of one rank if there is none."""
    mesh: dict[str, Any] = {"dims": {"dp": 2 if use.data or use.expert else 1}, "device": "cpu"}
    parallel: dict[str, Any] = {"data": "dp"}
    options: dict[str, Any] = {}
    for dim, name, used in (
        ("tp", "tensor", use.tensor),
        ("cp", "context", use.context),
    ):
        if used:
            mesh["dims"][dim], parallel[name] = 2, dim
    if use.expert:
        mesh["views"], parallel["expert"] = {"expert": {"ep": 2}}, "ep"
    if use.context:
        options["attention"] = use.attention
    if use.tensor:
        options["sequence_parallel"] = use.sequence_parallel
    ranks = mesh["dims"]["dp"]
    return load_config(
        {
            "mesh": mesh,
            "parallel": {**parallel, "options": options},
            "data": {"seq_len": sizes.tokens},
            "train": {
                "schedule": "constant",
                "dtype": "float64",
                **train,
                "steps": STEPS,
                "global_batch_size": sizes.samples,
                "micro_batch_size": sizes.samples // (ranks * sizes.microbatches),
            },
        }
    )


class _SaidByItself(Exception):
    """An error that a model raises before it runs."""

    def __init__(self, error: UnsupportedOp) -> None:
        super().__init__(str(error))
        self.error = error


def check_model(
    spec: ModelSpec, use: Use, *, family: bool = False, name: str = "the model", said_later: bool = False
) -> None:
    """Compare two steps of a small model before and after it is cut into stages and split.

    spec:   describes a model that fits into one process. Models with other inputs than tokens (`vocab_size` is 0) are not
            compared, and no loss is called except a family's own: `Trainer` compares these models and losses with its first batch.
    family: whether the model belongs to a model family of the transformers library.
    said_later: whether to ignore errors that the model raises before it runs, because training will raise them too.
    Raises: TrainingError, which names the kind of parallelism and the difference in losses, gradients or weights;
            UnsupportedOp if the specification lacks a part.
    """
    if not use.kinds or not is_of_tokens(spec, use, spec.module, name):
        return
    spec = spec if family else replace(spec, loss=None)
    small = small_of(spec, family=family)
    model = small.model(config_for(Use(), Sizes(), PLAIN))
    sizes = Sizes(layers=model.num_layers)
    check_steps(small, use, sizes, PLAIN, name, said_later=said_later)


# Plain steps: every gradient has an effect in proportion to its size.
PLAIN: Final[Mapping[str, Any]] = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}


def small_of(
    spec: ModelSpec,
    batches: list[tuple[Tensor, Tensor]] | None = None,
    *,
    family: bool = False,
    **more: Any,
) -> Small:
    """Return the small program of a spec. batches: see Small; if None, random tokens."""
    values = values_of(spec)
    # Dropout by element position is not part of the module.
    spec = replace(spec, weights=None, dropped={}, initialise=lambda name, shape: values[name])

    def module() -> nn.Module:
        with seeded(0):
            made = spec.module()
        cast(made, torch.float64)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.copy_(values[name])
        return made

    def model(config: Config) -> SpecModel:
        assert config.train is not None and config.data is not None
        return SpecModel(
            replace(spec, loss=copied(spec.loss)), config.train, config.data.seq_len, family=family
        )

    batches = tokens_of(spec.vocab_size) if batches is None else batches
    tokens = first_tensor(batches[0][0]).shape[1] if spec.positions else 0
    # A user gives a family's model only tokens, and it may count positions differently.
    given = bool(spec.positions) and not family
    positions = {spec.positions: torch.arange(tokens).unsqueeze(0)} if given else {}
    return Small(module, model, batches, spec.loss, named=positions, family=family, **more)


def tokens_of(vocab_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return random tokens, and targets of which different numbers count in each sample."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        drawn = torch.randint(vocab_size, (2, _SAMPLES, _TOKENS), generator=generator)
        skipped = torch.arange(_TOKENS) < torch.arange(_SAMPLES)[:, None]
        found.append((drawn[0], drawn[1].masked_fill(skipped, IGNORED)))
    return found


def values_of(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the values of all parameters in float64.

    Noise is added, so that norm weights are not exactly 1 and biases are not 0, and each of them has an effect.
    """
    with seeded(0):
        module = spec.module()
    generator = torch.Generator().manual_seed(1)
    drawn = default_values(spec, 0) if spec.initialise is None else {}
    values: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            values[name] = values[seen[id(parameter)]]
            continue
        seen[id(parameter)] = name
        value = drawn[name] if spec.initialise is None else spec.initialise(name, tuple(parameter.shape))
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.05
        values[name] = value + noise if value.is_complex() else value.double() + noise
    if spec.tied is not None:
        values[spec.tied[1]] = values[spec.tied[0]]
    return values


def check_steps(
    small: Small,
    use: Use,
    sizes: Sizes,
    train: Mapping[str, Any],
    name: str,
    *,
    said_later: bool = False,
) -> str:
    """Compare two steps of a small program on one process with those on two ranks, for each kind of parallelism in `use`.

    train: settings of [train]. Without a kind of parallelism, only the division into microbatches is compared.
    Returns why the program is not compared, or "". Raises the errors of `check_model`.
    """
    plainly = _Plain(small, sizes, train)
    try:
        alone, again = plainly.run(), _Plain(small, sizes, train).run()
        noisy = plainly.run(silent=False).draws
    except (Communicates, MeshClosed):
        return "the model or the loss communicates"
    except Exception as error:
        words = str(error).splitlines()
        return (
            f"a small copy does not run on one process: {type(error).__name__}: {words[0] if words else ''}"
        )
    if not all(map(math.isfinite, alone.results.values())):
        noise = listed(alone.noise)
        said = f" with constants for random numbers ({noise})" if noise else ""
        return f"the loss or the gradient norm of the first samples is not finite{said}"
    others = "the model or the loss draws random numbers by other means than torch's operators"
    if difference_of(again, alone):
        if alone.draws:
            return others
        return "the model or the loss computes something else each time, from state outside the module"
    _check_all_learn(name, alone, train)
    try:
        for setting, each in (use.kinds or {"train.micro_batch_size": Use()}).items():
            if not each.pipeline or sizes.layers > 1:
                _check_kind(plainly, each, name, setting, noisy)
    except UnsupportedOp as error:
        if said_later and error.__cause__ is not None:
            return error.what
        raise
    if alone.draws:
        return others
    # One process draws noise for the whole batch at once, which no mesh can do.
    names = listed(alone.noise)
    return (
        f"the random numbers that it draws ({names}), which are constants in the comparison" if names else ""
    )


@final
class _Plain:
    """The plain program of a small program, with its outcomes."""

    def __init__(self, small: Small, sizes: Sizes, train: Mapping[str, Any]) -> None:
        self.small, self.sizes, self.train = small, sizes, train
        self._found: dict[Any, Outcome] = {}

    def of(self, use: Use) -> _Plain:
        """Return the program that is compared for a kind of parallelism."""
        train = self.train
        if use.pipeline and "groups" in train:
            # The stages are run in turn, under other names.
            return _Plain(
                self.small, self.sizes, {key: each for key, each in train.items() if key != "groups"}
            )
        if (use.tensor or use.expert) and self.small.optimizer is not None:
            # Ranks have parts of the parameters, for which `split_update` checks an optimizer.
            return _Plain(self.small._replace(optimizer=None), self.sizes, {**train, **PLAIN})
        return self

    def run(self, pieces: int = 1, silent: bool = True) -> Outcome:
        """Return what one process computes. Arguments: see `plain`."""
        if (pieces, silent) not in self._found:
            config = config_for(Use(), self.sizes, self.train)
            self._found[pieces, silent] = plain(self.small, config, silent=silent, pieces=pieces)
        return self._found[pieces, silent]

    def why_not_in(self, pieces: int) -> str:
        """Return the error if one process runs the microbatches one by one, or "" if there is none."""
        try:
            self.run(pieces)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def on_one_rank(self, pieces: int) -> Outcome:
        """Return what an Engine computes on one rank, with dropout."""
        if pieces not in self._found:
            config = config_for(Use(), replace(self.sizes, microbatches=pieces), self.train)
            self._found[pieces] = on_a_mesh(self.small, config, silent=False)[0]
        return self._found[pieces]

    def on_two_ranks(self, use: Use, silent: bool) -> list[Outcome]:
        """Return what an Engine computes on each of two ranks."""
        noise = bool(self.run().noise)
        if not use.pipeline:
            return on_a_mesh(self.small, config_for(use, self.sizes, self.train), silent=silent, noise=noise)
        settings = {key: each for key, each in self.train.items() if key != "frozen"}
        config = config_for(use, self.sizes, settings)
        return on_a_mesh(self.small, config, silent=silent, noise=noise, cut=self.train.get("frozen", ()))


def _check_kind(plainly: _Plain, use: Use, name: str, setting: str, noisy: bool) -> None:
    """Compare one kind of parallelism. noisy: whether the program draws random numbers."""
    plainly = plainly.of(use)
    small, sizes = plainly.small, plainly.sizes
    alone = plainly.run()
    pieces = sizes.microbatches * (2 if use.data or use.expert else 1)
    # Ranks along context have other tokens, and draw other random numbers for them. The statistics of batch norms cover all
    # ranks.
    draws = noisy and not use.context and not (use.data and sizes.norms)
    try:
        ranks = [] if alone.draws else plainly.on_two_ranks(use, True)
        louder = plainly.on_two_ranks(use, False) if draws else []
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, MeshcommError):
            raise cause from error
        if why := plainly.why_not_in(pieces):
            raise TrainingError(
                f"a step of {name} fails on one of its microbatches, also on one process",
                given=f"{why}, for {sizes.samples // pieces} of {sizes.samples} samples",
                expected="a model and a loss that are given one microbatch at a time, with any number of samples",
                hint="compute what depends on the number of samples from the tensors given, like torch.arange(len(outputs)). "
                "A loss that compares samples with each other gathers them along data and shard",
            ) from error
        lines = [each for each in extract_tb(cause.__traceback__) if not is_ours(each.filename)]
        at = [f"at {each.filename}:{each.lineno} in {each.name}: {each.line}" for each in lines[-1:]]
        blocks = (
            "blocks that take and return hidden states, because blocks of other stages return their first argument; "
            "or ModelSpec(forward=...), which runs only the blocks of its stage"
        )
        raise UnsupportedOp(
            f"{name} cannot be trained with {setting}",
            given="\n".join([f"a small model fails with {type(cause).__name__}: {cause}", *at]),
            expected="a model that computes the same results when it is split",
            hint=f"{blocks}; or remove {setting}"
            if use.pipeline
            else f"remove {setting}, or use your own ModelSpec",
        ) from error
    # A family's own loss may be a function of all samples of a microbatch, as the auxiliary loss of routers is.
    coupled = small.family and small.loss is not None
    for outcome in ranks:
        expected = plainly.run(pieces if coupled else 1)
        if difference := difference_of(outcome, expected):
            remains = bool(difference_of(outcome, plainly.run(pieces)))
            raise split_differs(name, setting, difference, remains, bool(moved_of(outcome, expected)))
    for outcome in louder:
        if difference := difference_of(outcome, plainly.on_one_rank(pieces)):
            raise noise_differs(name, setting, difference)
    matters = bool(louder and ranks) and bool(difference_of(plainly.run(silent=False), alone))
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
        and any(isinstance(each, nn.Embedding) for each in build().modules())
    ):
        raise UnsupportedOp(
            f"{name} cannot be compared with the unsplit model before training: its ModelSpec has no vocab_size",
            given="vocab_size = 0, no loss, and a module with an nn.Embedding",
            expected="vocab_size: the number of token IDs, and of logits that the head outputs",
            hint="ModelSpec(vocab_size=...); if the inputs are not tokens, ModelSpec(loss=...)",
        )
    return bool(spec.vocab_size)


def check_alone(spec: ModelSpec, name: str) -> None:
    """Raise UnsupportedOp for a model of transformers that cannot be trained to predict the next token on any mesh.

    Its logits may depend on later tokens, which it would learn to copy, or its own loss may have terms that `spec.loss` lacks.
    """
    tokens = torch.randint(spec.vocab_size, (_SAMPLES, _TOKENS), generator=torch.Generator().manual_seed(0))
    changed, half = tokens.clone(), _TOKENS // 2
    changed[:, half:] = (changed[:, half:] + 1) % spec.vocab_size
    with torch.no_grad(), wide(torch.float64):
        try:
            module = _module_of(spec)
            found, later = module(tokens), logits_of(module(changed))
        except Exception:
            return  # Only full sizes run. `check_model` needs small ones, and says so.
        with suppress(TypeError):
            _compare_losses(spec, name, found, tokens, float(module(tokens, labels=tokens)))
    logits = logits_of(found)
    off, most = float((logits - later)[:, :half].abs().max()), float(logits.abs().max())
    if off <= ROOM * most:
        return
    config: Any = getattr(module, "config", None)
    encoder = getattr(config, "is_decoder", True) is False
    raise UnsupportedOp(
        f"{name} is not causal: it would learn to copy the next token from its input",
        given=f"later tokens change earlier logits by {off:.2g} in a small model, where the largest is {most:.2g}"
        + (", and is_decoder = false in its config.json" if encoder else ""),
        expected="logits that depend on no later token",
        hint='"is_decoder": true in config.json' if encoder else "use a causal language model",
    )


def _compare_losses(spec: ModelSpec, name: str, found: Any, tokens: Tensor, theirs: float) -> None:
    """Raise UnsupportedOp if a family's own loss is not the one that training computes."""
    # Most families shift the labels; some expect shifted ones.
    following = nn.functional.pad(tokens[:, 1:], [0, 1], value=IGNORED)
    losses = []
    for targets in (following, tokens):
        if spec.loss is None:
            loss = nn.functional.cross_entropy(logits_of(found).flatten(0, -2), targets.flatten())
        else:
            total, count = spec.loss(found, targets)["loss"]
            loss = total / count
        losses.append(float(loss))
    if all(abs(loss - theirs) > ROOM * max(1.0, abs(theirs)) for loss in losses):
        raise UnsupportedOp(
            f"the loss of a {name} has terms that training would leave out",
            given=f"{theirs:.6g} in a small model, by transformers; {losses[0]:.6g} by the loss for training",
            expected="the cross-entropy of the next tokens, or with router_aux_loss_coef times the routers' aux_loss",
            hint="set the factors of further terms in config.json to 0, such as z_loss_coefficient",
        )


def _module_of(spec: ModelSpec) -> nn.Module:
    return small_of(spec).module().eval()

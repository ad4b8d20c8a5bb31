"""The check before training reports errors that nothing else finds, and lets correct programs pass."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.config import ParallelConfig, TrainConfig, load_config
from meshcomm.errors import MeshcommError
from meshcomm.models import ModelSpec, spec_model, step_check, wrapped
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.step_check import StepCheck
from meshcomm.models.wrapped import WrappedModule
from meshcomm.parallel import build, loss, norm, optimizer
from meshcomm.parallel.splits import Sections
from meshcomm.train import Trainer
from tests.models.own import spec
from tests.train.every_setting import EVERY


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def told(
    given: nn.Module | ModelSpec,
    batch: tuple[Any, Any],
    dims: Mapping[str, int] = {"data": 2},
    *,
    own: Any = None,
    make: Any = None,
    micro: int = 2,
    **settings: Any,
) -> tuple[str, str]:
    """The text of the error, and the reason why a program was not compared."""
    train = {"steps": 2, "global_batch_size": 8, "micro_batch_size": micro, "lr": 0.1, **settings}
    known = TrainConfig(**train)
    options = {key: value for key, value in settings.items() if key == "attention"}
    parallel = ParallelConfig(**{role: role for role in dims}, **options)
    if isinstance(given, ModelSpec):
        seq_len = batch[0].shape[1] if batch[0].ndim > 1 else 1
        model: Any = SpecModel(given if own is None else replace(given, loss=own), known, seq_len)
    else:
        model = WrappedModule(given, parallel, known, own)
    check = StepCheck(model, Sections(parallel, None, None, known), dims, make)
    try:
        check.before_building()
        check.before_first_step(*batch)
    except MeshcommError as error:
        return str(error), check.why
    return "", check.why


def rows(seed: int = 0, width: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, width, generator=generator), torch.randn(8, 3, generator=generator)


def tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))


def of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -- correct programs stay untouched -----------------------------------------------------------------


def in_a_dictionary(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    squares = (outputs - targets).square() * (targets > 0)
    return {"loss": (squares.sum(), (targets > 0).sum()), "largest": outputs.square().mean()}


def in_float32(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes the loss in float32, as many programs do under autocast."""
    return of_tokens(logits.float(), targets)


class TwoInputs(nn.Module):
    """A module with a dictionary of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 5), nn.Linear(4, 5)

    def forward(self, user: Tensor, item: Tensor) -> dict[str, Tensor]:
        """(samples,), (samples, 4) -> scores (samples,)."""
        return {"score": (self.users(user) * self.items(item)).sum(-1)}


def two_inputs() -> tuple[Any, Any]:
    x, _ = rows()
    return {"user": torch.arange(8) % 9, "item": x}, {"score": x.sum(1)}


def of_scores(outputs: Any, targets: Any) -> Tensor:
    return F.mse_loss(outputs["score"], targets["score"])


class Complex(nn.Module):
    """A module with complex weights of the usual precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=4))
        return y


class Keys(nn.Module):
    """Attention over features. The gradient of the keys' bias is 0, except for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(1, 4), nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x[..., None]), self.key(x[..., None])
        y: Tensor = self.head(F.scaled_dot_product_attention(q, k, q).mean(1))
        return y


class Shared(nn.Module):
    """A decoder that shares the weight of the encoder, and has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).tanh())[:, :3]


RIGHT: dict[str, tuple[Any, ...]] = {
    "complex weights": (Complex, rows, {"data": 2}, {"own": F.mse_loss}),
    "a bias of keys": (Keys, rows, {"data": 2}, {"own": F.mse_loss}),
    "a mean": (mlp, rows, {"data": 2}, {"own": F.mse_loss}),
    "sums and terms": (mlp, rows, {"data": 2}, {"own": in_a_dictionary}),
    "dropout": (lambda: nn.Sequential(mlp(), nn.Dropout(0.5)), rows, {"data": 2}, {"own": F.mse_loss}),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        rows,
        {"data": 2},
        {"own": F.mse_loss},
    ),
    "a dictionary of inputs": (TwoInputs, two_inputs, {"data": 2}, {"own": of_scores}),
    "float32 in the loss, tensor": (spec, tokens, {"tensor": 2}, {"own": in_float32}),
    "adam, context": (spec, tokens, {"context": 2}, {"own": of_tokens, "optimizer": "adam"}),
    "clipping, pipeline": (spec, tokens, {"pipeline": 2}, {"own": of_tokens, "clip_norm": 0.1}),
    "every setting": (spec, tokens, {"data": 2, "tensor": 2, "pipeline": 2}, EVERY),
    # The shared weight has one name, that of the encoder.
    "frozen by another name": (Shared, rows, {"data": 2}, {"own": F.mse_loss, "frozen": ["decoder.*"]}),
    "groups by another name": (
        Shared,
        rows,
        {"data": 2},
        {"own": F.mse_loss, "groups": {"decoder.*": {"lr": 0.1}}},
    ),
    # The second pattern stands for that of blocks which the small copy does not have.
    "groups of later blocks": (
        spec,
        tokens,
        {"data": 2},
        {"own": of_tokens, "groups": {"blocks*": {"lr": 0.5}, "blocks.*": {"lr": 0.1}}},
    ),
    "groups and frozen, pipeline": (
        spec,
        tokens,
        {"pipeline": 2},
        {"own": of_tokens, "groups": {"blocks.0*": {"lr": 0.5}}, "frozen": ["tokens*"]},
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_programs_pass(case: str) -> None:
    make, batch, dims, more = RIGHT[case]
    torch.manual_seed(0)
    assert told(make(), batch(), dims, **more) == ("", "")


# -- wrong programs, without the code that would find the error earlier -----------------------------------


def a_mean_of_means(outputs: Tensor, targets: Tensor) -> Tensor:
    kept = targets > 0
    found: Tensor = ((outputs - targets).square() * kept).sum() / kept.sum()
    return found


def between_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    """A contrastive loss within each microbatch."""
    scores = F.normalize(outputs, dim=-1) @ F.normalize(targets, dim=-1).T
    return F.cross_entropy(scores, torch.arange(len(outputs)))


def z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return of_tokens(logits, targets) + 0.1 * logits.logsumexp(-1).square().mean()


class Scaled(nn.Module):
    """A loss with a trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs * self.scale, targets)


class Ids(nn.Module):
    """Logits of a class from ids, one of which occurs often."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 4, **more), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(x).mean(1))
        return y


def ids() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(64, (8, 5), generator=torch.Generator().manual_seed(0))
    return drawn.where(drawn > 20, 1), torch.arange(8) % 3


class Moving(nn.Module):
    """Subtracts a moving mean of its inputs."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


class MovingWeight(nn.Module):
    """The same with a parameter that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.mean = nn.Linear(4, 3), nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x - self.mean)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return y


class Features(nn.Module):
    """A module with random features."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.cos(x @ self.table))
        return y


class Noise(nn.Module):
    """A model of tokens with noise inside a part that tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(256, 8), nn.Linear(8, 16)
        self.down, self.logits = nn.Linear(16, 8), nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.tokens(x))
        z: Tensor = self.logits(self.down(y + torch.randn_like(y)))
        return z


class Twice(nn.Module):
    """A module whose list of blocks has one block twice."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(8, 8)
        self.tokens, self.blocks = nn.Embedding(256, 8), nn.ModuleList([block, block])
        self.logits = nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        z: Tensor = self.logits(y)
        return z


class OnlyMatrices(torch.optim.SGD):
    """Updates matrices only, not vectors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.ndim > 1:
                    each.data.add_(each.grad, alpha=-0.1)


class Pairs(nn.Module):
    """A module whose blocks also return their state."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.logits = nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        for block in self.blocks:
            y, (_,) = block(y)
        z: Tensor = self.logits(y)
        return z


def _pairs() -> ModelSpec:
    return replace(_twice(), module=Pairs)


def _twice() -> ModelSpec:
    return ModelSpec(
        module=Twice, layers="blocks", hidden_size=8, vocab_size=256, first=("tokens",), last=("logits",)
    )


def _noisy() -> ModelSpec:
    return ModelSpec(module=Noise, vocab_size=256, split={"up": "column", "down": "row"})


class Gated(nn.Module):
    """A module with a weight of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(256, 8), nn.Linear(8, 32)
        self.down, self.logits = nn.Linear(16, 8), nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.tokens(x)).chunk(2, -1)
        y: Tensor = self.logits(self.down(F.silu(gate) * up))
        return y


def _gated() -> ModelSpec:
    return ModelSpec(module=Gated, vocab_size=256, split={"up": "column", "down": "row"})


def _nothing(*given: Any, **named: Any) -> None:
    return None


# name: given, batch, dims, arguments, the code to take back, words of the refusal.
WRONG: dict[str, tuple[Any, ...]] = {
    "own loss, mean of means": (mlp, rows, {"data": 2}, {"own": a_mean_of_means}, None, "(sum, count)"),
    "own loss, one rank": (mlp, rows, {}, {"own": a_mean_of_means}, None, "(sum, count)"),
    "own loss, between samples": (mlp, rows, {"data": 2}, {"own": between_samples}, None, "divided"),
    "own loss, slices of logits": (
        spec,
        tokens,
        {"tensor": 2},
        {"own": z_loss},
        lambda patch: patch.setattr(loss.StepLoss, "_whole", lambda self, outputs: outputs),
        "parallel.tensor",
    ),
    "own loss, once per context rank": (
        spec,
        tokens,
        {"context": 2},
        {"own": of_tokens},
        lambda patch: patch.setattr(loss.StepLoss, "finish", _each_for_itself),
        "parallel.context",
    ),
    "own loss that learns": (
        mlp,
        rows,
        {"data": 2},
        {"own": Scaled()},
        lambda patch: patch.setattr(wrapped, "check_loss", _nothing),
        "loss.scale",
    ),
    "max_norm": (
        lambda: Ids(max_norm=0.5),
        ids,
        {"data": 2},
        {},
        lambda patch: (
            patch.setattr(build.LocalModel, "_check_parts", _nothing),
            patch.setattr(build.LocalModel, "_divided", False),
        ),
        "several ranks",
    ),
    "scale_grad_by_freq": (
        lambda: Ids(scale_grad_by_freq=True),
        ids,
        {"data": 2},
        {},
        lambda patch: patch.setattr(build.LocalModel, "_check_parts", _nothing),
        "divided among microbatches and ranks",
    ),
    "a moving buffer": (Moving, rows, {"data": 2}, {"own": F.mse_loss}, None, "mesh.all_reduce"),
    "blocks that return pairs": (_pairs, tokens, {"pipeline": 2}, {"own": of_tokens}, None, "hidden states"),
    "a parameter that forward changes": (
        MovingWeight,
        rows,
        {"data": 2},
        {"own": F.mse_loss},
        lambda patch: patch.setattr(build.LocalModel, "_divided", False),
        "several ranks",
    ),
    "random buffers": (
        lambda: ModelSpec(module=Features),
        rows,
        {"data": 2},
        {"own": F.mse_loss},
        lambda patch: patch.setattr(spec_model, "unfilled", lambda spec, seed, family: spec.module()),
        "several ranks",
    ),
    "batch norms of each rank": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        rows,
        {"data": 2},
        {"own": F.mse_loss},
        lambda patch: patch.setattr(wrapped, "synchronise", _nothing),
        "the loss of step 1",
    ),
    "eval mode": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval(),
        rows,
        {"data": 2},
        {"own": F.mse_loss},
        lambda patch: patch.setattr(build.nn.ModuleList, "__iter__", _iter_without_train),
        "the loss of step 1",
    ),
    "noise in split activations": (_noisy, tokens, {"tensor": 2}, {"own": of_tokens}, None, "random numbers"),
    "repeated blocks": (
        _twice,
        tokens,
        {"pipeline": 2},
        {"own": of_tokens},
        lambda patch: patch.setattr(SpecModel, "_repeated", 0, raising=False),
        "parallel.pipeline",
    ),
    "a plan that cuts a weight wrongly": (_gated, tokens, {"tensor": 2}, {}, None, "parallel.tensor"),
    "parameters that nobody trains": (
        mlp,
        rows,
        {"data": 2},
        {"own": F.mse_loss, "make": lambda groups: OnlyMatrices(groups, lr=0.1)},
        None,
        "0.bias, 2.bias",
    ),
    "parameters in no group": (
        mlp,
        rows,
        {"data": 2},
        {"own": F.mse_loss, "make": lambda groups: torch.optim.SGD(groups[:1], lr=0.1)},
        lambda patch: patch.setattr(optimizer, "_check_held", _nothing),
        "0.bias, 2.bias",
    ),
    "the norm of one rank": (
        mlp,
        rows,
        {"data": 2},
        {"own": F.mse_loss},
        lambda patch: patch.setattr(norm.GradientNorm, "norm", _half_of_the_norm),
        "gradient norm of step 1",
    ),
}


def _each_for_itself(self: Any, found: Any) -> Any:
    step = _FINISH(self, found)
    return step._replace(factor=step.factor * self._splits.context.size)


def _half_of_the_norm(self: Any) -> Tensor:
    found: Tensor = _NORM(self) / 2
    return found


def _iter_without_train(self: Any) -> Any:
    for each in self._modules.values():
        each.training = True
        yield each


_FINISH, _NORM = loss.StepLoss.finish, norm.GradientNorm.norm


@pytest.mark.parametrize("case", WRONG)
def test_wrong_programs_are_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, batch, dims, more, taken_back, words = WRONG[case]
    torch.manual_seed(0)
    given = make()
    if taken_back is not None:
        taken_back(monkeypatch)
    error, why = told(given, batch(), dims, **more)
    assert words in error, (error, why)


def test_another_plan_of_the_same_module_is_checked_again() -> None:
    right = replace(_gated(), split={"up": "column:2", "down": "row"})
    assert told(right, tokens(), {"tensor": 2}, own=of_tokens) == ("", "")
    text, _ = told(_gated(), tokens(), {"tensor": 2}, own=of_tokens)
    assert "parallel.tensor" in text


def test_a_module_whose_source_is_gone_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_check.inspect, "getsourcefile", lambda kind: "gone.py")
    for _ in range(2):
        assert told(mlp(), rows(), own=F.mse_loss) == ("", "")
        assert "(sum, count)" in told(mlp(), rows(), own=a_mean_of_means)[0]


# -- random numbers, and state of a loss ------------------------------------------------------------------


class Autoencoder(nn.Module):
    """Draws noise in the way of `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.encode, self.decode = kind, nn.Linear(4, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, width = self.encode(x).chunk(2, -1)
        return self.decode(_NOISE[self.kind](mean, width)), mean, width


_NOISE: dict[str, Any] = {
    "randn_like": lambda mean, width: mean + torch.randn_like(mean) * width.exp(),
    "rsample": lambda mean, width: torch.distributions.Normal(mean, width.exp()).rsample(),
    "gumbel": lambda mean, width: F.gumbel_softmax(mean),
    "own generator": lambda mean, width: (
        mean + width * torch.rand(mean.shape, generator=torch.Generator(), dtype=mean.dtype)
    ),
    "mask": lambda mean, width: mean * torch.empty_like(mean).bernoulli_(0.9) + width,
    "classes": lambda mean, width: mean + width.softmax(-1).multinomial(2).sum(-1, keepdim=True),
    "times": lambda mean, width: (
        mean * torch.randint(1, 9, (len(mean), 1)) + width[torch.randperm(len(mean))]
    ),
    "rrelu": lambda mean, width: F.rrelu(mean, training=True) + width,
    "gamma": lambda mean, width: mean * torch.distributions.Gamma(width.exp(), 1.0).rsample(),
    "dropout": lambda mean, width: F.dropout(mean, 0.2) + width,
}


def divergence(outputs: Any, targets: Tensor) -> Tensor:
    """The mean over samples."""
    found, mean, width = outputs
    return F.mse_loss(found, targets) + (mean.square() + width.exp() - width).mean()


def summed_divergence(outputs: Any, targets: Tensor) -> Tensor:
    """A sum over the batch. Such sums add up over ranks and microbatches in one process only."""
    return divergence(outputs, targets) * len(targets)


def contrast(outputs: Any, targets: Tensor) -> Tensor:
    """Compares the samples of a microbatch."""
    found, mean, _ = outputs
    return F.cross_entropy(found @ mean.T, torch.arange(len(mean)))


@pytest.mark.parametrize("kind", _NOISE)
@pytest.mark.parametrize("dims", [{"data": 2}, {"data": 1}])
@pytest.mark.deep_cases(r"\[dims1-(?!randn_like|mask)")
def test_programs_that_draw_random_numbers_are_compared(kind: str, dims: Mapping[str, int]) -> None:
    torch.manual_seed(0)
    error, why = told(Autoencoder(kind), rows(), dims, own=divergence)
    assert not error
    assert ("constants in the comparison" in why) == (kind != "dropout"), why
    for own in (summed_divergence, contrast):
        error, _ = told(Autoencoder(kind), rows(), dims, own=own)
        assert "divided among microbatches" in error, own


def test_noise_in_a_loss_is_a_constant_in_the_comparison() -> None:
    noisy = lambda y, t: F.mse_loss(y + torch.randn_like(y), t)  # noqa: E731
    error, why = told(mlp(), rows(), own=noisy)
    assert not error and "randn" in why
    assert "divided" in told(mlp(), rows(), own=lambda y, t: noisy(y, t).sqrt())[0]


def test_numbers_of_other_libraries_are_not_compared_and_named() -> None:
    error, why = told(mlp(), rows(), own=lambda y, t: F.mse_loss(y, t) * (1 + random.random()))
    assert not error and "by other means" in why


def _baseline() -> Any:
    """A loss with a moving mean of the targets."""
    mean = 0.0

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal mean
        found = F.mse_loss(outputs, targets - mean)
        mean = 0.9 * mean + 0.1 * targets.mean().item()
        return found

    return own


def _baseline_in_a_helper() -> Any:
    held = {"mean": 0.0}

    def less(targets: Tensor) -> Tensor:
        held["mean"] = 0.9 * held["mean"] + 0.1 * targets.mean().item()
        return targets - held["mean"]

    return functools.partial(
        lambda power, outputs, targets: (outputs - less(targets)).abs().pow(power).mean(), 2
    )


def _memory() -> Any:
    """A loss that depends on the earlier predictions for each sample."""
    memory = torch.zeros(8, 3, dtype=torch.float64)

    def own(outputs: Tensor, targets: Any) -> Tensor:
        places, values = targets
        seen = memory[places]
        memory[places] = outputs.detach()
        return F.mse_loss(outputs, values) + F.mse_loss(outputs, seen)

    return own


def _count_of_steps() -> Any:
    steps = 0

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return F.mse_loss(outputs, targets) * (1 + 0.1 * steps)

    return own


_GLOBAL_STEPS = 0


def _count_in_a_global(outputs: Tensor, targets: Tensor) -> Tensor:
    global _GLOBAL_STEPS
    _GLOBAL_STEPS += 1
    return F.mse_loss(outputs, targets) * (1 + 0.1 * _GLOBAL_STEPS)


def placed_rows() -> tuple[Any, Any]:
    x, y = rows()
    return x, (torch.arange(8), y)


@pytest.mark.parametrize(
    ("make", "batch"), [(_baseline, rows), (_baseline_in_a_helper, rows), (_memory, placed_rows)]
)
def test_state_of_a_function_that_makes_ranks_differ_is_refused(make: Any, batch: Any) -> None:
    error, why = told(mlp(), batch(), own=make(), micro=4)
    assert "what a loss keeps between steps" in error, (error, why)


@pytest.mark.parametrize("own", [_count_of_steps(), _count_in_a_global])
def test_each_simulated_rank_counts_for_itself(own: Any) -> None:
    assert told(mlp(), rows(), own=own, micro=4) == ("", "")
    assert "change once per step" in told(mlp(), rows(), own=own, micro=2)[0]
    assert _GLOBAL_STEPS == 0


# -- other actions of programs --------------------------------------------------------------------------

_CALLS: list[int] = []


class Counts(nn.Module):
    """Counts its calls in a global and in its class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        _CALLS.append(1)
        Counts.calls += 1
        y: Tensor = self.head(x)
        return y


def test_state_outside_of_a_module_is_put_back() -> None:
    count = 0

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return F.mse_loss(outputs, targets)

    net = Counts()
    before = torch.get_rng_state()
    assert told(net, rows(), own=counted) == ("", "")
    assert (count, Counts.calls, _CALLS) == (0, 0, [])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_uses_the_module_itself_is_not_compared() -> None:
    net = mlp()
    penalty = lambda y, t: F.mse_loss(y, t) + sum(each.square().sum() for each in net.parameters())  # noqa: E731
    error, why = told(net, rows(), own=penalty)
    assert not error and "the module itself" in why
    assert all(each.grad is None for each in net.parameters())


class Overwrites(nn.Module):
    """Changes its inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x.mul_(1.5))
        return y


def test_inputs_may_be_overwritten() -> None:
    assert told(Overwrites(), rows(), own=F.mse_loss) == ("", "")


def test_the_same_check_is_made_again_for_another_value_of_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(mlp(), rows(), own=lambda y, t: F.mse_loss(y, t)) == ("", "")
    assert "divided" in told(mlp(), rows(), own=lambda y, t: F.mse_loss(y, t).sqrt())[0]


def partly(*layers: nn.Module) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3)).train()
    net[1].eval()
    return net


def test_parts_in_eval_mode_stay_so() -> None:
    settings: Any = {"own": F.mse_loss, "micro": 4}
    assert told(partly(nn.BatchNorm1d(6)), rows(), **settings) == ("", "")
    assert told(partly(nn.Dropout(0.5)), rows(), **settings) == ("", "")
    assert told(partly(nn.BatchNorm1d(6), nn.BatchNorm1d(6)), rows(), **settings) == ("", "")
    assert told(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), rows(), **settings) == ("", "")


class EveryFourth(torch.optim.SGD):
    """Updates in every fourth step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


def test_an_optimizer_may_wait() -> None:
    assert told(mlp(), rows(), own=F.mse_loss, make=lambda groups: EveryFourth(groups, lr=0.1)) == ("", "")


def _trains(mesh: meshcomm.Mesh, what: str) -> str:
    train = {"steps": 3, "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.1, "check": False}
    config = {"mesh": {"dims": {"dp": 2}, "device": "cpu"}, "parallel": {"data": "dp"}, "train": train}
    net = mlp()
    if what == "hook":
        net[0].weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))  # type: ignore[union-attr, operator]
    own: Any = (lambda y, t: F.mse_loss(y, t) * (1 + 1j)) if what == "complex" else F.mse_loss
    x, y = (each.chunk(2)[mesh.coord("dp")] for each in rows())
    try:
        trainer = Trainer(mesh, load_config(config), net, loss=own)
        for _ in range(2):
            trainer.step(x, y)
            trainer.results()
            trainer.optimizer.param_groups[0]["lr"] *= 0.5
    except MeshcommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [("hook", "a hook of a parameter"), ("complex", "complex"), ("rate", "was changed between steps")],
)
def test_what_a_step_would_ignore_is_refused(what: str, words: str) -> None:
    for said in meshcomm.simulate(_trains, dims={"dp": 2}, args=(what,)):
        assert words in said


def _noisy_step(mesh: meshcomm.Mesh) -> str:
    train = {"steps": 1, "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.1}
    config = {"mesh": {"dims": {"dp": 2}, "device": "cpu"}, "parallel": {"data": "dp"}, "train": train}
    noisy = lambda y, t: F.mse_loss(y + torch.randn_like(y), t)  # noqa: E731
    trainer = Trainer(mesh, load_config(config), mlp(), loss=noisy)
    trainer.step(*(each.chunk(2)[mesh.coord("dp")] for each in rows()))
    return trainer.not_checked


def test_what_is_not_compared_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    first, second = meshcomm.simulate(_noisy_step, dims={"dp": 2})
    assert "(randn)" in first and not second
    said = [each.getMessage() for each in caplog.records if each.name == "meshcomm.train"]
    assert said == [f"not compared with one process before the first step: {first}"]

"""A program's own losses on every kind of parallelism match plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.parallel.loss import StepLoss
from meshcomm.parallel.tensor import TensorSplit, cross_entropy
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.models.own import Own, spec
from tests.train.runs import parallel_of, roles_of, sizes_of

STEPS, BATCH, TOKENS, RATE = 4, 8, 8, 0.5


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a global batch."""
    drawn = torch.randint(256, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * logits.logsumexp(-1).square().mean()
    )


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.2)


def distilled(logits: Tensor, targets: Tensor) -> Tensor:
    teacher = torch.randn(256, 256, generator=torch.Generator().manual_seed(5), dtype=logits.dtype)
    wanted = teacher[targets].softmax(-1)
    return F.kl_div(logits.log_softmax(-1), wanted, reduction="none").sum() / targets.numel()


def masked(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The number of targets that count differs between samples."""
    counts = targets % 7 < targets[:, :1] % 7
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each * counts).sum(), counts.sum()


def along_the_sequence(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of one token depends on its neighbours."""
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return each.mean() + logits.diff(dim=1).square().mean()


def named(logits: Tensor, targets: Tensor) -> dict[str, Any]:
    total, count = masked(logits, targets)
    squares = logits.logsumexp(-1).square()
    return {
        "loss": (total + 0.01 * (squares * (targets % 7 < targets[:, :1] % 7)).sum(), count),
        "plain": (total, count),
        "square": squares.mean(),
    }


def _set(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss that label_smoothing = 0.2 and z_loss = 0.1 define."""
    smooth = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.2, reduction="sum")
    return smooth + 0.1 * logits.logsumexp(-1).square().sum(), torch.tensor(targets.numel())


LOSSES: Final[dict[str, Callable[[Tensor, Tensor], Any]]] = {
    "z_loss": z_loss,
    "smoothed": smoothed,
    "distilled": distilled,
    "masked": masked,
    "along_the_sequence": along_the_sequence,
    "named": named,
    "built-in": _set,
}
MESHES: Final = {
    "dp=2": {},
    "fsdp=2": {},
    "tp=2": {},
    "cp=2": {"attention": "ring"},
    "cp=2 ": {"attention": "ulysses"},
    "pp=2": {},
    "tp=2 cp=2": {"attention": "ulysses"},
    "pp=2 tp=2": {"schedule": "gpipe"},
}


def plain(
    loss: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.float64
) -> list[dict[str, float]]:
    """The losses, norms and terms of a program in plain torch on one process, and the loss of one more batch."""
    torch.manual_seed(3)
    module = Own().to(dtype)
    sgd = torch.optim.SGD(module.parameters(), RATE)
    found = []
    for step in range(1, STEPS + 2):
        inputs, targets = batch(step)
        terms = loss(module(inputs), targets)
        terms = terms if isinstance(terms, dict) else {"loss": terms}
        means = {name: each[0] / each[1] if isinstance(each, tuple) else each for name, each in terms.items()}
        sgd.zero_grad()
        means["loss"].backward()
        norm = torch.cat(
            [each.grad.flatten() for each in module.parameters() if each.grad is not None]
        ).norm()
        found.append({name: float(value.detach()) for name, value in {**means, "norm": norm}.items()})
        sgd.step()
    return found


def config_for(dims: str, out: str, **settings: Any) -> Config:
    sizes = sizes_of(dims)
    options = dict(MESHES.get(dims, {}))
    train = {
        "steps": STEPS,
        "global_batch_size": BATCH,
        "micro_batch_size": 2,
        "lr": RATE,
        "schedule": "constant",
        "optimizer": "sgd",
        "weight_decay": 0.0,
        "dtype": "float64",
        "seed": 3,
        "out": out,
        **settings,
    }
    return load_config(
        {
            "mesh": {"dims": sizes, "device": "cpu", "timeout_s": 60.0},
            "parallel": parallel_of(**roles_of(sizes), **options),
            "data": {"seq_len": TOKENS, "max_bytes": 20_000},
            "train": train,
        }
    )


def trained(config: Config, name: str) -> list[dict[str, float]]:
    """Like `plain`, on a mesh."""
    with meshcomm.init(config) as mesh:
        own = spec() if name == "built-in" else replace(spec(), loss=LOSSES[name])
        trainer = Trainer(mesh, config, own)

        def mine(step: int) -> tuple[Tensor, Tensor]:
            share = slice(mesh.data_rank * BATCH // mesh.data_world_size, None)
            inputs, targets = (x[share][: BATCH // mesh.data_world_size] for x in batch(step))
            return inputs, targets

        for step in range(1, STEPS + 1):
            trainer.step(*mine(step))
        found = [{"loss": each.loss, "norm": each.gradient_norm, **each.terms} for each in trainer.results()]
        return [*found, {"loss": trainer.evaluate([mine(STEPS + 1)])}]


# The losses that usually run on a mesh. What a mesh does depends on the form of a loss: a mean, of which one stands for all three,
# a mean of neighbours, a sum with a count, several terms, or the built-in one.
OFTEN: Final = {
    "dp=2": ("distilled", "named"),
    "fsdp=2": ("along_the_sequence",),
    "tp=2": ("smoothed", "masked", "built-in"),
    "cp=2": ("masked", "along_the_sequence", "built-in"),
    "cp=2 ": ("z_loss",),
    "pp=2": ("distilled", "named", "built-in"),
    "tp=2 cp=2": ("named",),
    "pp=2 tp=2": ("along_the_sequence",),
}
# The mesh on which each loss is also checked before training.
CHECKED: Final = {
    "z_loss": "cp=2 ",
    "smoothed": "tp=2",
    "distilled": "dp=2",
    "masked": "cp=2",
    "along_the_sequence": "fsdp=2",
    "named": "pp=2",
    "built-in": "cp=2",
}
SELDOM: Final = "|".join(f"{name}-{dims}" for dims, often in OFTEN.items() for name in {*LOSSES} - {*often})


@pytest.mark.parametrize("dims", MESHES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.deep_cases(rf"\[({SELDOM})\]")
def test_a_loss_is_that_of_one_process(pool: Pool, tmp_path: Path, name: str, dims: str) -> None:
    settings: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 0.1} if name == "built-in" else {}
    # The check before training takes as long as the steps: each loss is checked on one mesh.
    check = CHECKED[name] == dims
    config = config_for(dims, str(tmp_path), check=check, **settings)
    ranks = 4 if ("cp=2" in dims and "tp" in dims) or "pp=2 tp" in dims else 2
    expected = plain(LOSSES[name])
    for found in pool.run(trained, config, name, ranks=ranks):
        for ours, theirs in zip(found, expected, strict=True):
            for key, value in ours.items():
                assert value == pytest.approx(theirs[key], rel=1e-9), (key, found, expected)
        assert set(found[0]) == set(expected[0])


# -- other contracts ------------------------------------------------------------------------------


def over_all_samples(mesh: meshcomm.Mesh, outputs: Tensor, targets: Tensor) -> Tensor:
    """A contrastive loss over all samples of the global batch (Chen et al. 2020), from the mean token of each sample."""
    x, y = outputs.mean(1), F.one_hot(targets[:, 0], 256).to(outputs.dtype)
    if mesh.size("dp") > 1:
        y = mesh.all_gather("dp", y, axis=0)
    mine = mesh.coord("dp") * len(x)
    return F.cross_entropy(x @ y.T, torch.arange(mine, mine + len(x)))


def contrasted(config: Config) -> list[dict[str, float]]:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, spec(), loss=lambda *each: over_all_samples(mesh, *each))
        for step in range(1, STEPS + 1):
            trainer.step(*(x.chunk(mesh.size("dp"))[mesh.coord("dp")] for x in batch(step)))
        return [{"loss": each.loss, "norm": each.gradient_norm} for each in trainer.results()]


def test_a_loss_may_communicate(pool: Pool, tmp_path: Path) -> None:
    config = config_for("dp=2", str(tmp_path), micro_batch_size=BATCH // 2)
    expected = plain(
        lambda outputs, targets: F.cross_entropy(
            outputs.mean(1) @ F.one_hot(targets[:, 0], 256).to(outputs.dtype).T, torch.arange(len(outputs))
        )
    )
    for found in pool.run(contrasted, config, ranks=2):
        for ours, theirs in zip(found, expected, strict=False):
            assert ours == pytest.approx(theirs, rel=1e-9)


def contrasted_or_error(config: Config) -> Any:
    try:
        return contrasted(config)
    except MeshcommError as error:
        return str(error)


def test_a_loss_that_communicates_is_given_one_microbatch(pool: Pool, tmp_path: Path) -> None:
    config = config_for("dp=2", str(tmp_path), micro_batch_size=BATCH // 4)
    for said in pool.run(contrasted_or_error, config, ranks=2):
        assert "is given only one microbatch of their samples" in said and "a collective on dp" in said
        assert "2 microbatches" in said and f"train.micro_batch_size = {BATCH // 2}" in said
    # `check=False` is the way out if each microbatch may be compared on its own.
    unchecked = config_for("dp=2", str(tmp_path), micro_batch_size=BATCH // 4, check=False)
    assert all(len(found) == STEPS for found in pool.run(contrasted_or_error, unchecked, ranks=2))


# -- losses that differentiate outputs by inputs ---------------------------------------------------


def slope(outputs: Tensor, targets: Tensor, inputs: Tensor) -> dict[str, Tensor]:
    """The residual of a differential equation (Raissi et al. 2019)."""
    (each,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return {"loss": (each - targets).square().mean() + outputs.square().mean(), "slope": each.abs().mean()}


def field() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def points(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(2, BATCH, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return drawn[0], drawn[1]


def differentiated(config: Config, detached: bool = False) -> Any:
    """Losses, norms and slopes of each step, and the loss of an evaluation."""
    with meshcomm.init(config) as mesh:
        trainer, encoder = Trainer(mesh, config, field(), loss=slope), nn.Linear(2, 2)
        try:
            for step in range(1, STEPS + 1):
                x, y = (each.chunk(mesh.data_world_size)[mesh.data_rank] for each in points(step))
                trainer.step(encoder(x.float()) if detached else x.clone().requires_grad_(), y)
            # A batch collated from samples that need gradients is not a leaf.
            x, y = (each.chunk(mesh.data_world_size)[mesh.data_rank] for each in points(9))
            loss = trainer.evaluate([(torch.stack([*x.clone().requires_grad_()]), y)])
            return [[each.loss, each.gradient_norm, each.terms["slope"]] for each in trainer.results()], loss
        except MeshcommError as error:
            return str(error)


@pytest.mark.parametrize("dims", ["one=1", "dp=2"])
def test_a_loss_may_differentiate_by_inputs(pool: Pool, tmp_path: Path, dims: str) -> None:
    module, expected = field(), []
    sgd = torch.optim.SGD(module.parameters(), RATE)
    for step in (*range(1, STEPS + 1), 9):
        x, y = points(step)
        x.requires_grad_()
        terms = slope(module(x), y, x)
        sgd.zero_grad()
        terms["loss"].backward()
        norm = torch.cat(
            [each.grad.flatten() for each in module.parameters() if each.grad is not None]
        ).norm()
        expected.append([float(each.detach()) for each in (terms["loss"], norm, terms["slope"])])
        if step != 9:
            sgd.step()
    for check in (True, False):
        config = config_for(dims, str(tmp_path), check=check, clip_norm=1e9)
        for found, loss in pool.run(differentiated, config, ranks=config.mesh.layout(None).world_size):
            for ours, theirs in zip(found, expected[:-1], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-9)
            assert loss == pytest.approx(expected[-1][0], rel=1e-9)


def test_inputs_that_need_gradients_are_refused_with_shards(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(differentiated, config_for("fsdp=2", str(tmp_path)), ranks=2):
        assert "inputs that need gradients cannot be trained" in said and "remove parallel.shard" in said


def test_data_computed_from_parameters_are_refused(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(differentiated, config_for("dp=2", str(tmp_path)), True, ranks=2):
        assert "the data of step 1 are computed from parameters that this step would not train" in said


def on_slices(config: Config) -> list[dict[str, float]]:
    with meshcomm.init(config) as mesh:
        split = TensorSplit(mesh, "tp", torch.float64)

        def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            assert tuple(logits.shape) == (2, TOKENS // 2, 128) and targets.shape == logits.shape[:2]
            kept = targets.where(targets % 7 < 4, -100)
            return cross_entropy(split, logits, kept, reduction="sum"), (kept != -100).sum()

        trainer = Trainer(mesh, config, replace(spec(), loss=loss, loss_takes_slices=True))
        for step in range(1, STEPS + 1):
            trainer.step(*batch(step))
        return [{"loss": each.loss, "norm": each.gradient_norm} for each in trainer.results()]


def test_a_loss_may_take_slices(pool: Pool, tmp_path: Path) -> None:
    expected = plain(
        lambda logits, targets: F.cross_entropy(
            logits.flatten(0, 1), targets.where(targets % 7 < 4, -100).flatten()
        )
    )
    for found in pool.run(on_slices, config_for("tp=2 cp=2", str(tmp_path)), ranks=4):
        for ours, theirs in zip(found, expected, strict=False):
            assert ours == pytest.approx(theirs, rel=1e-9)


class Tree(Own):
    """A model that returns more than logits."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"logits": logits, "states": (logits.square(),)}


def of_trees(config: Config) -> list[float]:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return smoothed(outputs["logits"], targets) + outputs["states"][0].mean()

    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, replace(spec(), module=Tree, forward=None, attention=None, loss=loss))
        for step in range(1, STEPS + 1):
            trainer.step(*batch(step))
        return [each.loss for each in trainer.results()]


def test_a_loss_is_given_whole_trees(pool: Pool, tmp_path: Path) -> None:
    expected = plain(lambda logits, targets: smoothed(logits, targets) + logits.square().mean())
    for found in pool.run(of_trees, config_for("tp=2", str(tmp_path)), ranks=2):
        assert found == pytest.approx([each["loss"] for each in expected[:-1]], rel=1e-9)


def mixed(config: Config) -> list[float]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        # autocast runs this matmul in bfloat16.
        return F.cross_entropy((outputs @ torch.eye(256)).flatten(0, 1).float(), targets.flatten())

    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, spec(), loss=loss)
        for step in range(1, STEPS + 1):
            trainer.step(*batch(step))
        return [each.loss for each in trainer.results()]


def test_a_loss_runs_under_the_autocast_of_the_model(pool: Pool, tmp_path: Path) -> None:
    settings = {"dtype": "float32", "compute_dtype": "bfloat16", "micro_batch_size": BATCH}
    (found,) = pool.run(mixed, config_for("dp=1", str(tmp_path), **settings), ranks=1)
    torch.manual_seed(3)
    module = Own()
    sgd = torch.optim.SGD(module.parameters(), RATE)
    for step, ours in enumerate(found, 1):
        inputs, targets = batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = module(inputs)
            loss = F.cross_entropy((outputs @ torch.eye(256)).flatten(0, 1).float(), targets.flatten())
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        assert ours == pytest.approx(float(loss.detach()), rel=1e-4)


_CALLS = iter(range(100))
WRONG: Final[dict[str, tuple[Any, str]]] = {
    "a vector": (lambda y, t: F.cross_entropy(y.transpose(1, 2), t, reduction="none"), "loss: shape ("),
    "a number": (lambda y, t: 1.0, "loss: a float"),
    "nothing": (lambda y, t: None, "loss: a NoneType"),
    "no gradient": (lambda y, t: y.detach().mean(), "does not depend on the outputs"),
    "without loss": (lambda y, t: {"ce": y.mean()}, 'no "loss"'),
    "changing terms": (lambda y, t: {"loss": y.mean(), f"z{next(_CALLS)}": y.mean()}, " before"),
    "no name": (lambda y, t: {"loss": y.mean(), "a b": y.mean()}, "a term named 'a b'"),
    "three": (lambda y, t: (y.mean(), 1, 2), "loss: a tuple"),
    "no count": (lambda y, t: (y.sum() * 0, 0), "loss of step 1 is nan"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_loss_may_not_return(tmp_path: Path, what: str) -> None:
    loss, says = WRONG[what]
    config = config_for("dp=1", str(tmp_path))
    (said,) = meshcomm.simulate(lambda mesh: _refused_on(mesh, config, loss), config)
    assert says in said, said


def _refused_on(mesh: meshcomm.Mesh, config: Config, loss: Callable[[Tensor, Tensor], Any]) -> str:
    try:
        trainer = Trainer(mesh, config, spec(), loss=loss)
        trainer.step(*batch(1))
        trainer.results()
    except MeshcommError as error:
        return str(error)
    return ""


def _refused_in(mesh: meshcomm.Mesh, config: Config, pair: Callable[[int, int], bool]) -> tuple[int, str]:
    """The refused step and its error. The loss is (sum, count) if `pair(rank, step)` is true, and a mean otherwise."""
    step = 0

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
        return (total, targets.numel()) if pair(mesh.rank, step) else total / targets.numel()

    trainer = Trainer(mesh, config, spec(), loss=loss)
    try:
        for step in range(1, STEPS + 1):
            inputs, targets = batch(step)
            trainer.step(inputs.chunk(2)[mesh.rank], targets.chunk(2)[mesh.rank])
    except MeshcommError as error:
        return step, str(error)
    return 0, ""


def test_one_form_of_a_loss(tmp_path: Path) -> None:
    config = config_for("dp=2", str(tmp_path), check=False)
    for on_rank_1 in (lambda rank, step: rank == 1, lambda rank, step: rank == 0):
        found = meshcomm.simulate(_refused_in, config, args=(config, on_rank_1))
        assert [at for at, _ in found] == [1, 1]
        assert all("of the 4 microbatches of all ranks" in said for _, said in found)
    for later in (lambda rank, step: step == 3, lambda rank, step: step != 3):
        found = meshcomm.simulate(_refused_in, config, args=(config, later))
        assert [at for at, _ in found] == [3, 3] and "in earlier steps" in found[0][1]


def _calls_of_steps(mesh: meshcomm.Mesh, config: Config, loss: Any) -> list[int]:
    trainer, found = Trainer(mesh, config, spec(), loss=loss), []
    for step in range(1, STEPS + 1):
        inputs, targets = batch(step)
        before = mesh.stats()
        trainer.step(inputs.chunk(2)[mesh.rank], targets.chunk(2)[mesh.rank])
        found.append(sum(row.calls for row in mesh.stats().since(before).rows if row.call == "all_reduce"))
    return found


def test_means_are_not_counted_in_each_step(tmp_path: Path) -> None:
    config = config_for("dp=2", str(tmp_path), check=False)
    means, pairs = (
        meshcomm.simulate(_calls_of_steps, config, args=(config, loss))[0] for loss in (z_loss, masked)
    )
    assert means[0] == pairs[0] and [each - mean for each, mean in zip(pairs, means, strict=True)] == [
        0,
        1,
        1,
        1,
    ]


def test_settings_of_the_cross_entropy_are_refused_with_another_loss(tmp_path: Path) -> None:
    config = config_for("dp=1", str(tmp_path), label_smoothing=0.1)
    (said,) = meshcomm.simulate(lambda mesh: _refused_on(mesh, config, smoothed), config)
    assert "has no effect on a loss of your own" in said


@pytest.mark.parametrize(("smoothing", "z"), [(0.1, 0.0), (0.0, 0.3), (0.2, 0.1)])
def test_cross_entropy_on_split_logits(smoothing: float, z: float) -> None:
    drawn = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 5, 12, dtype=torch.float64, generator=drawn) * 3
    targets = torch.randint(12, (6, 5), generator=drawn).where(torch.rand(6, 5, generator=drawn) < 0.7, -100)
    whole = logits.clone().requires_grad_()
    flat, kept = whole.flatten(0, 1), targets.flatten()
    expected = F.cross_entropy(flat, kept, reduction="sum", label_smoothing=smoothing)
    expected = expected + z * (flat.logsumexp(-1).square() * (kept != -100)).sum()
    expected.backward()

    def on(mesh: meshcomm.Mesh) -> tuple[Tensor, Tensor]:
        mine = logits.chunk(3, -1)[mesh.coord("tp")].clone().requires_grad_()
        split = TensorSplit(mesh, "tp", torch.float64)
        loss = cross_entropy(split, mine, targets, reduction="sum", label_smoothing=smoothing, z_loss=z)
        loss.backward()
        assert mine.grad is not None
        return loss.detach(), mine.grad

    found = meshcomm.simulate(on, dims={"tp": 3})
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([grad for _, grad in found], -1), whole.grad, rtol=1e-12, atol=1e-12)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)


_TERMS: Final = (("a", "b"), ("ab", "ba"))


def _terms(mesh: meshcomm.Mesh, which: int) -> str:
    names = _TERMS[which][mesh.coord("dp")]
    train = {"steps": 1, "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.1}
    config = {"mesh": {"dims": {"dp": 2}, "device": "cpu"}, "parallel": {"data": "dp"}, "train": train}
    loss = lambda y, t: {"loss": F.mse_loss(y, t), **{name: y.mean() for name in names}}  # noqa: E731
    trainer = Trainer(mesh, load_config(config), torch.nn.Linear(3, 2), loss=loss)
    x = torch.arange(12.0).reshape(4, 3) + mesh.coord("dp")
    try:
        trainer.step(x, x[:, :2])
    except MeshcommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("which", [0, 1])
def test_terms_with_other_names_on_other_ranks_are_refused_on_every_rank(which: int) -> None:
    for coord, said in enumerate(meshcomm.simulate(_terms, dims={"dp": 2}, args=(which,))):
        assert f"terms {', '.join(_TERMS[which][coord])} on rank {coord}" in said


class Annealed(torch.nn.Module):
    """A penalty whose factor grows with each step."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.steps += 1
        return F.mse_loss(outputs, targets) + 0.1 * self.steps * outputs.square().mean()

    def twice(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = 2 * self(outputs, targets)
        return found


def _annealed(kind: str) -> Any:
    return Annealed() if kind == "module" else Annealed().twice


def _rows(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x[:, :2].square()


def _continued(mesh: meshcomm.Mesh, kind: str, folder: str, begin: int, end: int) -> list[float]:
    train = {
        "steps": 6, "global_batch_size": 8, "micro_batch_size": 4, "lr": 0.1, "schedule": "constant",
        "optimizer": "sgd", "weight_decay": 0.0, "dtype": "float64",
    }  # fmt: skip
    config = {"mesh": {"dims": {"dp": 2}, "device": "cpu"}, "parallel": {"data": "dp"}, "train": train}
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2, dtype=torch.float64)
    trainer = Trainer(mesh, load_config(config), net, loss=_annealed(kind))
    if begin:
        trainer.load(folder)
    for step in range(begin, end):
        trainer.step(*(each.chunk(2)[mesh.coord("dp")] for each in _rows(step)))
    losses = [done.loss for done in trainer.results()]
    if not begin:
        trainer.save(folder)
    return losses


@pytest.mark.parametrize("kind", ["module", "method"])
def test_buffers_of_a_loss_are_in_the_checkpoint(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    net, loss = torch.nn.Linear(3, 2, dtype=torch.float64), _annealed(kind)
    sgd, expected = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(6):
        x, y = _rows(step)
        value = loss(net(x), y)
        sgd.zero_grad()
        value.backward()
        sgd.step()
        expected.append(value.item())
    folder = str(tmp_path / "state")
    found = [
        meshcomm.simulate(_continued, dims={"dp": 2}, args=(kind, folder, *part))[1]
        for part in ((0, 3), (3, 6))
    ]
    assert [*found[0], *found[1]] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ranks", [500, 1000])
def test_equal_terms_are_equal_on_many_ranks(ranks: int) -> None:
    loss = object.__new__(StepLoss)
    loss.names = []
    for code in range(1, 2**20, 9973):
        loss._agree(0.0, float(ranks), float(ranks), float(ranks * code), float(ranks * code**2))

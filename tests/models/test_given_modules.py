"""Properties of user modules besides weights: buffers, modes, layouts. Each trains like a plain torch loop or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.models import ModelSpec
from meshcomm.parallel import GradientSync, whole
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.train.runs import roles_of, sizes_of

SEED, SAMPLES, STEPS = 5, 8, 4


def config_of(dims: str, **train: Any) -> Config:
    sizes = sizes_of(dims)
    ranks = math.prod(sizes.values())
    settings = {"optimizer": "sgd", "weight_decay": 0.0, "lr": 0.1, "clip_norm": None, "warmup_steps": 0}
    return load_config(
        {
            "mesh": {"dims": sizes, "device": "cpu", "timeout_s": 60.0, "reports": ""},
            "parallel": roles_of(sizes),
            "train": {
                "steps": STEPS,
                "global_batch_size": SAMPLES,
                "micro_batch_size": SAMPLES // ranks,
                "dtype": "float64",
                "seed": SEED,
                **settings,
                **train,
            },
        }
    )


def batch(step: int, tokens: bool = False) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    if tokens:
        return torch.randint(16, (SAMPLES, 6), generator=made), torch.randint(
            16, (SAMPLES, 6), generator=made
        )
    x = torch.randn(SAMPLES, 4, generator=made, dtype=torch.float64)
    return x, torch.randint(4, (SAMPLES,), generator=made)


def loss_of(y: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, -2), targets.flatten())


def alone(make: Callable[[], nn.Module], tokens: bool = False) -> dict[str, Tensor]:
    """All weights and buffers after the steps in plain torch on one process."""
    torch.manual_seed(SEED)
    module = make().train().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        x, targets = batch(step, tokens)
        optimizer.zero_grad()
        loss_of(module(x), targets).backward()
        optimizer.step()
    return {name: each.detach() for name, each in module.state_dict().items()}


def trained(
    config: Config, make: Callable[[], nn.Module], tokens: bool = False, object_: bool = False
) -> Any:
    """The same after a Trainer's steps on a mesh, or the text of its error."""
    torch.manual_seed(int(object_ and SEED) or torch.seed() % 1000)
    with meshcomm.init(config) as mesh:
        try:
            trainer = Trainer(mesh, config, make() if object_ else ModelSpec(module=make), loss=loss_of)
            engine = trainer.engine
            each = SAMPLES // engine.data_size
            here = slice(engine.data_coord * each, (engine.data_coord + 1) * each)
            for step in range(1, STEPS + 1):
                x, targets = batch(step, tokens)
                engine.step(x[here], targets[here], 0.1, step)
            engine.results()
            state = {name: whole(value).clone() for name, value in engine.state().items()}
        except MeshcommError as error:
            return str(error)
    return {name[6:]: value for name, value in state.items() if name.startswith("model.")}


def check(
    pool: Pool, make: Callable[[], nn.Module], dims: str = "dp=2", tokens: bool = False, **more: Any
) -> None:
    expected = alone(make, tokens)
    for found in pool.run(partial(trained, **more), config_of(dims), make, tokens, ranks=2):
        assert isinstance(found, dict), found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def check_refused(
    pool: Pool, make: Callable[[], nn.Module], *words: str, dims: str = "dp=2", **more: Any
) -> None:
    for found in pool.run(partial(trained, **more), config_of(dims), make, ranks=2):
        assert isinstance(found, str), "was trained"
        assert all(word in found for word in words), found


class Features(nn.Module):
    """Draws a random tensor that is not a parameter between its parameters."""

    table: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(4, 4), kind
        drawn = torch.randn(4, 8, dtype=torch.float64)
        if kind in ("saved", "unsaved"):
            self.register_buffer("table", drawn, persistent=kind == "saved")
        elif kind == "list":
            self.tables = [drawn]
        else:
            self.table = drawn
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = self.tables[0] if self.kind == "list" else self.table
        y: Tensor = self.last(torch.cos(self.first(x) @ table))
        return y


@pytest.mark.parametrize(
    ("kind", "dims"), [("saved", "dp=2"), ("unsaved", "fsdp=2"), ("plain", "dp=2"), ("list", "dp=2")]
)
def test_random_tensors_that_are_not_parameters_are_those_of_one_process(
    pool: Pool, kind: str, dims: str
) -> None:
    check(pool, partial(Features, kind), dims)


class Eval(Features):
    """A module in eval mode, as from_pretrained returns it. The root's mode decides."""

    def __init__(self) -> None:
        super().__init__("saved")
        self.norm = nn.BatchNorm1d(4)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class PartlyEval(Eval):
    """A part in eval mode inside a module in train mode stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.train()
        self.norm.eval()

    def train(self, mode: bool = True) -> PartlyEval:
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize("object_", [False, True])
@pytest.mark.parametrize("kind", [Eval, PartlyEval])
def test_a_module_in_eval_mode_is_trained_in_train_mode(pool: Pool, kind: Any, object_: bool) -> None:
    check(pool, kind, object_=object_)


class Tokens(nn.Module):
    """An embedding with options, and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8, **options), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(x))
        return y


@pytest.mark.parametrize("dims", ["dp=2", "fsdp=2"])
@pytest.mark.parametrize("option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_embeddings_that_depend_on_a_ranks_samples_are_refused(
    pool: Pool, option: dict[str, Any], dims: str
) -> None:
    (name,) = option
    check_refused(pool, partial(Tokens, **option), name, "embed", "try:", dims=dims, tokens=True)


class Writes(Features):
    """Updates a parameter in forward."""

    def __init__(self, learns: bool) -> None:
        super().__init__("saved")
        self.seen = nn.Parameter(torch.zeros(4), requires_grad=learns)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.1)
        return super().forward(x + self.seen)


@pytest.mark.parametrize("learns", [False, True])
def test_a_parameter_that_forward_updates_is_refused(pool: Pool, learns: bool) -> None:
    check_refused(pool, partial(Writes, learns), "seen", "register_buffer")


class Repeated(nn.Module):
    """A module that has one block in three of its four places."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.blocks = nn.ModuleList([block, nn.Linear(4, 4), block, block])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def spec_trained(config: Config, **given: Any) -> Any:
    with meshcomm.init(config) as mesh:
        try:
            engine = Trainer(mesh, config, ModelSpec(**given)).engine
            each = SAMPLES // engine.data_size
            here = slice(engine.data_coord * each, (engine.data_coord + 1) * each)
            for step in range(1, STEPS + 1):
                x, targets = batch(step)
                engine.step(x[here], targets[here], 0.1, step)
            engine.results()
            return {name: whole(value).detach().clone() for name, value in engine.named_parameters()}
        except MeshcommError as error:
            return str(error)


@pytest.mark.parametrize("dims", ["dp=2", "fsdp=2", "pp=2"])
def test_a_block_in_several_places_runs_in_each(pool: Pool, dims: str) -> None:
    expected = alone(Repeated)
    for found in pool.run(
        partial(spec_trained, module=Repeated, layers="blocks", loss=loss_of), config_of(dims), ranks=2
    ):
        if dims == "pp=2":
            assert "parallel.pipeline" in found and "blocks.2, blocks.3" in found
            continue
        assert isinstance(found, dict), found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)


class LearnedLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, targets: Tensor) -> Tensor:
        return loss_of(y, targets) * self.scale


def test_a_loss_with_parameters_is_refused(pool: Pool) -> None:
    for loss in (LearnedLoss(), LearnedLoss().forward):
        (found,) = pool.run(partial(spec_trained, module=Repeated, loss=loss), config_of("dp=1"), ranks=1)
        assert "scale" in found and "never be trained" in found


class Recurrent(nn.Module):
    """A model with one of torch's recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.layer, self.head = (
            nn.Embedding(16, 8),
            kind(8, 8, 2, batch_first=True),
            nn.Linear(8, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.embed(x))[0])
        return y


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.deep_cases(r"\[RNN")
def test_recurrent_layers_train(pool: Pool, kind: Any) -> None:
    check(pool, partial(Recurrent, kind), tokens=True)


def test_recurrent_layers_train_on_shards(pool: Pool) -> None:
    check(pool, partial(Recurrent, nn.LSTM), dims="fsdp=2", tokens=True)


class Layouts(nn.Module):
    """A module whose parameters are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(4, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x).mean((2, 3)) @ self.turned
        return y


def synced(mesh: Mesh) -> float:
    """The largest difference from plain torch after steps with a fused optimizer."""
    torch.manual_seed(SEED)
    ours, theirs = Layouts(), Layouts()
    theirs.load_state_dict(ours.state_dict())
    x, targets = torch.randn(SAMPLES, 3, 6, 6), torch.randint(4, (SAMPLES,))
    mesh.broadcast("dp", [x, targets], src=0)
    sync = GradientSync(mesh, "dp", ours)
    mine, other = (torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in (ours, theirs))
    share = SAMPLES // mesh.size("dp")
    here = slice(mesh.coord("dp") * share, (mesh.coord("dp") + 1) * share)
    for _ in range(STEPS):
        with sync:
            F.cross_entropy(ours(x[here]), targets[here]).backward()
        mine.step()
        other.zero_grad()
        F.cross_entropy(theirs(x), targets).backward()
        other.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def on_dp(config: Config, body: Callable[[Mesh], Any]) -> Any:
    with meshcomm.init(config) as mesh:
        return body(mesh)


def test_gradients_have_the_layout_of_their_parameters(pool: Pool) -> None:
    assert max(pool.run(on_dp, config_of("dp=2"), synced, ranks=2)) < 1e-4


class Counts(nn.Module):
    """Has buffers that the forward pass changes, one of them not saved, and extra state that it changes."""

    norm: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.calls = nn.BatchNorm1d(4), nn.Linear(4, 4), 0
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.sum().detach() * 0 + 1
        self.largest = torch.maximum(self.largest, self.seen)
        y: Tensor = self.head(self.norm(x)) / self.seen / (1 + self.calls)
        return y

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def skipping(config: Config) -> dict[str, Tensor]:
    """The state after a run whose second step has a nan on the last rank."""
    with meshcomm.init(config) as mesh:
        engine = Trainer(mesh, config, ModelSpec(module=Counts), loss=loss_of).engine
        each = SAMPLES // engine.data_size
        here = slice(engine.data_coord * each, (engine.data_coord + 1) * each)
        for step in range(1, STEPS + 1):
            x, targets = batch(step)
            x[-1] = math.nan if step == 2 else x[-1]
            engine.step(x[here], targets[here], 0.1, step)
        assert [bool(done.fault) for done in engine.results()] == [False, True, False, False]
        found = {name: whole(each).clone() for name, each in engine.named_parameters()}
        found |= {name: each.clone() for name, each in engine.modules[0].named_buffers()}
        calls: Any = engine.modules[0].get_extra_state()
        return {**found, "calls": torch.tensor(calls)}


@pytest.mark.parametrize("dims", ["dp=2", "fsdp=2"])
def test_a_step_that_is_left_out_leaves_no_trace(pool: Pool, dims: str) -> None:
    torch.manual_seed(SEED)
    module = Counts().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in (1, 3, 4):
        x, targets = batch(step)
        optimizer.zero_grad()
        loss_of(module(x), targets).backward()
        optimizer.step()
    expected = dict(module.named_parameters()) | dict(module.named_buffers())
    expected["calls"] = torch.tensor(module.calls)
    for found in pool.run(skipping, config_of(dims, on_nonfinite="skip"), ranks=2):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-9, atol=1e-12, msg=name)


def resumed(config: Config, folder: Path, module: Callable[[], nn.Module], frozen: tuple[str, ...]) -> Any:
    """Train two steps and save; then train two more in a new trainer that also freezes `frozen`, and save."""
    found = []
    for first, held in ((1, ()), (3, frozen)):
        with meshcomm.init(load_config(config, [f"train.frozen={list(held)}"])) as mesh:
            given = load_config(config, [f"train.frozen={list(held)}"])
            trainer = Trainer(mesh, given, ModelSpec(module=module), loss=loss_of)
            if first > 1:
                trainer.load(folder / "1")
            engine = trainer.engine
            each = SAMPLES // engine.data_size
            here = slice(engine.data_coord * each, (engine.data_coord + 1) * each)
            for step in (first, first + 1):
                x, targets = batch(step)
                engine.step(x[here], targets[here], 0.1, step)
            trainer.results()
            trainer.save(folder / str(first))
            found.append({name: whole(p).detach().clone() for name, p in engine.named_parameters()})
    return found


@pytest.mark.parametrize("dims", ["dp=2", "fsdp=2"])
@pytest.mark.parametrize("frozen", [("first.*",), ()])
@pytest.mark.deep_cases(r"\[(frozen0-dp|frozen1-fsdp)")
def test_a_resumed_run_is_that_of_one_process(
    pool: Pool, tmp_path: Path, dims: str, frozen: tuple[str, ...]
) -> None:
    torch.manual_seed(SEED)
    module = Features("unsaved").double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(1, STEPS + 1):
        module.first.requires_grad_(step < 3 or not frozen)
        x, targets = batch(step)
        optimizer.zero_grad()
        loss_of(module(x), targets).backward()
        optimizer.step()
    expected = dict(module.named_parameters())
    config = config_of(dims, optimizer="adamw", betas=(0.9, 0.95))
    body = partial(resumed, module=partial(Features, "unsaved"), frozen=frozen)
    for before, after in pool.run(body, config, tmp_path, ranks=2):
        for name, value in after.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-8, atol=1e-12, msg=name)
            stayed = torch.equal(value, before[name])
            assert stayed == (bool(frozen) and name.startswith("first."))


def of_some(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{**group, "params": group["params"][:1]} for group in groups], lr=0.1)


def optimized(config: Config, make: Any, module: Any = Repeated) -> str:
    with meshcomm.init(config) as mesh, pytest.raises(MeshcommError) as caught:
        trainer = Trainer(mesh, config, ModelSpec(module=module), loss=loss_of, optimizer=make)
        trainer.engine.step(*(each[: SAMPLES // mesh.layout.world_size] for each in batch(1)), 0.1, 1)
    return str(caught.value)


def test_a_parameter_that_no_optimizer_has_is_named(pool: Pool) -> None:
    (told,) = pool.run(optimized, config_of("dp=1"), of_some, ranks=1)
    assert "blocks.1.weight" in told and "blocks.1.bias" in told and "train.frozen" in told


class Lists(nn.Module):
    """A module whose blocks are lists. With `tied`, two blocks share a weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        pairs = [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2)]
        self.layers = nn.ModuleList(pairs)
        if tied:
            pairs[1][1].weight = pairs[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.layers:
            for part in pair.children():
                x = torch.tanh(part(x))
        return x


@pytest.mark.parametrize("object_", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.deep_cases(r"\[(False-False|True-True)")
def test_blocks_that_are_lists_or_share_weights_are_sharded(pool: Pool, tied: bool, object_: bool) -> None:
    check(pool, partial(Lists, tied), "fsdp=2", object_=object_)


class Odd(nn.Module):
    """A module with one parameter of an unusual kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        values = {"scalar": torch.ones(()), "complex": torch.ones(4, dtype=torch.complex128)}
        self.odd = nn.Parameter(values.get(kind, torch.ones(2, 4).t()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x) * self.odd.abs().sum()
        return y


@pytest.mark.parametrize("kind", ["scalar", "complex", "turned"])
def test_odd_parameters_train_along_data_and_are_refused_on_shards(pool: Pool, kind: str) -> None:
    check(pool, partial(Odd, kind))
    check_refused(pool, partial(Odd, kind), "odd", "cannot be sharded", "parallel.data", dims="fsdp=2")


def test_sparse_gradients_train_along_data_and_are_refused_on_shards(pool: Pool) -> None:
    make = partial(Tokens, sparse=True)
    check(pool, make, tokens=True)
    check_refused(pool, make, "embed", "sparse", "parallel.data", dims="fsdp=2", tokens=True)


class Matrices(nn.Module):
    """A module without vectors, for optimizers that take only matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def muon(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, lr=0.1)


def adafactor(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=0.1)


@pytest.mark.parametrize("make", [muon, adafactor])
def test_optimizers_of_whole_matrices_are_refused_on_shards(pool: Pool, make: Any) -> None:
    for told in pool.run(partial(optimized, module=Matrices), config_of("fsdp=2"), make, ranks=2):
        assert "cannot update parameters that are split" in told and "parallel.data" in told


# -- dtypes -----------------------------------------------------------------------------------------


def said_of(make: Callable[[], nn.Module], object_: bool, **train: Any) -> str:
    """The error of a Trainer for a module with these dtypes on one rank, or ""."""

    def body(mesh: Mesh) -> str:
        try:
            model = make() if object_ else ModelSpec(module=make)
            _ = Trainer(mesh, config, model, loss=loss_of).engine
        except MeshcommError as error:
            return str(error)
        return ""

    settings = {"dtype": None, **train}
    config = config_of("dp=1", **{name: each for name, each in settings.items() if each is not None})
    if settings["dtype"] is None:
        parts = config.model_dump(exclude_unset=True)
        del parts["train"]["dtype"]
        config = load_config(parts)
    (said,) = meshcomm.simulate(body, config)
    return said


def narrow_head() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))


@pytest.mark.parametrize("object_", [True, False])
def test_casts_that_nobody_asked_for_are_refused(object_: bool) -> None:
    for dtype in ("float32", "float64"):
        said = said_of(narrow_head, object_, dtype=dtype)
        assert "the parameters of this module have different dtypes" in said
        assert "float32: 0.weight" in said and "bfloat16: 1.weight" in said
    assert "module.double()" in said
    wide = said_of(lambda: nn.Linear(4, 4).double(), object_)
    assert "would round them to float32" in wide and 'train.dtype = "float64"' in wide
    assert not said_of(lambda: nn.Linear(4, 4).double(), object_, dtype="float32")
    assert not said_of(lambda: nn.Linear(4, 4).to(torch.bfloat16), object_)

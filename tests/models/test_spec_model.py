"""User modules: one without a spec, one with images and batch norms, and one with a full spec."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, TrainConfig, load_config
from meshcomm.errors import ConfigError, MeshcommError, TrainingError, UnsupportedOp
from meshcomm.models import ModelSpec, StageContext
from meshcomm.models.spec import KINDS
from meshcomm.models.spec_model import SpecModel
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.tensor import whole
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.watching.ending import failure_of
from tests.models import own
from tests.models.families import SMALL, config_of, differences

IMAGES = 8


class Net(nn.Module):
    """Two convolutions with batch norms, one with a moving and one with a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, bias=False)
        self.other = nn.BatchNorm2d(8, momentum=None)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 3, 8, 8) -> (samples, 4)."""
        x = F.relu(self.norm(self.first(x)))
        out: Tensor = self.head(F.relu(self.other(self.second(x))).mean((2, 3)))
        return out


def images_config(dims: str, **train: Any) -> Config:
    parts = {"dp": "data", "fsdp": "shard", "tp": "tensor"}
    sizes = {name: int(size) for name, size in (pair.split("=") for pair in dims.split())}
    ranks = math.prod(sizes.values())
    return load_config(
        {
            "mesh": {"dims": sizes, "device": "cpu", "timeout_s": 60.0, "reports": ""},
            "parallel": {parts[dim]: dim for dim in sizes},
            "model": {"build": "tests.models.test_spec_model:Net"},
            "data": {"seq_len": 8},
            "train": {
                "steps": 5,
                "global_batch_size": IMAGES,
                "micro_batch_size": IMAGES // ranks,
                "dtype": "float64",
                **train,
            },
        }
    )


def images_trained(config: Config) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the state after five steps: whole weights, optimizer state and running statistics."""
    torch.manual_seed(1)
    x, y = torch.randn(IMAGES, 3, 8, 8, dtype=torch.float64), torch.randint(4, (IMAGES,))
    spec = ModelSpec(module=Net, loss=F.cross_entropy)
    with meshcomm.init(config) as mesh:
        assert config.train is not None
        trainer = Engine(mesh, config, SpecModel(spec, config.train, 8))
        each = IMAGES // trainer.data_size
        here = slice(trainer.data_coord * each, (trainer.data_coord + 1) * each)
        losses = []
        for step in range(1, 6):
            trainer.step(x[here], y[here], 1e-2, step)
            losses += [done.loss for done in trainer.results()]
        return losses, {name: whole(value).clone() for name, value in trainer.state().items()}


@pytest.mark.parametrize("dims", ["dp=4", "fsdp=4", "dp=2 fsdp=2"])
@pytest.mark.deep_cases(r"\[fsdp=4")
def test_batch_norms_take_the_samples_of_all_ranks(pool: Pool, dims: str) -> None:
    (one,) = pool.run(images_trained, images_config("dp=1"), ranks=1)
    for losses, state in pool.run(images_trained, images_config(dims), ranks=4):
        assert losses == pytest.approx(one[0], rel=1e-12)
        assert set(state) == set(one[1])
        assert "model.norm.running_var" in state
        assert state["model.other.num_batches_tracked"] == 5
        for name, value in state.items():
            torch.testing.assert_close(value, one[1][name], rtol=1e-9, atol=1e-12, msg=name)


def _says(config: Config) -> str:
    with pytest.raises(UnsupportedOp) as caught:
        images_trained(config)
    return str(caught.value)


def test_batch_norms_are_refused_where_their_means_would_depend_on_the_mesh(pool: Pool) -> None:
    told = pool.run(_says, images_config("dp=2 tp=2", micro_batch_size=4), ranks=4)
    assert all("cannot be trained with parallel.tensor" in each for each in told)
    assert all("norm averages over all tokens" in each for each in told)
    (told_one,) = pool.run(_says, images_config("dp=1", activation_checkpointing=True), ranks=1)
    assert "train.activation_checkpointing" in told_one


def test_names_that_mean_nothing_are_all_told() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    spec = ModelSpec(
        module=Net, layers="block", first=("embedding",), split={"blocks.*": "column", "blocks.*.up": "row"}
    )
    with pytest.raises(ConfigError) as caught:
        SpecModel(spec, TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1), 4)
    assert str(caught.value.given).splitlines() == [
        "layers = 'block'",
        "first: 'embedding'",
        "split: 'blocks.*.up'",
    ]
    assert caught.value.hint == "embed, blocks, blocks.*"


ALONE = {"build": "tests.models.own:alone"}
AS_IT_IS = {"build": "tests.models.own:as_it_is"}
DROPS = {"build": "tests.models.own:spec", "args": {"width": 32, "dropped": 0.1}}


@pytest.mark.parametrize(
    ("model", "dims", "more"),
    [
        (ALONE, "dp=2 fsdp=2", {}),
        (AS_IT_IS, "pp=2 tp=2", {"train": {"activation_checkpointing": True}}),
        (AS_IT_IS, "pp=2 fsdp=2", {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
        ({"build": "tests.models.own:placed"}, "pp=2 cp=2", {}),
        ({"build": "tests.models.own:twice"}, "dp=2", {"train": {"activation_checkpointing": True}}),
        pytest.param(
            DROPS,
            "pp=2 tp=2",
            {"sequence_parallel": True, "schedule": "zero_bubble", "stages_per_rank": 2},
            marks=pytest.mark.parity,
        ),
        pytest.param(
            DROPS,
            "fsdp=2 cp=2",
            {"attention": "ulysses", "train": {"activation_checkpointing": True}},
            marks=pytest.mark.parity,
        ),
    ],
    ids=str,
)
@pytest.mark.deep_cases(r"\[.*(as_it_is.*(tp=2|pp=2 fsdp=2)|alone|placed)")
def test_a_module_of_thirty_lines_is_the_same_on_a_mesh(
    pool: Pool, model: dict[str, Any], dims: str, more: dict[str, Any]
) -> None:
    assert max(each.relative for each in differences(pool, config_of(model, dims, **more))) < 1e-9


def _refused(config: Config) -> str:
    with pytest.raises(MeshcommError) as caught, meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        trainer.step(torch.arange(256).reshape(8, 32), torch.arange(256).reshape(8, 32))
        trainer.results()
    return str(caught.value)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("twice", "given:    a forward that calls Block 2 again"),
        ("skips", "nan"),
    ],
)
def test_a_forward_that_cannot_be_run_in_stages_is_refused(pool: Pool, build: str, said: str) -> None:
    config = load_config(config_of({"build": f"tests.models.own:{build}"}, "pp=2"), ["mesh.timeout_s=4"])
    told = pool.run(_refused, config, ranks=2)
    assert said in told[1], told


# -- a split that does not fit --------------------------------------------------------------------


def phi3() -> ModelSpec:
    """A plausible but wrong spec: its author does not know that the attention reads the number of heads from the config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Phi3Config(**SMALL)

    def forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
        x = module.model.embed_tokens(x)
        rotary = module.model.rotary_emb(x, here.positions.unsqueeze(0))
        for block in here.layers:
            x = here.through(block, x, position_embeddings=rotary)
        y: Tensor = module.lm_head(module.model.norm(x))
        return y

    return ModelSpec(
        module=lambda: transformers.Phi3ForCausalLM(config),
        vocab_size=256,
        layers="model.layers",
        forward=forward,
        split={
            "model.layers.*.self_attn.qkv_proj": {"style": "column", "parts": [32, 16, 16]},
            "model.layers.*.self_attn.o_proj": "row",
            "model.layers.*.mlp.gate_up_proj": "column:2",
            "model.layers.*.mlp.down_proj": "row",
        },
    )


def _stepped(config: Config) -> str:
    with pytest.raises(TrainingError) as caught, meshcomm.init(config) as mesh:
        Trainer(mesh, config).step(torch.arange(256).reshape(8, 32), torch.arange(256).reshape(8, 32))
    failure = failure_of(caught.value, 0, "rank 0")
    return f"{failure.summary}\n{failure.text}"


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason=f"torch {torch.__version__} divides by zero in attention without heads"
)
def test_a_first_step_that_does_not_fit_its_split_names_the_part_the_line_and_a_cure(pool: Pool) -> None:
    pytest.importorskip("transformers")
    for text in pool.run(
        _stepped, config_of({"build": "tests.models.test_spec_model:phi3"}, "tp=2"), ranks=2
    ):
        assert 'fails in "model.layers.0.self_attn.o_proj", a Linear' in text.splitlines()[0], text
        assert "modeling_phi3.py:" in text and " in forward: " in text
        assert "Traceback" not in text and len(text.splitlines()) < 14, text
        cure = '"model.layers.0.self_attn": {"set": {"config": ...}}, a copy of its config with num_attention_heads = 4'
        assert cure in text, text


def _started(config: Config) -> str:
    with pytest.raises(UnsupportedOp) as caught, meshcomm.init(config) as mesh:
        _ = Trainer(mesh, config).engine
    return str(caught.value)


@pytest.mark.parametrize(
    ("dims", "what", "missing"),
    [
        ("tp=2", "parallel.tensor", "ModelSpec without split"),
        ("pp=2", "parallel.pipeline", "ModelSpec without layers"),
        ("cp=2", "parallel.context", "ModelSpec without attention"),
        (
            "activation_checkpointing",
            "train.activation_checkpointing",
            "ModelSpec without layers",
        ),
        ("compile", "train.compile", "ModelSpec without layers"),
        ("dropped", "ModelSpec.dropped", "ModelSpec without layers"),
    ],
)
def test_what_a_module_does_not_say_is_asked_for_by_name(
    pool: Pool, dims: str, what: str, missing: str
) -> None:
    setting = {"train": {dims: True}} if dims in ("activation_checkpointing", "compile") else {}
    model = {"build": "tests.models.own:dropping"} if dims == "dropped" else ALONE
    dims = dims if "=" in dims else "dp=2"
    for told in pool.run(_started, config_of(model, dims, **setting), ranks=2):
        assert f"cannot be trained with {what}" in told
        assert missing in told


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_a_spec_says_that_it_cannot_do_is_refused_with_its_reason(kind: str) -> None:
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)
    model = SpecModel(replace(own.spec(), cannot={kind: "it adds up tokens"}), train, 32)
    everything: Any = SimpleNamespace(
        tensor=SimpleNamespace(size=2, sequence_parallel=True),
        context=SimpleNamespace(size=2),
        expert="ep",
    )
    with pytest.raises(UnsupportedOp) as caught:
        model.check(everything, stages=2)
    setting = "parallel.options.sequence_parallel" if kind == "sequence_parallel" else f"parallel.{kind}"
    assert f"cannot be trained with {setting}\n" in str(caught.value)
    assert caught.value.given == "it adds up tokens"


def test_a_spec_that_refuses_what_there_is_not_is_refused() -> None:
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)
    with pytest.raises(ConfigError) as caught:
        SpecModel(replace(own.spec(), cannot={"sequence": "it adds up tokens"}), train, 32)
    assert caught.value.given == "cannot: 'sequence'"
    assert str(caught.value.expected) == "tensor, context, pipeline, expert, sequence_parallel"

"""Any causal language model of transformers, split by what its family publishes: the parts compute the whole model's results."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import meshcomm
from meshcomm.config import Config, ParallelConfig, TrainConfig
from meshcomm.errors import ShapeError, TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.models import ModelSpec, StageContext
from meshcomm.models.check import Use, check_model
from meshcomm.models.families import spec_of
from meshcomm.models.hf import Whole
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.step_check import StepCheck
from meshcomm.models.tiny import tiny
from meshcomm.parallel import TensorSplit
from meshcomm.parallel.expert import spread_experts
from meshcomm.parallel.splits import Sections
from meshcomm.parallel.tensor import local
from meshcomm.testing import Pool
from meshcomm.train import Trainer, save_pretrained
from tests.models import own, table
from tests.models.families import config_of

USES = {
    "pipeline": Use(pipeline=True),
    "tensor": Use(tensor=True),
    "sequence_parallel": Use(tensor=True, sequence_parallel=True),
    "context": Use(context=True, attention="ulysses"),
    "expert": Use(expert=True),
}
# Dense models and mixtures of experts with features that Llama lacks: multipliers, soft caps, sinks, norms centred at zero, query
# norms after gathered columns, fused weights, parallel blocks, latent attention, shared experts, router biases.
FAMILIES = [
    *("llama", "granite_swa", "gemma2", "gemma3_text", "olmo2", "phi3", "cohere2", "glm4"),
    *("mixtral", "qwen2_moe", "deepseek_v3", "minimax_m2"),
]


def small(name: str) -> ModelSpec:
    """The specification of a small model of a family, with random weights."""
    whole = Whole(table.smallest(name), exact=True)
    whole.config.use_cache = False
    return replace(spec_of(whole), initialise=partial(whole.initialise, 0))


# gemma2 has the parts of Llama, and more.
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.deep_cases(
    r"\[(minimax_m2|qwen2_moe|glm4|granite_swa|olmo2|cohere2|gemma3_text|mixtral|phi3|deepseek_v3|llama)\]"
)
def test_a_family_in_parts_is_itself(name: str) -> None:
    spec, done = small(name), []
    for kind, use in USES.items():
        if kind in spec.cannot or (kind == "sequence_parallel" and "tensor" in spec.cannot):
            continue
        if kind == "context" and name in ("gemma2", "granite_swa"):
            with pytest.raises(UnsupportedOp, match="does not support a model's own attention"):
                check_model(spec, replace(use, attention="ring"), family=True, name=name)
        check_model(spec, use, family=True, name=name)
        done.append(kind)
    assert {"pipeline", "tensor", "sequence_parallel"} <= set(done)
    assert ("expert" in done) == (name in FAMILIES[8:])


def _longrope(frequencies: int, **more: Any) -> dict[str, Any]:
    factors = {
        f"{kind}_factor": [start + place / 10 for place in range(frequencies)]
        for kind, start in (("short", 1.0), ("long", 1.5))
    }
    more = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32, **more}
    return {"rope_parameters": {"rope_type": "longrope", **factors, **more}}


# Settings with a list entry per rotary frequency, and optional norms that no published plan covers.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("Phi3Config", _longrope(6)),
    "longrope, partial": ("Phi3Config", {**_longrope(12, partial_rotary_factor=0.75), "hidden_size": 256}),
    "longrope, latent attention": ("MiniCPM3Config", {**_longrope(8), "qk_rope_head_dim": 16}),
    "longrope, head_dim": ("LlamaConfig", {**_longrope(16), "head_dim": 32}),
    "phi, norms of heads": ("PhiConfig", {"qk_layernorm": True}),
    "cohere, norms of heads": ("CohereConfig", {"use_qk_norm": True}),
    "glm4_moe, norms of heads": ("Glm4MoeConfig", {"use_qk_norm": True, "n_routed_experts": 4}),
}


# Families split the norms of heads in the same way, so that one family stands for all.
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.deep_cases(r"\[(phi|glm4_moe), norms of heads")
def test_a_setting_of_a_family_in_parts_is_itself(setting: str) -> None:
    kind, more = SETTINGS[setting]
    said = {
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "pad_token_id": 0,
        "use_cache": False,
    }
    config = getattr(transformers, kind)(
        **{**said, "num_attention_heads": 8, "num_key_value_heads": 8, **more}
    )
    whole = Whole(tiny(config), exact=True)
    spec = replace(spec_of(whole), initialise=partial(whole.initialise, 0))
    # Sequence parallelism has the splits of tensor parallelism, with other communication.
    tensor = ["tensor"] if setting == next(iter(SETTINGS)) else []
    for each in ("pipeline", "sequence_parallel", *tensor):
        check_model(spec, USES[each], family=True, name=setting)


BERT = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@pytest.mark.parametrize(
    ("kind", "said", "given"),
    [
        ("BertConfig", BERT, "is_decoder = false"),
        ("XLMRobertaConfig", BERT, "is_decoder = false"),
        ("ElectraConfig", BERT, "is_decoder = false"),
        # This configuration does not show that the model is not causal.
        ("XLNetConfig", {"vocab_size": 256, "d_model": 32, "n_layer": 2, "n_head": 4, "dropout": 0.0}, ""),
    ],
)
def test_a_model_that_sees_later_tokens_is_refused(
    kind: str, said: dict[str, Any], given: str, tmp_path: Path
) -> None:
    getattr(transformers, kind)(**said).save_pretrained(tmp_path)
    config = config_of({"pretrained": str(tmp_path), "random_weights": True}, "dp=1")
    with meshcomm.init(config) as mesh, pytest.raises(UnsupportedOp, match="is not causal") as caught:
        Trainer(mesh, config)
    assert given in str(caught.value)


def test_an_encoder_that_is_a_decoder_trains(tmp_path: Path) -> None:
    transformers.BertConfig(**BERT, is_decoder=True).save_pretrained(tmp_path)
    config = config_of({"pretrained": str(tmp_path), "random_weights": True}, "dp=1", train={"steps": 1})
    with meshcomm.init(config) as mesh:
        Trainer(mesh, config).run()


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", table.published())
def test_the_table_of_models_says_what_is_so(pool: Pool, name: str) -> None:
    said = next(line for line in table.PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))
    cells = [cell.strip() for cell in said.split("|")[2:-1]]
    found = [cell if cell == "-" else "yes" if not cell else "" for cell in table.row(pool, name).values()]
    assert found == ["" if cell.isdecimal() else cell for cell in cells]


# -- planted: what a specification forgets, or a split gets wrong, is refused by name ------------------


def _refused(spec: ModelSpec, use: Use, family: bool = False) -> str:
    with pytest.raises(TrainingError) as caught:
        check_model(spec, use, family=family)
    return str(caught.value)


def test_a_multiplier_on_each_stage_is_refused() -> None:
    class Multiplied(own.Own):
        def forward(self, x: Tensor) -> Tensor:
            x = (self.tokens(x) + self.places(torch.arange(x.shape[1]))) * 3
            for block in self.blocks:
                x = block(x)
            return self.logits(self.norm(x))

    def forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
        if here.stage.is_first:
            x = module.tokens(x) + module.places(here.positions)
        x = x * 3
        for block in here.layers:
            x = here.through(block, x)
        return module.logits(module.norm(x)) if here.stage.is_last else x

    spec = replace(own.spec(), module=Multiplied, forward=forward)
    found = _refused(spec, USES["pipeline"])
    assert (
        "the model computes different results with parallel.pipeline" in found
        and "the loss of step 1 is" in found
    )
    check_model(replace(spec, forward=None), USES["pipeline"])


class _Masked(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        return x + torch.tanh(self.layer(x)) * mask * scale


@pytest.mark.parametrize("of_ids", [False, True])
def test_masks_through_a_pipeline_may_depend_on_the_shape_and_not_on_ids(of_ids: bool) -> None:
    class Masks(own.Own):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(_Masked(16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            mask = x % 3 != 0 if of_ids else torch.arange(x.shape[1])[None] % 2 == 0
            hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
            for block in self.blocks:
                hidden = block(hidden, mask.to(hidden.dtype)[..., None], 0.5)
            return self.logits(self.norm(hidden))

    spec = replace(own.spec(), module=Masks, forward=None, attention=None, split={}, sequence=None)
    if of_ids:
        # Later stages get zeros as token ids.
        assert "computes different results with parallel.pipeline" in _refused(spec, USES["pipeline"])
    else:
        check_model(spec, USES["pipeline"])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.down = nn.Embedding(48, 8), nn.Linear(8, 32), nn.Linear(16, 8)
        self.head = nn.Linear(8, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        gate, up = self.up(x).chunk(2, -1)
        y: Tensor = self.head(x + self.down(nn.functional.silu(gate) * up))
        return y


def test_a_model_of_tokens_is_compared_or_refused() -> None:
    split = {"up": "column", "down": "row"}
    assert "with parallel.tensor" in _refused(
        ModelSpec(module=Gated, vocab_size=48, split=split), USES["tensor"]
    )
    check_model(ModelSpec(module=Gated, vocab_size=48, split={**split, "up": "column:2"}), USES["tensor"])
    # Without this check, such a model trained with a wrong loss.
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)
    with pytest.raises(UnsupportedOp, match="its ModelSpec has no vocab_size"):
        check_model(ModelSpec(module=Gated, split=split), USES["tensor"])
    with pytest.raises(UnsupportedOp, match="Gated cannot be compared"):
        _checked(SpecModel(ModelSpec(module=Gated, split=split), train, 16), ParallelConfig(tensor="tp"), 2)
    # Inputs may have any type.
    check_model(ModelSpec(module=Gated, split=split, loss=nn.functional.mse_loss), USES["tensor"])


def test_positions_of_another_stage_are_refused() -> None:
    def forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
        if here.stage.is_first:
            # Wrong: counts this rank's tokens from 0.
            x = module.tokens(x) + module.places(torch.arange(x.shape[1]))
        for block in here.layers:
            x = here.through(block, x)
        return module.logits(module.norm(x)) if here.stage.is_last else x

    assert "with parallel.context" in _refused(replace(own.spec(), forward=forward), Use(context=True))
    check_model(own.spec(), Use(context=True))


def test_hidden_states_of_another_shape_are_refused() -> None:
    # The next stage has allocated the shape in the specification, so gloo would end the process.
    with pytest.raises(ShapeError, match="stage 0 does not pass on hidden states") as caught:
        check_model(replace(own.spec(), hidden_size=8), USES["pipeline"])
    assert caught.value.given == "shape (2, 16, 16)"


def test_a_swallowed_soft_cap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshcomm.models import hf

    inner = hf._attention
    swallowing = lambda *args, softcap=None, **named: inner(*args, **named)  # noqa: E731
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, hf.ATTENTION, swallowing)
    assert "with parallel.context" in _refused(small("gemma2"), USES["context"], family=True)


@pytest.mark.parametrize("what", ["norm", "router"])
def test_a_part_that_is_read_as_another_family_has_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, kind = ("gemma", "GemmaRMSNorm") if what == "norm" else ("deepseek_v3", "DeepseekV3TopkRouter")
    spec = small(name)
    attended = spec.attention
    assert attended is not None

    def changed(module: nn.Module, attend: Any) -> None:
        """An attention setting that also changes another part of the model."""
        attended(module, attend)
        for part in module.modules():
            if type(part).__name__ == kind and what == "norm":
                part.forward = lambda x, part=part: nn.functional.rms_norm(
                    x, x.shape[-1:], part.weight, part.eps
                )  # type: ignore[assignment]
            elif type(part).__name__ == kind:
                part.e_score_correction_bias.add_(torch.arange(len(part.e_score_correction_bias)))

    found = _refused(replace(spec, attention=changed), Use(context=True, attention="ulysses"), family=True)
    assert "with parallel.context" in found


# -- experts ------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Experts as transformers calls them: y = sum over chosen e of weight * w_e x."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.num_experts = nn.Parameter(torch.randn(4, 6, 6, dtype=torch.float64)), 4

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """(n, 6), (n, slots), (n, slots) -> (n, 6)."""
        each = torch.einsum("nsij,nj->nsi", self.w[chosen], x)
        return (each * weights.unsqueeze(-1)).sum(1)


def test_a_rank_that_no_token_goes_to_takes_part() -> None:
    torch.manual_seed(0)
    whole, x = Packed(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    chosen, weights = torch.tensor([[0, 1]] * 5), torch.rand(5, 2, dtype=torch.float64)
    expected = whole(x, chosen, weights)
    expected.square().sum().backward()

    def body(mesh: Mesh, part: Packed) -> tuple[Tensor, Tensor, Tensor]:
        spread_experts(part, TensorSplit(mesh, None), "ep", {})
        mine = x.detach().clone().requires_grad_()
        y = part(mine, chosen, weights)
        y.square().sum().backward()
        assert mine.grad is not None and part.w.grad is not None and local(part.w).shape[0] == 2
        return y.detach(), mine.grad, local(part.w.grad)

    found = meshcomm.simulate(body, dims={"ep": 2}, args=(whole,))
    assert x.grad is not None and whole.w.grad is not None
    for rank, (y, dx, dw) in enumerate(found):
        torch.testing.assert_close((y, dx), (expected.detach(), x.grad))
        # Both ranks sent the same tokens.
        torch.testing.assert_close(dw, 2 * whole.w.grad[2 * rank : 2 * rank + 2])


# -- weights -----------------------------------------------------------------------------------------


def folder_of(name: str, path: Path) -> Path:
    """A small model of a family, with weights and buffers that all have an effect."""
    torch.manual_seed(4)
    made = transformers.AutoModelForCausalLM.from_config(table.smallest(name))
    with torch.no_grad():
        for each in (
            *made.parameters(),
            *(made.get_buffer(n) for n, _ in made.named_buffers() if n in made.state_dict()),
        ):
            each.add_(torch.randn_like(each), alpha=0.05)
    made.save_pretrained(path)
    return path


def saved(config: Config, folder: Path) -> None:
    """Read a folder's weights on a mesh and write them as a folder and as a checkpoint."""
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        save_pretrained(trainer, folder / "again")
        trainer.save(folder / "checkpoint")


WEIGHTS = ["gpt2", "mixtral"]
MORE_WEIGHTS = ["llama", "phi3", "olmo2", "granite", "gemma2", "qwen2_moe", "deepseek_v3", "glm4_moe"]


@pytest.mark.parametrize(
    "name",
    [*WEIGHTS, *(pytest.param(each, marks=[pytest.mark.deep, pytest.mark.parity]) for each in MORE_WEIGHTS)],
)
@pytest.mark.deep_cases(r"\[(gpt2|mixtral)\]")
def test_weights_that_went_through_a_mesh_are_the_same_bits(pool: Pool, tmp_path: Path, name: str) -> None:
    source = folder_of(name, tmp_path / "from")
    config = config_of({"pretrained": str(source), "dropout": 0.0}, "pp=2 tp=2", train={"dtype": "float32"})
    pool.run(saved, config, tmp_path, ranks=4, timeout_s=120)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    tokens = torch.arange(40).reshape(2, 20) * 7 % 120
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, again(tokens).logits)
    # torch's own reader sees the module's names and shapes.
    read = transformers.AutoModelForCausalLM.from_config(theirs.config)
    state = {f"model.{key}": torch.zeros_like(value) for key, value in read.named_parameters()}
    with warnings.catch_warnings():
        # The reader warns that it reads in one process.
        warnings.simplefilter("ignore", UserWarning)
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    read.load_state_dict({key.removeprefix("model."): value for key, value in state.items()}, strict=False)
    for key, value in theirs.named_parameters():
        assert torch.equal(read.get_parameter(key), value), key


# -- once --------------------------------------------------------------------------------------------


def _checked(model: SpecModel, parallel: ParallelConfig, ranks: int) -> None:
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)
    sizes = dict.fromkeys(parallel.parts.values(), ranks)
    StepCheck(model, Sections(parallel, None, None, train), sizes, None).before_building()


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_what_is_once_checked_is_noted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshcomm.models import step_check

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[str] = []

    def counted(program: Any, use: Any, name: str, **more: Any) -> str:
        calls.append(name)
        return ""

    monkeypatch.setattr(step_check, "check_steps", counted)
    spec = replace(small(name), small=partial(small, name))
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)
    model = SpecModel(spec, train, 16, family=True)
    for _ in range(2):
        _checked(model, ParallelConfig(tensor="tp"), 2)
    assert len(calls) == 1
    _checked(model, ParallelConfig(tensor="tp"), 1)
    assert len(calls) == 1
    _checked(model, ParallelConfig(pipeline="pp"), 2)
    assert len(calls) == 2

"""Batches as dictionaries with transformers' names: a step uses the model's own loss as plain transformers does, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.models import ModelSpec
from meshcomm.testing import Pool
from meshcomm.train import Trainer

STEPS, SAMPLES, TOKENS, VOCABULARY, RATE = 3, 8, 10, 32, 0.05
BERT: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 16,
}
GPT: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
}
SEQ2SEQ: Final[dict[str, Any]] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "dropout": 0.0,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def bert(kind: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**BERT, **more))


def gpt(kind: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"GPT2{kind}")(transformers.GPT2Config(**GPT, **more))


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SEQ2SEQ))


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {name: BERT[name] for name in BERT if name not in ("vocab_size", "max_position_embeddings")}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    )


def mixtral() -> nn.Module:
    sizes = {name: BERT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = transformers.MixtralConfig(
        **sizes,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        bos_token_id=0,
        eos_token_id=0,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


# -- batches --------------------------------------------------------------------------------------


def ids(step: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(step))


def plain(step: int) -> dict[str, Tensor]:
    return {"input_ids": ids(step), "labels": ids(step)}


def padded(step: int) -> dict[str, Tensor]:
    lengths = torch.randint(4, TOKENS + 1, (SAMPLES, 1), generator=torch.Generator().manual_seed(step + 5))
    mask = (torch.arange(TOKENS) < lengths).long()
    return {
        "input_ids": ids(step),
        "labels": ids(step).masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


def masked(step: int) -> dict[str, Tensor]:
    """Batches for a masked language model, which has to predict 30% of the tokens."""
    hidden = torch.rand(SAMPLES, TOKENS, generator=torch.Generator().manual_seed(step + 9)) < 0.3
    return {
        "input_ids": ids(step).masked_fill(hidden, 1),
        "labels": ids(step).masked_fill(~hidden, -100),
    }


def of_pairs(step: int) -> dict[str, Tensor]:
    both = {
        **padded(step),
        "token_type_ids": (torch.arange(TOKENS) > 4).long().expand(SAMPLES, TOKENS).clone(),
    }
    return {**both, "labels": masked(step)["labels"].where(both["attention_mask"] > 0, -100)}


def of_classes(step: int) -> dict[str, Tensor]:
    classes = ids(step + 3) % 5
    return {**padded(step), "labels": classes.where(padded(step)["attention_mask"] > 0, -100)}


def of_samples(step: int) -> dict[str, Tensor]:
    return {**padded(step), "labels": ids(step)[:, 0] % 3}


def images(step: int) -> dict[str, Tensor]:
    drawn = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    return {"pixel_values": drawn, "labels": ids(step)[:, 0] % 3}


def answers(step: int) -> dict[str, Tensor]:
    places = {"start_positions": ids(step)[:, 0] % 4, "end_positions": ids(step)[:, 1] % 4}
    return {name: each for name, each in padded(step).items() if name != "labels"} | places


# -- training -------------------------------------------------------------------------------------


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, RATE)


def alone(make: Callable[[], nn.Module], batch: Callable[[int], dict[str, Tensor]]) -> list[float]:
    """The losses that the model itself returns for whole batches in plain torch."""
    torch.manual_seed(0)
    model: Any = make().double().train()
    optimizer, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        given = {name: x.double() if x.is_floating_point() else x for name, x in batch(step).items()}
        loss = model(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def config_of(dim: str = "dp", **train: Any) -> Config:
    return load_config(
        {
            "mesh": {"dims": {dim: 2}, "device": "cpu"},
            "parallel": {"data" if dim == "dp" else "shard": dim},
            "train": {
                "steps": STEPS,
                "global_batch_size": SAMPLES,
                "micro_batch_size": 2,
                "lr": RATE,
                "schedule": "constant",
                "dtype": "float64",
                **train,
            },
        }
    )


def trained(
    config: Config,
    make: Callable[[], Any],
    batch: Callable[[int], dict[str, Tensor]],
    targets: str = "",
    mesh: meshcomm.Mesh | None = None,
    **more: Any,
) -> list[float]:
    """The losses on two ranks. targets: the key whose value the custom loss gets as targets, if any."""

    def program(mesh: meshcomm.Mesh) -> list[float]:
        torch.manual_seed(0)
        trainer = Trainer(mesh, config, make(), optimizer=sgd, **more)
        for step in range(STEPS):
            mine = {name: x.chunk(2)[mesh.data_rank] for name, x in batch(step).items()}
            trainer.step(mine, mine[targets] if targets else None)
        return [done.loss for done in trainer.results()]

    return program(mesh) if mesh is not None else meshcomm.simulate(program, config)[0]


def own_loss(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The custom loss that the error messages propose."""
    count = (labels != -100).sum()
    return outputs.loss * count, count


MISREAD: Final[dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Tensor]], str]]] = {
    "masked language model": (bert("MaskedLM"), masked, "is not causal.*outputs.loss"),
    "padding that is attended to": (bert("MaskedLM"), padded, "is not causal.*outputs.loss"),
    "segments": (bert("MaskedLM"), of_pairs, "token_type_ids.*outputs.loss"),
    "classes of tokens": (bert("TokenClassification", num_labels=5), of_classes, "is not causal"),
    "classes of tokens, causal": (
        gpt("ForTokenClassification", num_labels=5, classifier_dropout=0.0),
        of_classes,
        "is not the one",
    ),
    "classes of samples": (bert("SequenceClassification", num_labels=3), of_samples, r"\(4,\).*outputs.loss"),
    "routers": (mixtral, plain, "is not the one.*output_router_logits"),
    "encoder and decoder": (bart, padded, "is not causal"),
    "a decoder without inputs": (t5, padded, "cannot be trained on input_ids.*outputs.loss"),
    "images": (vit, images, "pixel_values.*outputs.loss"),
    "answers": (bert("QuestionAnswering"), answers, "start_positions.*outputs.loss"),
}


@pytest.mark.parametrize("case", MISREAD)
def test_a_dictionary_that_training_would_misread_is_refused(case: str) -> None:
    make, batch, says = MISREAD[case]
    with pytest.raises(MeshcommError, match=f"(?s){says}"):
        trained(config_of(), make, batch)


def test_a_causal_model_trains_as_by_its_own_loss() -> None:
    # transformers computes the cross-entropy in float32.
    expected = alone(gpt("LMHeadModel"), padded)
    assert trained(config_of(), gpt("LMHeadModel"), padded) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", [case for case in MISREAD if case not in ("routers", "answers")])
def test_a_models_own_loss_of_its_labels_is_the_way_out(case: str) -> None:
    make, batch, _ = MISREAD[case]
    if case == "padding that is attended to":
        batch = of_pairs
    found = trained(config_of(), make, batch, "labels", loss=own_loss)
    assert found == pytest.approx(alone(make, batch), rel=1e-9)


def test_a_dictionary_of_other_names_is_the_models_arguments_for_a_loss_of_ones_own() -> None:
    make = bert("QuestionAnswering")
    found = trained(config_of(), make, answers, loss=lambda outputs, _: outputs.loss)
    assert found == pytest.approx(alone(make, answers), rel=1e-9)


def test_a_loss_of_ones_own_does_not_make_a_model_causal() -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())

    with pytest.raises(MeshcommError, match="is not causal"):
        trained(config_of(), bert("MaskedLM"), padded, loss=loss)


def test_labels_are_compared_in_a_short_dtype() -> None:
    with pytest.raises(MeshcommError, match=r"is not the one|is not causal"):
        trained(config_of(dtype="float32", compute_dtype="bfloat16"), bert("MaskedLM"), masked)


def test_an_evaluation_is_checked_too() -> None:
    config = config_of()

    def program(mesh: meshcomm.Mesh) -> float:
        trainer = Trainer(mesh, config, bert("MaskedLM")(), optimizer=sgd)
        return trainer.evaluate([{name: x.chunk(2)[mesh.rank] for name, x in masked(0).items()}])

    with pytest.raises(MeshcommError, match="is not causal"):
        meshcomm.simulate(program, config)


class Both(nn.Module):
    """A model whose tokens see their neighbours on both sides. Its forward takes no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        return self.head(x + x.roll(-1, 1))


def test_a_module_of_ones_own_must_be_causal() -> None:
    with pytest.raises(MeshcommError, match=r"(?s)Both is not causal.*targets"):
        trained(config_of(), Both, plain)


def test_the_module_of_a_spec_is_checked() -> None:
    def make() -> ModelSpec:
        return ModelSpec(module=bert("MaskedLM"), hidden_size=16, vocab_size=VOCABULARY)

    with pytest.raises(MeshcommError, match="is not causal"):
        trained(config_of(), make, masked)


def on_shards(config: Config) -> tuple[list[float], str]:
    with meshcomm.init(config) as mesh:
        losses = trained(config, gpt("LMHeadModel"), padded, mesh=mesh)
        try:
            trained(config, bert("MaskedLM"), masked, mesh=mesh)
        except MeshcommError as error:
            return losses, str(error)
        return losses, ""


def test_the_weights_may_be_sharded(pool: Pool, tmp_path: Path) -> None:
    for losses, says in pool.run(on_shards, config_of("fsdp"), ranks=2, timeout_s=120):
        assert losses == pytest.approx(alone(gpt("LMHeadModel"), padded), rel=1e-6)
        assert "BertForMaskedLM is not causal" in says

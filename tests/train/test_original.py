"""Parity compares with the original computation (transformers, or a user's forward), not with the same specification."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError, TrainingError, UnsupportedOp
from meshcomm.mesh.source import CONFIG_VARIABLE, new_job
from meshcomm.models import ModelSpec, StageContext, spec_model, wrapped
from meshcomm.models.hf import _attention
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.train.parity import record, record_script
from tests.models.families import FAMILIES, SMALL, config_of, folder_of
from tests.models.own import _forward
from tests.models.own import spec as own_spec

transformers = pytest.importorskip("transformers")

OLD = {"rope_theta": 10000.0}
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1],
        "long_factor": [2.0, 3.0],
    },
}


def original(config: Config) -> str:
    """The result of the comparison on one process."""
    with meshcomm.init(config) as mesh:
        try:
            return record(mesh, config, 1, original=True).original
        except MeshcommError as error:
            return str(error)


def originals(configs: list[Config]) -> list[str]:
    return [original(config) for config in configs]


@pytest.mark.timeout(300)
@pytest.mark.parity
def test_every_family_is_what_transformers_computes(pool: Pool, tmp_path: Path) -> None:
    configs = []
    for place, family in enumerate(FAMILIES):
        # Every other folder has weights, which both sides read.
        folder = folder_of(family, tmp_path / family, weights=place % 2 == 0)
        model = {"pretrained": str(folder), "random_weights": place % 2 == 1, "dropout": 0.0}
        configs.append(config_of(model, "dp=1"))
    (found,) = pool.run(originals, configs, ranks=1, timeout_s=240)
    assert [one[:38] for one in found] == ["equal to transformers on one process ("] * len(FAMILIES), found


@pytest.mark.timeout(300)
def test_every_scaling_of_positions_is_that_of_transformers(pool: Pool, tmp_path: Path) -> None:
    configs = []
    for kind, facts in ROPE.items():
        rope = {"rope_type": kind, **OLD, **facts}
        # Samples are longer than the number of positions that the model was made for.
        made = transformers.LlamaConfig(**SMALL, max_position_embeddings=16, rope_parameters=rope)
        made.save_pretrained(tmp_path / kind)
        model = {"pretrained": str(tmp_path / kind), "random_weights": True}
        configs.append(config_of(model, "dp=1"))
    (found,) = pool.run(originals, configs, ranks=1, timeout_s=240)
    assert [one[:38] for one in found] == ["equal to transformers on one process ("] * len(ROPE), found


# -- what a specification leaves out --------------------------------------------------------------

# Families whose forward does more than Llama's, around its blocks or in them.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteConfig", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "olmo2": ("Olmo2Config", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 5}),
    "cohere2": ("Cohere2Config", {"sliding_window": 6}),
    "phi3": ("Phi3Config", {}),
}


@pytest.mark.timeout(300)
@pytest.mark.deep
def test_what_a_family_does_around_its_blocks_is_its_own(pool: Pool, tmp_path: Path) -> None:
    configs = []
    for kind, (name, more) in OTHERS.items():
        getattr(transformers, name)(**{**SMALL, **more}).save_pretrained(tmp_path / kind)
        model = {"pretrained": str(tmp_path / kind), "random_weights": True}
        configs.append(config_of(model, "dp=1"))
    (found,) = pool.run(originals, configs, ranks=1, timeout_s=240)
    assert [one[:38] for one in found] == ["equal to transformers on one process ("] * len(OTHERS), found


@pytest.mark.parametrize("name", ["softcap", "s_aux", "attention_mask", "dropout"])
def test_an_argument_of_attention_that_no_mesh_honours_is_refused(name: str) -> None:
    module, x = nn.Module(), torch.randn(1, 2, 4, 8)
    module.config = SimpleNamespace(meshcomm_attend=lambda q, k, v, **how: v)  # type: ignore[assignment]
    facts: dict[str, Any] = {"attention_mask": None, "dropout": 0.0, "position_ids": torch.arange(4)}
    assert _attention(module, x, x, x, **facts)[0].shape == (1, 4, 2, 8)
    with pytest.raises(UnsupportedOp) as caught:
        _attention(module, x, x, x, **{**facts, name: 0.5})
    assert caught.value.given == name


class Multiplied(nn.Module):
    """A user's module that scales its logits."""

    def __init__(self) -> None:
        super().__init__()
        made = own_spec().module()
        for name, part in made.named_children():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens) int64 -> (samples, tokens, 256)."""
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        y: Tensor = self.logits(self.norm(h)) / 8
        return y


def forgetful() -> ModelSpec:
    """A specification without the factor."""
    return replace(own_spec(), module=Multiplied)


def careful() -> ModelSpec:
    """A specification with the factor."""

    def forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
        y = _forward(module, x, here)
        return y / 8 if here.stage.is_last else y

    return replace(own_spec(), module=Multiplied, forward=forward)


class Window(Multiplied):
    """A module that cannot be called with tokens alone."""

    def forward(self, x: Tensor, window: int) -> Tensor:  # type: ignore[override]
        """See Multiplied."""
        return super().forward(x[:, -window:])


def with_arguments() -> ModelSpec:
    return replace(own_spec(), module=Window)


def _built(name: str) -> Config:
    return config_of({"build": f"tests.train.test_original:{name}"}, "dp=1")


def test_a_specification_that_leaves_something_out_is_refused_with_the_figure(pool: Pool) -> None:
    names = ["forgetful", "careful", "with_arguments", "Turned"]
    (found,) = pool.run(originals, [_built(name) for name in names], ranks=1)
    left_out, right, not_compared, turned = found
    assert "the model does not compute what Multiplied.forward computes on one process" in left_out
    assert "outputs differ by" in left_out and "multipliers" in left_out
    assert right.startswith("equal to Multiplied.forward on one process (outputs differ by 0.0e+00")
    assert not_compared.startswith(
        "not compared with Window.forward, which fails when called with only the inputs: TypeError"
    )
    assert turned.startswith("equal to Turned.forward on one process")


# -- complex buffers ------------------------------------------------------------------------------


class Turned(nn.Module):
    """Rotary positions from a complex table, as in Meta's Llama."""

    freqs_cis: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.logits = nn.Embedding(256, 16), nn.Linear(16, 256)
        angle = torch.outer(torch.arange(64.0), 100.0 ** -torch.linspace(0, 1, 8))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angle), angle), persistent=False)
        self.register_buffer("shift", torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens) int64 -> (samples, tokens, 256)."""
        h = torch.view_as_complex(self.tokens(x).unflatten(-1, (-1, 2)).contiguous())
        y: Tensor = self.logits(torch.view_as_real(h * self.freqs_cis[: x.shape[1]]).flatten(-2) + self.shift)
        return y


def turned_by(config: Config, made: bool) -> tuple[dict[str, torch.dtype], float]:
    """The dtypes of the buffers in a trainer, and the distance of its outputs from the module's."""
    tokens = torch.arange(64).reshape(2, 32)
    torch.manual_seed(0)
    module = Turned()
    expected = module(tokens)
    with meshcomm.init(config) as mesh, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer(mesh, config, module if made else None)
        ours = trainer.modules[0]
        if not made:
            ours.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
        off = float((ours(tokens) - expected).abs().max())
        return {name: buffer.dtype for name, buffer in ours.named_buffers()}, off


@pytest.mark.parametrize("made", [True, False])
def test_complex_buffers_stay_complex(pool: Pool, made: bool) -> None:
    (found,) = pool.run(turned_by, _built("Turned"), made, ranks=1)
    types, off = found
    assert types == {"freqs_cis": torch.complex64, "shift": torch.float64, "count": torch.int64}
    assert off < 1e-5


def real_tables(config: Config) -> str:
    def cast(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.to(device=device, dtype=dtype)
            module.freqs_cis = module.freqs_cis.to(torch.complex128)  # type: ignore[assignment]

    with patch.object(spec_model, "cast", cast), patch.object(wrapped, "cast", cast):
        return original(config)


def test_parity_sees_a_table_without_its_imaginary_part(pool: Pool) -> None:
    (found,) = pool.run(real_tables, _built("Turned"), ranks=1)
    assert "does not compute what Turned.forward computes" in found


# -- scripts --------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import meshcomm
from meshcomm.train import Trainer
from tests.train import test_original

with meshcomm.init() as mesh:
    trainer = Trainer(mesh, model=getattr(test_original, sys.argv[1])())
    try:
        trainer.run(lambda step: (torch.arange(8 * 32).reshape(8, 32) % 256,) * 2)
    except Exception:
        pass
"""


def of_script(path: Path, script: Path, name: str) -> str:
    with patch.dict(os.environ, {CONFIG_VARIABLE: str(path)}), new_job():
        try:
            found = record_script(script, [name], load_config(path), 1)
        except TrainingError as error:
            return str(error)
        return "" if found is None else found.original


def test_a_specification_of_a_script_is_compared_too(pool: Pool, tmp_path: Path) -> None:
    config, script = tmp_path / "config.json", tmp_path / "script.py"
    facts = config_of({"build": "tests.models.own:spec"}, "dp=1").model_dump(mode="json", exclude_unset=True)
    config.write_text(json.dumps({key: value for key, value in facts.items() if key != "model"}))
    script.write_text(SCRIPT)
    (right,) = pool.run(of_script, config, script, "careful", ranks=1)
    assert right.startswith("equal to Multiplied.forward")
    # The script catches every Exception.
    (wrong,) = pool.run(of_script, config, script, "forgetful", ranks=1)
    assert "does not compute what Multiplied.forward computes" in wrong

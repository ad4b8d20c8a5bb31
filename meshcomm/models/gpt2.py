"""GPT-2: how it is cut, split and filled. Its Conv1D is a Linear whose weight lies transposed in a folder."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshcomm.errors import UnsupportedOp
from meshcomm.models.hf import attended, initialise, make
from meshcomm.models.spec import Here, ModelSpec

_SPLIT: dict[str, Any] = {
    "transformer.wte": "vocab",
    "transformer.h.*.attn.c_attn": "column:3",
    "transformer.h.*.attn": {"set": {"split_size": "split"}},
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
    "lm_head": "column",
}
_SEQUENCE: dict[str, Any] = {
    "transformer.h.*.attn": {"style": "enter", "args": [0], "set": {"split_size": "split"}},
    "transformer.wpe": {"style": "replicate", "input": "whole", "axis": 0},
    "transformer.h.*.ln_[12]": "sequence",
    "transformer.ln_f": "sequence",
}
_UNDIVIDED: dict[str, Any] = {
    "transformer.wte": {"style": "replicate", "input": "whole"},
    "lm_head": {"style": "replicate", "output": "whole"},
}


def spec(config: Any, weights: Path | None, seed: int, sequence: int) -> ModelSpec:
    """The spec of a GPT-2. Raises UnsupportedOp for longer samples than it has positions, and cross attention."""
    if sequence > config.n_positions:
        raise UnsupportedOp(
            "samples are longer than this GPT-2 has positions",
            given=f"data.sequence = {sequence}, n_positions = {config.n_positions} in its config.json",
            expected=f"at most {config.n_positions}",
            hint=f"data.sequence = {config.n_positions}",
        )
    if config.add_cross_attention:
        raise UnsupportedOp(
            "a GPT-2 with cross attention has a second input, which is not trained here",
            given="add_cross_attention = true in its config.json",
            expected="a decoder alone",
            hint="add_cross_attention = false",
        )
    return ModelSpec(
        module=partial(_linear, config),
        width=config.n_embd,
        vocabulary=config.vocab_size,
        layers="transformer.h",
        first=("transformer.wte", "transformer.wpe"),
        last=("transformer.ln_f", "lm_head"),
        forward=_forward,
        split=_SPLIT,
        sequence=_SEQUENCE,
        undivided=_UNDIVIDED,
        attention=attended,
        tied=("transformer.wte.weight", "lm_head.weight") if config.tie_word_embeddings else None,
        initialise=partial(initialise, config.initializer_range, seed),
        weights=weights,
        stored=_stored,
    )


def _linear(config: Any) -> nn.Module:
    made = make(config)
    for part in list(made.modules()):
        for name, inner in part.named_children():
            if isinstance(inner, Conv1D):
                setattr(part, name, nn.Linear(inner.nx, inner.nf))
    return made


def _forward(module: Any, x: Tensor, here: Here) -> Tensor:
    inner = module.transformer
    if here.stage.is_first:
        x = (inner.wte(x) + inner.wpe(here.positions)).to(here.dtype)
    for block in here.layers:
        x = here.through(block, x)
    if here.stage.is_last:
        x = module.lm_head(inner.ln_f(x))
    return x


def _stored(name: str) -> tuple[str, bool]:
    return name, bool(re.search(r"\.c_\w+\.weight$", name))

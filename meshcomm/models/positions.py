"""Finds families of transformers that do not count the positions of their tokens 0, 1, 2, ... if they are given only tokens.

RoBERTa and its relatives count from padding_idx + 1, and do not count padding. Context parallelism and packed documents give a
model its positions, so such families are rejected there.
"""

from __future__ import annotations

import torch

from meshcomm.models.family_code import family_code
from meshcomm.models.spec import ModelSpec
from meshcomm.parallel.loss import logits_of
from meshcomm.parallel.memory import seeded

_TOKENS = 16
# Relative to the largest logit, in float32.
_ROOM = 1e-4


def own_positions(spec: ModelSpec) -> str:
    """Return why a family's model computes something else if it is given the positions 0, 1, 2, ...; "" if it does not.

    A small model runs on one process: that of `spec.small` or, if it has none, the model itself. The result is "" if it does not
    run.
    """
    if not spec.positions:
        return ""
    try:
        with seeded(0), torch.no_grad(), family_code(torch.float32):
            module = (spec.small() if spec.small else spec).module().float().eval()
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
            tokens = torch.randint(3, 64, (2, _TOKENS))
            # The padding of a small model is token 0.
            tokens[1, _TOKENS // 2] = 0
            given = {spec.positions: torch.arange(_TOKENS).unsqueeze(0)}
            expected, found = logits_of(module(tokens)), logits_of(module(tokens, **given))
    except Exception:
        return ""
    if float((found - expected).abs().max()) <= _ROOM * float(expected.abs().max()):
        return ""
    return (
        f"a {type(module).__name__} counts the positions of its tokens itself, and not as 0, 1, 2, ..., "
        "so it cannot be given those of a part of a sample, or of a document"
    )

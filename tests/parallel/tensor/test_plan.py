"""Plans that do not fit a module are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshcomm
from meshcomm.errors import ConfigError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import tensor_parallel
from tests.parallel.tensor.test_apply import Small, module_of, plan_of

WRONG: list[tuple[str, Any, str]] = [
    ("layers.*.atn.q", "column", 'matches no part of the module; did you mean "layers.*.attn.q"?'),
    ("layers.*.attn.q", "colum", 'style \'colum\' is not one of "column", "row", "vocab", "latent", "enter"'),
    ("norm", "column", '"norm", a LayerNorm: style "column" splits an nn.Linear, but this is not one'),
    ("embed", "column", '"embed", a Embedding: style "column" splits an nn.Linear'),
    ("odd", "column", '"odd", a Linear: 6 outputs are not divisible by tp: 6 % 4 = 2'),
    ("odd", "row", '"odd", a Linear: 6 inputs are not divisible by tp: 6 % 4 = 2'),
    ("odd", "split", '"odd" is a module; style "split" is for parameters'),
    ("odd.weight", "column", '"odd.weight" is a parameter, whose style is "split"'),
    (
        "odd.bias",
        "split",
        '"odd", a Linear: axis 0 of its bias, (6,), is not divisible by the 4 ranks along tp',
    ),
    ("odd.bias", {"style": "split", "axis": "rows"}, "axis is 'rows'; it must be an integer of 0 or more"),
    (
        "odd.bias",
        {"style": "split", "set": {"a": 1}},
        "style \"split\" has no option 'set'; its options are style, axis",
    ),
    ("odd.bias", {"style": "split", "axis": 1}, "axis 1 of its bias, (6,), is not divisible"),
    ("layers.*.attn.q", "column:3", "its 16 outputs are not 3 equal parts"),
    ("layers.*.attn.q", {"style": "column", "parts": [8, 4]}, "its 16 outputs are not 8 + 4"),
    ("layers.*.attn.q", {"style": "column", "parts": [10, 6]}, "not divisible by tp: 2 % 4 = 2"),
    (
        "layers.*.attn.q",
        {"style": "column", "part": 2},
        "has no option 'part'; its options are style, parts, output, sequence, heads, set",
    ),
    (
        "layers.*.attn.q",
        {"style": "column", "output": "all"},
        'output is \'all\'; it must be "split" or "whole"',
    ),
    ("layers.*.attn.q", 3, "3 is neither a style"),
    ("layers.0.attn", {"set": {"haeds": "split"}}, "it has no attribute 'haeds' to set"),
    ("layers.0.attn", {"set": {"heads": "split"}}, "heads = 6 is not divisible by tp: 6 % 4 = 2"),
    ("layers.0.attn", {"set": {"name": "split"}}, "name = 'a' is not an integer"),
    ("layers.0.attn.q", {"style": "row"}, 'is matched by "layers.*.attn.[qkv]" and by "layers.0.attn.q"'),
    ("layers.0", "heads", 'has style "heads", but "layers.0.attn.q" inside it has another style'),
    ("head", "row", '"embed.weight" and "head.weight" are one parameter and would be split differently'),
    ("odd", "vocab", '"odd", a Linear: its 6 rows leave none for the last of 4 ranks along tp'),
    (
        "odd",
        {"style": "column", "heads": 3},
        "its 6 outputs are those of 3 heads, which 4 ranks cannot share",
    ),
    ("odd", {"style": "column", "heads": 2, "parts": 2}, "heads is 2; it must be the number of heads"),
    ("capped", "vocab", "an embedding with max_norm cannot be split"),
]


def wrong(mesh: Mesh, module: nn.Module) -> None:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for pattern, entry, text in WRONG:
        plan = plan_of("separate")
        # These would match the same parts.
        plan.pop("**.norm*")
        if pattern == "layers.*.attn.q":
            plan.pop("layers.*.attn.[qkv]")
        plan[pattern] = entry
        with pytest.raises(ConfigError) as caught:
            tensor_parallel(module, mesh, "tp", plan)
        assert text in str(caught.value), f"{pattern}, {entry}: {caught.value}"
    with pytest.raises(ConfigError) as caught:
        tensor_parallel(module, mesh, "tp", {"norm": "row", "nrm": "row"})
    assert str(caught.value).startswith('the plan to split a Small along "tp" has 2 problems\n')
    with pytest.raises(ConfigError, match="these have none: odd, ten, capped"):
        tensor_parallel(module, mesh, "tp", plan_of("separate"), sequence_parallel=True)
    # A refused plan does not change the module.
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert type(module) is Small and type(module.norm) is nn.LayerNorm


def test_plans_that_do_not_fit_are_refused_with_everything_that_is_wrong() -> None:
    module: Any = module_of("separate")
    module.odd, module.ten = nn.Linear(6, 6), nn.Embedding(10, 4)
    module.capped = nn.Embedding(8, 4, max_norm=1.0)
    module.layers[0].attn.heads, module.layers[0].attn.name = 6, "a"
    meshcomm.simulate(wrong, dims={"tp": 4}, args=(module,))

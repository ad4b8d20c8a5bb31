"""Training in the types that people train in: close to one process, and of the type that was asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.config import load_config
from meshcomm.testing import Pool
from meshcomm.train.parity import record, reference
from tests.train.parity_cases import PAIRS

# Every part, every kind of boundary: gathered weights, activations whole and along the sequence, those between stages,
# keys and values, heads, rows of experts.
NARROW = ("shard2 tp2", "shard2 cp2 ulysses", "pp2 ep2", "pp2 tp2 sequence recompute", "pp2 cp2")

Found = tuple[tuple[float, ...], tuple[float, ...], set[torch.dtype]]


def trained(case: dict[str, Any], alone: bool) -> Found:
    """Losses and norms of two steps, and the types that matrix products had."""
    torch.set_num_threads(1)
    config = load_config(case)
    if alone:
        config = reference(config)
    seen: set[torch.dtype] = set()
    linear = torch.nn.functional.linear

    def watched(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        y: torch.Tensor = linear(x, *rest)
        seen.add(y.dtype)
        return y

    with pytest.MonkeyPatch.context() as patch, meshcomm.init(config) as mesh:
        patch.setattr(torch.nn.functional, "linear", watched)
        found = record(mesh, config, 2)
    return found.losses, found.norms, seen


@pytest.mark.parametrize(
    ("mesh", "compute", "tolerance"),
    [
        pytest.param("shard2 tp2", None, 1e-5, marks=pytest.mark.parity),
        *(
            pytest.param(name, "bfloat16", 2e-2, marks=[pytest.mark.parity] * (name in NARROW[:2]))
            for name in NARROW
        ),
    ],
)
def test_narrow_types_stay_close(pool: Pool, mesh: str, compute: str | None, tolerance: float) -> None:
    exact, case = PAIRS[mesh], copy.deepcopy(PAIRS[mesh])
    case["train"] |= {"dtype": "float32"} | ({} if compute is None else {"compute_dtype": compute})
    losses, norms, types = pool.run(trained, case, True, ranks=1)[0]
    wanted, wanted_norms, _ = pool.run(trained, exact, True, ranks=1)[0]
    # Routers stay in float32.
    assert types <= {torch.float32, getattr(torch, compute or "float32")}
    assert getattr(torch, compute or "float32") in types
    assert losses == pytest.approx(wanted, rel=tolerance)
    results = pool.run(trained, case, False, ranks=4)
    # A stage may have no router.
    assert set().union(*(found_types for _, _, found_types in results)) == types
    for found_losses, found_norms, _ in results:
        assert found_losses == pytest.approx(losses, rel=tolerance)
        assert found_norms == pytest.approx(norms, rel=tolerance)
        assert found_norms == pytest.approx(wanted_norms, rel=10 * tolerance)

"""Training in the usual dtypes is close to one process, and computes in the requested dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.parallel.tensor import ColumnParallel, RowParallel
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.train.parity import record, reference
from tests.sizes import model_of, train_of
from tests.train.parity_cases import PAIRS

pytestmark = pytest.mark.long

# Every part, and every kind of boundary: gathered weights, activations (whole, along the sequence, and between stages),
# keys and values, heads, rows of experts.
NARROW = ("shard2 tp2", "shard2 cp2 ulysses", "pp2 ep2", "pp2 tp2 sequence recompute", "pp2 cp2")

Found = tuple[tuple[float, ...], tuple[float, ...], set[torch.dtype]]


def trained(case: dict[str, Any], alone: bool) -> Found:
    """Losses and norms of two steps, and the dtypes of the matrix products."""
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
        for layer in (ColumnParallel, RowParallel):
            patch.setattr(layer, "meshcomm_product", staticmethod(watched))
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
        ("pp2 ep2", "float16", 3e-3),
        pytest.param("shard2 cp2 ulysses", "float16", 3e-3, marks=pytest.mark.parity),
    ],
)
@pytest.mark.deep_cases(r"\[(pp2 tp2 sequence recompute|True-1f1b|False-zero_bubble)")
def test_narrow_types_stay_close(pool: Pool, mesh: str, compute: str | None, tolerance: float) -> None:
    exact = copy.deepcopy(PAIRS[mesh])
    if compute == "float16" and exact["model"].get("experts"):
        # So large that the norm shows whether the gradients of the balance loss have the same scale.
        exact["model"]["balance_loss"] = 5.0
    case = copy.deepcopy(exact)
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


class _Casts(TorchDispatchMode):
    """Counts the weights that are cast to bfloat16."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.counts = dict.fromkeys((weight.data_ptr() for weight in weights), 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            place = args[0].data_ptr()
            self.counts |= {place: self.counts[place] + 1} if place in self.counts else {}
        return made


def casts(case: dict[str, Any]) -> tuple[set[int], list[float]]:
    """How often each matrix was cast in the second step, and the losses of four steps."""
    torch.set_num_threads(1)
    config = load_config(case)
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        tokens = torch.randint(256, (4, 8, 9), generator=torch.Generator().manual_seed(2))
        counter = _Casts(weight for weight in trainer.modules.parameters() if weight.ndim == 2)
        for number, each in enumerate(tokens):
            with counter if number == 1 else nullcontext():
                trainer.step(each[:, :-1], each[:, 1:])
        return set(counter.counts.values()), [done.loss for done in trainer.results()]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.deep_cases(r"\[(pp2 tp2 sequence recompute|True-1f1b|False-zero_bubble)")
def test_a_weight_is_cast_once_in_a_step(pool: Pool, schedule: str, recompute: bool) -> None:
    if recompute and schedule == "zero_bubble":
        pytest.skip("refused")
    case = {
        "mesh": {"dims": {"pp": 2}, "device": "cpu", "timeout_s": 60.0},
        "parallel": {"pipeline": "pp", "options": {"schedule": schedule}},
        "model": model_of(4, 32, 4, 2, 64),
        "data": {"seq_len": 8},
        "train": train_of(4, 8, 1, seed=7, compute_dtype="bfloat16", activation_checkpointing=recompute),
    }
    if schedule == "zero_bubble":
        case["parallel"]["options"]["stages_per_rank"] = 2
    found = pool.run(casts, case, ranks=2)
    # Each matrix is cast once for eight microbatches. Rows of the embedding are looked up without a cast.
    assert [counts for counts, _ in found] == [{0, 1}, {1}]
    case["mesh"]["dims"], case["parallel"] = {"one": 1}, {}
    ((_, losses),) = pool.run(casts, case, ranks=1)
    assert found[0][1] == pytest.approx(losses, rel=2e-3)


# -- classes ---------------------------------------------------------------------------------------

# In uint8, -100 is 156.
CLASSES = torch.tensor([156, 1, 2, 3, 156, 5, 100, 7])


def with_labels(config: Config, kinds: list[torch.dtype]) -> list[list[float]]:
    """The loss of a step and of an evaluation after it, for each dtype of the classes."""
    with meshcomm.init(config) as mesh:
        found = []
        for kind in kinds:
            torch.manual_seed(0)
            trainer = Trainer(mesh, config, torch.nn.Linear(4, 200))
            x, y = torch.arange(32.0).reshape(8, 4) / 32, CLASSES.to(kind)
            mine = [each.chunk(mesh.size("dp"))[mesh.coord("dp")] for each in (x, y)]
            trainer.step(*mine)
            found.append([trainer.results()[0].loss, trainer.evaluate([tuple(mine)])])
        return found


def test_classes_may_be_any_integers(pool: Pool) -> None:
    settings = train_of(3, 8, 2, lr=0.5, optimizer="sgd", dtype="float64", clip_norm=1e9)
    case = {"mesh": {"dims": {"dp": 2}, "device": "cpu"}, "parallel": {"data": "dp"}, "train": settings}
    torch.manual_seed(0)
    module, x = torch.nn.Linear(4, 200).double(), torch.arange(32.0).reshape(8, 4).double() / 32
    wanted = torch.nn.functional.cross_entropy(module(x), CLASSES)
    kinds = [torch.uint8, torch.int16, torch.int32, torch.uint16]
    for found in pool.run(with_labels, load_config(case), kinds, ranks=2):
        assert all(each == found[0] for each in found)
        assert found[0][0] == pytest.approx(wanted.item(), rel=1e-12)
        assert found[0][1] < found[0][0]

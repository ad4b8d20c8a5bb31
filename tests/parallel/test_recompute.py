"""Activation checkpointing: the same numbers, fewer tensors kept, and no call on a group twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import UnsupportedOp
from meshcomm.models import ModelSpec, StageContext
from meshcomm.parallel.tensor import local
from meshcomm.predict.estimate import Sizes, layer_activations, workload
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.models import own
from tests.models.families import config_of, differences

pytestmark = pytest.mark.long

OWN = {"build": "tests.models.own:spec", "args": {"width": 32}}
BUILT_IN: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 48,
    "dropout": 0.1,
}
EXPERTS: dict[str, Any] = {**BUILT_IN, "experts": 4, "experts_every": 2, "balance_loss": 0.02}


SPREAD: dict[str, Any] = {"views": {"expert": {"edp": 2, "ep": 2}}, "expert": "ep"}
SELECTIVE: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (BUILT_IN, "fsdp=2 tp=2", {"sequence_parallel": True}),
    (BUILT_IN, "pp=2 tp=2", {"schedule": "zero_bubble", "stages_per_rank": 2}),
    (BUILT_IN, "pp=2 cp=2", {"schedule": "gpipe"}),
    (OWN, "pp=2 tp=2", {"schedule": "1f1b", "sequence_parallel": True}),
    (OWN, "fsdp=2 cp=2", {"attention": "ulysses"}),
    (EXPERTS, "dp=2 cp=2", SPREAD),
    ({**EXPERTS, "capacity_factor": 1.0}, "dp=2 cp=2", SPREAD),
]


@pytest.mark.parametrize(
    ("model", "dims", "recompute", "more"),
    [
        (BUILT_IN, "pp=2 dp=2", 2, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
        pytest.param(OWN, "dp=2 fsdp=2", 3, {}, marks=pytest.mark.parity),
        *(
            pytest.param(model, dims, "selective", more, marks=pytest.mark.parity)
            for model, dims, more in SELECTIVE
        ),
    ],
    ids=str,
)
def test_what_is_computed_again_is_the_same(
    pool: Pool, model: dict[str, Any], dims: str, recompute: Any, more: dict[str, Any]
) -> None:
    config = config_of(model, dims, train={"activation_checkpointing": recompute}, **more)
    assert max(each.relative for each in differences(pool, config)) < 1e-9


class Watched(TorchDispatchMode):
    """Counts the bytes that operators allocated and that are still referenced, and the matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        found = func(*args, **(kwargs or {}))
        self.products += func.name() in ("aten::mm", "aten::addmm", "aten::bmm")
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor):
                memory = each.untyped_storage()
                self._made[StorageWeakRef(memory)] = memory.nbytes()
        return found

    def held(self, but: Iterable[Tensor]) -> int:
        """The bytes held, without the memory of the tensors in `but`."""
        for each in but:
            self._made.pop(StorageWeakRef(each.untyped_storage()), None)
        return sum(nbytes for memory, nbytes in self._made.items() if not memory.expired())


class Found(NamedTuple):
    """Measurements of one step on one process."""

    kept: int
    products: int
    forwards: list[int]
    gradients: list[Tensor]


def found(config: Config) -> Found:
    """The bytes held between a microbatch's forward and backward pass, the matmuls, the passes of each block, and the gradients."""
    with meshcomm.init(config) as mesh:
        engine = Trainer(mesh, config).engine
        run: Any = engine._run
        loss, watched = run._loss, Watched()
        kept, before = [], [0]
        there = [*engine.modules.parameters(), *engine.modules.buffers()]

        def looked(logits: Tensor, targets: Tensor) -> Any:
            kept.append(watched.held([*there, logits]) - before[0])
            return loss(logits, targets)

        engine.modules[0].register_forward_pre_hook(lambda *_: before.insert(0, watched.held(there)))

        run._loss = looked
        blocks = [each for each in engine.modules.modules() if type(each).__name__ == "Block"]
        passes = dict.fromkeys(blocks, 0)
        for block in blocks:
            block.register_forward_pre_hook(lambda block, _: passes.update({block: passes[block] + 1}))
        tokens = torch.arange(2 * 32).view(2, 32)
        with watched:
            engine.step(tokens, tokens, 0.0, 1)
        gradients = [each.grad.clone() for _, each in engine.named_parameters() if each.grad is not None]
        return Found(kept[0], watched.products, list(passes.values()), gradients)


@pytest.mark.parametrize("model", [{**BUILT_IN, "dropout": 0.0}, OWN], ids=["built in", "of a user"])
def test_less_is_kept_and_as_much_is_computed_as_was_asked_for(pool: Pool, model: dict[str, Any]) -> None:
    def config(recompute: Any) -> Config:
        return config_of(
            model,
            "dp=1",
            train={"activation_checkpointing": recompute, "global_batch_size": 2, "micro_batch_size": 2},
        )

    settings = [False, True, 2, "selective"]
    nothing, every, second, selective = (pool.run(found, config(each), ranks=1)[0] for each in settings)
    assert every.kept < selective.kept < nothing.kept
    assert every.kept < second.kept < nothing.kept
    assert nothing.forwards == [1, 1, 1, 1]
    assert every.forwards == selective.forwards == [2, 2, 2, 2]
    assert second.forwards == [1, 2, 1, 2]
    # Selective checkpointing never runs a matmul twice. Full checkpointing reruns all of a block's but the last, whose result is unused.
    assert selective.products == nothing.products
    again = every.products - nothing.products
    assert again > 0 and second.products - nothing.products == again / 2
    for other in (every, second, selective):
        assert all(torch.equal(a, b) for a, b in zip(other.gradients, nothing.gradients, strict=True))
    if "hidden_size" in model:
        # Close to the estimate that `tune` makes for a layer, times the number of layers.
        entry, kept, _ = layer_activations(workload(config("selective")), Sizes())
        assert selective.kept - every.kept == pytest.approx(4 * (kept - entry), rel=0.1)


def compiled(config: Config) -> tuple[list[float], int]:
    """The losses of two steps with compiled blocks, and the bytes that the second step's forward passes saved for backward."""
    torch.set_num_threads(1)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        tokens = torch.arange(2 * 2 * 32).view(2, 2, 32) % 251
        trainer.step(tokens[0], tokens[1])
        held = (local(each.detach()) for each in trainer.modules.parameters())
        weights = {each.untyped_storage().data_ptr() for each in held}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            trainer.step(tokens[1], tokens[0])
        losses = [done.loss for done in trainer.results()]
        return losses, sum(nbytes for place, nbytes in kept.items() if place not in weights)


@pytest.mark.parity
@pytest.mark.parametrize(("dims", "more"), [("dp=1", {}), ("tp=2", {"sequence_parallel": True})])
@pytest.mark.parametrize("model", [{**BUILT_IN, "dropout": 0.0}, OWN], ids=["built in", "of a user"])
def test_a_compiled_block_keeps_as_much_as_one_that_is_not(
    pool: Pool, model: dict[str, Any], dims: str, more: dict[str, Any]
) -> None:
    found = {}
    for recompute in (False, True, "selective"):
        train = {"activation_checkpointing": recompute, "global_batch_size": 2, "micro_batch_size": 2}
        config = config_of(model, dims, train={**train, "compile": True}, **more)
        ranks = 2 if dims == "tp=2" else 1
        found[recompute] = pool.run(compiled, config, ranks=ranks, timeout_s=300.0)[0]
    losses, nothing = found[False]
    for each, _ in found.values():
        assert each == pytest.approx(losses, rel=1e-12)
    assert found[True][1] < found["selective"][1] < nothing


def test_through_is_for_blocks(pool: Pool) -> None:
    config = config_of({"build": "tests.parallel.test_recompute:through_a_norm"}, "dp=1")
    (told,) = pool.run(_refused, config, ranks=1)
    assert "not a block of the model" in told and "a LayerNorm" in told


def through_a_norm() -> ModelSpec:
    """A spec whose forward calls `through` on a module that is not a block."""

    def forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
        x = here.through(module.norm, module.tokens(x))
        out: Tensor = module.logits(x)
        return out

    return replace(own.spec(), forward=forward)


def _refused(config: Config) -> str:
    with meshcomm.init(config) as mesh, pytest.raises(UnsupportedOp) as caught:
        Trainer(mesh, config).step(torch.zeros(8, 32).long(), torch.zeros(8, 32).long())
    return str(caught.value)

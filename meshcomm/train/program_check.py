"""Compare a trainer's program with plain torch before its first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, on_all_ranks
from meshcomm.models.assumptions import check_named
from meshcomm.models.spec_model import SpecModel
from meshcomm.models.step_check import StepCheck, needs_batch
from meshcomm.models.wrapped import WrappedModule
from meshcomm.parallel.batch import Batch
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.model import Model
from meshcomm.parallel.optimizer import MakeOptimizer
from meshcomm.parallel.shard import Sharded
from meshcomm.parallel.splits import Sections

Named: TypeAlias = Mapping[str, Tensor]
Read: TypeAlias = Callable[[Named], tuple[Any, ...]]


@final
class ProgramCheck:
    """The check of one program. Every rank has one; the first rank compares a small copy of the program with plain torch.

    Called by: every rank, like all methods. All ranks raise if results differ.
    """

    def __init__(self, mesh: Mesh, known: Sections, model: Model, optimizer: MakeOptimizer | None) -> None:
        self._mesh, self._model = mesh, model
        sizes = {**mesh.layout.dims, **{name: mesh.size(name) for name in mesh.layout.names}}
        self._check = StepCheck(model, known, sizes, optimizer) if is_first(mesh) else None
        if isinstance(model, SpecModel):
            # Without a batch, as far as that is possible.
            before = self._check.before_building if self._check else lambda: None
            on_all_ranks(mesh, "check the model", before)

    @property
    def why(self) -> str:
        """What is not compared; "" on other ranks than the first. See `Trainer.not_checked`."""
        return "" if self._check is None else self._check.why

    def follow(self, engine: Engine, done: Callable[[], None]) -> None:
        """Check the first batches of an engine. done: called once it is known what is not compared."""
        model = self._model
        if isinstance(model, WrappedModule):
            engine.look_named = partial(self._with_module, model, engine)
        elif isinstance(model, SpecModel) and not model.family:
            engine.look_named = lambda batch, read: self._on_first(
                "check the first batch", lambda check: check.before_first_dictionary(batch, read)
            )
        if not needs_batch(model):
            done()
            return

        def look(batch: Batch) -> None:
            inputs, targets, _ = batch
            self._on_first("check the first step", lambda check: check.before_first_step(inputs, targets))
            done()

        engine.look = look

    def _on_first(self, what: str, compare: Callable[[StepCheck], None]) -> None:
        def action() -> None:
            if self._check is not None:
                with self._mesh.debug.without_calls():
                    compare(self._check)

        on_all_ranks(self._mesh, what, action)

    def _with_module(self, model: WrappedModule, engine: Engine, batch: Named, read: Read) -> None:
        """Check a module that is trained on a dictionary, on every rank, because weights may be sharded."""
        module, train = engine.modules[0], engine.sections.train
        failures: list[Exception] = []
        # If logits are split, only training gathers them.
        compares = model.own_loss is None and engine.split.size == 1
        dtype = getattr(torch, train.compute_dtype or train.dtype)
        try:
            check_named(module, model.call(module), batch, read, compares=compares, dtype=dtype)
        except Exception as error:
            failures.append(error)
        for gradients in engine.gradients:
            if isinstance(gradients, Sharded):
                gradients.reshard()

        def judge() -> None:
            for failure in failures:
                raise failure

        on_all_ranks(self._mesh, "check the first batch", judge)

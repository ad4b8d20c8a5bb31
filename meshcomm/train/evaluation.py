"""The evaluations that train.eval_every requests: the loss on the validation data, and the results of a user's function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, final

from meshcomm.config import TrainConfig
from meshcomm.errors import ConfigError, MeshcommError, TrainingError
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.all_ranks import of_every_rank, on_all_ranks, ranks_of
from meshcomm.models.build import function_of
from meshcomm.parallel.compose import Engine
from meshcomm.train.callbacks import Evaluation
from meshcomm.train.data import Batches, Corpus, batches_of, takes_one

# Ranks may add up the same numbers in another order.
_ROOM: Final = 1e-4
# The number of different results that an error lists.
_SHOWN: Final = 8


def evaluate_of(train: TrainConfig) -> Callable[[Any], Any] | None:
    """Return the function that train.evaluate names, or None if it is not set.

    Raises ConfigError if the import fails, or if the function does not take one argument.
    """
    if train.evaluate is None:
        return None
    try:
        function = function_of(train.evaluate)
    except Exception as error:
        raise ConfigError(
            f"train.evaluate could not be imported: {type(error).__name__}: {error}",
            given=f"evaluate = {train.evaluate!r}",
            expected="module:function, which every rank can import",
            hint="put its module into the folder where meshcomm is started, or into a folder in PYTHONPATH",
        ) from error
    if not takes_one(function):
        raise ConfigError(
            "train.evaluate takes no trainer",
            given=f"evaluate = {train.evaluate!r}, which cannot be called with one argument",
            expected="a function of the trainer",
            hint="def evaluate(trainer): return trainer.evaluate(batches)",
        )
    return function


@final
class Evaluator:
    """The evaluations of one run. Raises TrainingError if there is too little data to evaluate.

    corpus: the data in [data]; None if the program provides the data. function: calls train.evaluate with the trainer.
    """

    def __init__(self, engine: Engine, corpus: Corpus | None, function: Callable[[], Any] | None) -> None:
        train = engine.sections.train
        validation = None if corpus is None else corpus.validation
        samples = 0 if validation is None else validation.samples
        whole = samples // train.global_batch_size
        if train.eval_every and not whole and (function is None or samples):
            raise TrainingError(
                "there is too little to evaluate",
                given=f"{samples} samples for validation, train.global_batch_size = {train.global_batch_size}",
                expected="one global batch or more",
                hint="use a larger data.validation, more validation files, or a smaller train.global_batch_size",
            )
        self._engine, self._function, self._train = engine, function, train
        self._held: Batches | None = None if validation is None else batches_of(engine, validation)
        self._batches = min(whole, train.eval_batches or whole)

    def after(self, step: int, tokens_per_step: int) -> Evaluation:
        """Evaluate the weights after a step.

        Called by: every rank.
        Raises:    TrainingError on every rank if the function returns no numbers on one rank, or other numbers than on the first.
        """
        began = time.perf_counter()
        with self._engine.averaged() if self._train.evaluate_ema else nullcontext():
            metrics = self._measured()
        loss = metrics.pop("loss")
        tokens = self._batches * tokens_per_step
        return Evaluation(step, loss, tokens, time.perf_counter() - began, metrics)

    def _measured(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._held is not None and self._batches:
            metrics["loss"] = self._engine.evaluate(self._held.in_order(self._train.eval_batches))
        if self._function is not None:
            metrics |= self._agreed(self._function())
        return metrics

    def _agreed(self, returned: Any) -> dict[str, float]:
        """Return the numbers of the first rank, which every rank then decides by. Those of other ranks may differ by rounding."""
        mesh = self._engine.mesh
        numbers = on_all_ranks(mesh, "evaluate", partial(self._numbers, returned))
        if mesh.is_fake:
            return numbers
        every = dict(sorted(zip(ranks_of(mesh), of_every_rank(mesh, numbers), strict=True)))
        first: dict[str, float] = next(iter(every.values()))
        if not all(_alike(of_rank, first) for of_rank in every.values()):
            shown: dict[str, list[int]] = {}
            for rank, of_rank in every.items():
                same = first if _alike(of_rank, first) else of_rank
                shown.setdefault(", ".join(f"{name} {same[name]:.10g}" for name in same), []).append(rank)
            lines = [f"{ranks_text(ranks)}: {text or 'nothing'}" for text, ranks in shown.items()]
            more = [f"and {len(lines) - _SHOWN} other results"] if len(lines) > _SHOWN else []
            raise TrainingError(
                "train.evaluate returns different numbers on the ranks",
                given="\n".join([f"{self._train.evaluate}:", *lines[:_SHOWN], *more]),
                expected="the same numbers on every rank, up to rounding: the run stops or keeps a checkpoint by them",
                hint="trainer.evaluate(batches) returns the mean over all ranks. Add up a sum and a count of each rank with "
                "mesh.all_reduce along data and shard, or send one rank's result with mesh.objects.broadcast",
            )
        return first

    def _numbers(self, returned: Any) -> dict[str, float]:
        returned_numbers = returned if isinstance(returned, Mapping) else {"loss": returned}
        try:
            numbers = {name: float(value) for name, value in returned_numbers.items()}
        except (TypeError, ValueError) as error:
            raise self._wrong(f"{returned!r:.80}") from error
        if not all(isinstance(name, str) and name.isidentifier() for name in numbers):
            raise self._wrong(f"names {', '.join(map(repr, numbers))}")
        if "loss" not in numbers and self._held is None:
            raise self._wrong(f"{', '.join(numbers) or 'nothing'}, without a validation part")
        return numbers

    def _wrong(self, given: str) -> MeshcommError:
        return TrainingError(
            "train.evaluate returns no numbers",
            given=f"{self._train.evaluate}: {given}",
            expected="the validation loss as a number; or a dictionary of named numbers, which includes loss if "
            "the data have no validation part",
            hint='return {"loss": loss, "accuracy": accuracy}',
        )


def _alike(numbers: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Return whether two ranks have the same numbers, up to rounding. All nan are alike."""
    return numbers.keys() == others.keys() and all(
        math.isclose(number, others[name], rel_tol=_ROOM, abs_tol=_ROOM / 100)
        or (math.isnan(number) and math.isnan(others[name]))
        for name, number in numbers.items()
    )

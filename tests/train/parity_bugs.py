"""Common mistakes in hybrid parallelism, planted into the ranks of a mesh: `with planted(name, config)`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from meshcomm.config import Config, ParallelConfig
from meshcomm.config.section import Table
from meshcomm.parallel import build, norm
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.data import GradientSync
from meshcomm.parallel.dropout import Drops
from meshcomm.parallel.loss import StepLoss
from meshcomm.parallel.norm import GradientNorm
from meshcomm.parallel.pipeline import Accumulate, TiedWeight
from meshcomm.parallel.tensor import TensorSplit, local

Patch = contextlib.AbstractContextManager[Any]


class Bug(NamedTuple):
    """A mistake, a case of parity_cases that shows it, the first value that differs there, and the dim to blame."""

    plant: Callable[[Config], Patch]
    case: str
    first: str
    dim: str


BUGS: dict[str, Bug] = {}


def bug(case: str, first: str, dim: str) -> Callable[[Callable[[Config], Patch]], None]:
    """Add the function to the table under its name."""

    def put(plant: Callable[[Config], Patch]) -> None:
        BUGS[plant.__name__] = Bug(plant, case, first, dim)

    return put


@bug("pp2 dp2 tp2", "loss of step 1", "tp")
def sum_after_split_inputs_missing(config: Config) -> Patch:
    return patch.object(TensorSplit, "leave", lambda self, x: x)


@bug("pp2 dp2 tp2", "gradient norm of step 1", "tp")
def replicated_parameters_counted_twice_along_tp(config: Config) -> Patch:
    right = norm._dims_of

    def wrong(mesh: Any, *args: Any) -> tuple[str, ...]:
        return right(mesh, *args) or (("tp",) if mesh.size("tp") > 1 else ())

    return patch.object(norm, "_dims_of", wrong)


@bug("cp2 dp2 tp2", "loss of step 1", "cp")
def loss_divided_by_a_ranks_own_tokens_under_cp(config: Config) -> Patch:
    right = StepLoss.start

    def wrong(self: Any, targets: Any, **more: Any) -> None:
        right(self, targets, **more)
        self._divisor = self._divisor / self._splits.context.size

    return patch.object(StepLoss, "start", wrong)


@bug("pp2 dp2 tp2", "loss of step 1", "pp")
def last_stage_begins_one_layer_late(config: Config) -> Patch:
    right = build.split_layers

    def wrong(*args: Any, **costs: Any) -> list[range]:
        found = right(*args, **costs)
        if len(found) > 1:
            found[-1] = range(found[-1].start + 1, found[-1].stop)
        return found

    return patch.object(build, "split_layers", wrong)


@bug("dp2 tp4", "loss of step 1", "dp")
def samples_numbered_from_zero_on_every_rank(config: Config) -> Patch:
    assert config.train is not None and config.parallel is not None
    right, own = Drops.at, config.train.global_batch_size // config.parallel.copies(config.mesh.dims)

    def wrong(seed: int, step: int, samples: Tensor, positions: Tensor) -> Drops:
        return right(seed, step, samples % own, positions)

    return patch.object(Drops, "at", staticmethod(wrong))


@bug("dp2 tp4 sequence", "gradient norm of step 1", "tp")
def norm_weights_of_own_tokens_only(config: Config) -> Patch:
    return patch.object(TensorSplit, "finish_gradients", lambda self, module: None)


@bug("ep4 edp2", "gradient norm of step 1", "ep")
def router_summed_like_an_expert(config: Config) -> Patch:
    right = build.separate

    def wrong(module: Any) -> Any:
        dense, experts = right(module)
        routers = {name: dense.pop(name) for name in list(dense) if "router" in name}
        return dense, {**experts, **routers}

    return patch.object(build, "separate", wrong)


@bug("ep4 edp2", "gradient norm of step 1", "ep")
def experts_summed_like_dense_weights(config: Config) -> Patch:
    right = ParallelConfig.expert_gradient_dims

    def wrong(self: ParallelConfig, views: Any) -> tuple[str, ...]:
        # Rules of the configuration call this too, with their own table of views.
        return right(self, views) if isinstance(views, Table) else self.gradient_dims

    return patch.object(ParallelConfig, "expert_gradient_dims", wrong)


@bug("pp2 dp4 tied", "gradient norm of step 1", "pp")
def tied_gradients_not_exchanged(config: Config) -> Patch:
    return patch.object(TiedWeight, "sum_gradients", lambda self: None)


@bug("pp2 dp2 tp2", "loss of step 3", "pp")
def clipped_by_the_ranks_own_norm(config: Config) -> Patch:
    def wrong(self: GradientNorm, max_norm: float, norm: Tensor) -> None:
        own = self.each.square().sum().sqrt()
        for held in self._held:
            assert held.parameter.grad is not None
            local(held.parameter.grad).mul_((max_norm / own).clamp(max=1.0))

    return patch.object(GradientNorm, "scale_", wrong)


@bug("cp2 dp2 tp2", "loss of step 1", "cp")
def rotary_positions_from_zero_on_every_rank(config: Config) -> Patch:
    def wrong(self: ContextSplit, sequence: int) -> Tensor:
        return torch.arange(sequence // self.size, device=self.mesh.device)

    return patch.object(ContextSplit, "positions", wrong)


@bug("dp2 tp4", "loss of step 1", "dp")
def last_microbatch_is_the_one_before(config: Config) -> Patch:
    assert config.train is not None
    right, size = Accumulate.__call__, config.train.micro_batch_size

    def wrong(self: Accumulate, inputs: Tensor, targets: Tensor, **more: Tensor) -> Tensor:
        inputs, targets = (torch.cat([x[:-size], x[-2 * size : -size]]) for x in (inputs, targets))
        return right(self, inputs, targets, **more)

    return patch.object(Accumulate, "__call__", wrong)


@bug("dp2 tp4", "gradient norm of step 1", "dp")
def gradients_not_summed_along_data(config: Config) -> Patch:
    def wrong(self: Any, end: int) -> None:
        self._sent = end

    return patch.object(GradientSync, "_send", wrong)


@contextlib.contextmanager
def planted(name: str, config: Config) -> Iterator[None]:
    """Plant a mistake in this process until the block ends. An empty name plants nothing."""
    with BUGS[name].plant(config) if name else contextlib.nullcontext():
        yield

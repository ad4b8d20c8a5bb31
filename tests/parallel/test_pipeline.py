"""Pipelines: every schedule against plain accumulation, and what can be known of it without a process.

float64 throughout: what is left of a difference is the order of additions, a few 1e-15, so 1e-12
leaves room and no real mistake fits into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import meshcomm
from meshcomm.config import MeshConfig
from meshcomm.config.parallel import PipelineSchedule
from meshcomm.errors import LayoutError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel import (
    Accumulate,
    ColumnParallel,
    Pipelined,
    RowParallel,
    TensorSplit,
    TiedWeight,
    assign,
    local,
)
from meshcomm.stages import Pass, orders, schedule_properties, stages_of_rank
from meshcomm.testing import Pool

SCHEDULES = cast(tuple[PipelineSchedule, ...], get_args(PipelineSchedule))
WIDTH, WORDS, MICROBATCHES = 6, 8, 4


def stages_each(schedule: PipelineSchedule) -> int:
    return 2 if schedule_properties(schedule).several_stages else 1


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None
    assert expected is not None
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-12, atol=1e-13)


# -- every schedule on processes --------------------------------------------------------------------


class Scale(torch.autograd.Function):
    """x * weight by one Function that needs both: its backward pass serves both halves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class Part(nn.Module):
    """x + row(tanh(column(x))) * scale + shift, split along tp where it has one; its output is a view."""

    def __init__(self, split: TensorSplit, index: int) -> None:
        super().__init__()
        self.split = split
        self.index = index
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=torch.float64) if index == 0 else None
        self.column = ColumnParallel(split, WIDTH, 4)
        self.row = RowParallel(split, 4, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))
        self.shift = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(100 * index + number)
            assign(parameter, torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        y = self.row(torch.tanh(self.column(self.split.enter(x))))
        scaled = cast(Tensor, cast(Any, Scale).apply(y, self.scale))
        return (x + scaled + self.shift).view(x.shape)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum").view(())


@contextmanager
def recorded() -> Iterator[list[Pass]]:
    """The passes that torch's stages run in this process."""
    ran: list[Pass] = []
    kept = {
        name: getattr(PipelineStage, name)
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    }

    def forward(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        ran.append(Pass("F", self.stage_index, chunk))
        return kept["forward_one_chunk"](self, chunk, *args, **kwargs)

    def backward(self: Any, chunk: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        if full_backward or not self.is_first:
            ran.append(Pass("B" if full_backward else "I", self.stage_index, chunk))
        return kept["backward_one_chunk"](self, chunk, *args, full_backward=full_backward, **kwargs)

    def weight(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        ran.append(Pass("B" if self.is_first else "W", self.stage_index, chunk))
        return kept["backward_weight_one_chunk"](self, chunk, *args, **kwargs)

    for name, method in zip(kept, (forward, backward, weight), strict=True):
        setattr(PipelineStage, name, method)
    try:
        yield ran
    finally:
        for name, method in kept.items():
            setattr(PipelineStage, name, method)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(WIDTH, (2, 2 * MICROBATCHES, 3), generator=generator)
    return words[0], words[1]


def one_schedule(mesh: Mesh, dim: str, tensor: str | None, schedule: PipelineSchedule) -> None:
    """Loss, gradients, order of passes, hooks and calls of one schedule."""
    ranks, coord, each = mesh.size(dim), mesh.coord(dim), stages_each(schedule)
    inputs, targets = batch()
    whole = nn.Sequential(*(Part(TensorSplit(mesh, None, torch.float64), n) for n in range(ranks * each)))
    expected = Accumulate(whole, loss_of, MICROBATCHES)(inputs, targets)

    mine = [Part(TensorSplit(mesh, tensor, torch.float64), n) for n in stages_of_rank(coord, ranks, each)]
    done: list[int] = []
    shape = (2, 3, WIDTH)
    run = Pipelined(
        mesh,
        dim,
        mine if each > 1 else mine[0],
        loss_of,
        microbatches=MICROBATCHES,
        schedule=schedule,
        shapes=((2, 3), shape, shape),
        dtype=torch.float64,
        on_stage_done=done.append,
    )
    parameters = [parameter for part in mine for parameter in part.parameters()]
    hooked = dict.fromkeys(range(len(parameters)), 0)

    def count(number: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            hooked[number] += 1

        return hook

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(count(number))
        parameter.grad = torch.zeros_like(parameter)
    attached = [parameter.grad for parameter in parameters]
    memory = [local(cast(Tensor, gradient)).data_ptr() for gradient in attached]

    for again in (1, 2):  # gradients of the second step are added
        with recorded() as ran:
            found = run(inputs, targets)
        assert ran == orders(schedule, ranks, each, MICROBATCHES)[coord]
        if coord == ranks - 1:
            close(found, expected)
        else:
            assert found is None
        for part in mine:
            reference = cast(Part, whole[part.index])
            for parameter, other in zip(part.parameters(), reference.parameters(), strict=True):
                wanted = cast(Tensor, other.grad) * again
                if tensor is not None and wanted.shape != local(cast(Tensor, parameter.grad)).shape:
                    axis = 0 if wanted.shape[0] != local(parameter).shape[0] else 1
                    wanted = wanted.chunk(mesh.size(tensor), axis)[mesh.coord(tensor)]
                close(local(cast(Tensor, parameter.grad)), wanted)
    # What GradientSync relies on.
    assert all(p.grad is gradient for p, gradient in zip(parameters, attached, strict=True))
    assert [local(cast(Tensor, p.grad)).data_ptr() for p in parameters] == memory
    counted = [hooked[number] for number in range(len(parameters))]
    if schedule_properties(schedule).hooks_fire:
        assert set(counted) == {2 * MICROBATCHES}
    else:
        of_first = len(list(mine[0].parameters())) if mine[0].index == 0 else 0
        assert counted == [2 * MICROBATCHES] * of_first + [0] * (len(parameters) - of_first)
    assert sorted(done[:each]) == list(range(each))
    assert done[each:] == done[:each]


def tied_weight(mesh: Mesh, dim: str) -> None:
    """Embedding and head are one weight, on the first and the last of four stages."""
    coord, last = mesh.coord(dim), mesh.size(dim) - 1
    inputs, targets = batch()
    split = TensorSplit(mesh, None, torch.float64)

    def part(index: int) -> nn.Module:
        made: nn.Module = Part(split, index)
        if index == last:
            made = nn.Sequential(made, nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.float64))
        return made

    whole = nn.Sequential(*(part(index) for index in range(last + 1)))
    shared = cast(Part, whole[0]).embed
    assert shared is not None
    cast(Any, whole[last])[1].weight = shared.weight
    expected = Accumulate(whole, loss_of, MICROBATCHES)(inputs, targets)

    mine = part(coord)
    weight: nn.Parameter | None = None
    if coord == 0:
        weight = cast(Any, mine).embed.weight
    elif coord == last:
        weight = cast(Any, mine)[1].weight
    tied = TiedWeight(mesh, dim, weight)
    tied.copy()
    shape = (2, 3, WIDTH)
    run = Pipelined(
        mesh,
        dim,
        mine,
        loss_of,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        shapes=((2, 3), shape, (2, 3, WORDS)),
        dtype=torch.float64,
    )
    found = run(inputs, targets)
    tied.sum_gradients()
    if coord == last:
        close(found, expected)
    if weight is not None:
        close(weight, shared.weight)
        close(weight.grad, shared.weight.grad)


def every_schedule() -> None:
    config = MeshConfig(dims={"pp": 2, "tp": 2}, merge={"line": ("pp", "tp")}, device="cpu", timeout_s=30.0)
    with meshcomm.init(config) as mesh:
        for schedule in SCHEDULES:
            one_schedule(mesh, "pp", "tp", schedule)
            one_schedule(mesh, "line", None, schedule)
        tied_weight(mesh, "line")


def test_every_schedule_gives_the_gradients_of_plain_accumulation(pool: Pool) -> None:
    pool.run(every_schedule, ranks=4)


# -- tied weights -----------------------------------------------------------------------------------


def tied_program(mesh: Mesh, middle: bool, gradients: bool) -> tuple[Tensor, Tensor, bool] | None:
    generator = torch.Generator().manual_seed(mesh.rank)
    coord = mesh.coord("pp")
    if coord not in (0, 3):
        weight = nn.Parameter(torch.zeros(1)) if middle else None
        tied = TiedWeight(mesh, "pp", weight)
        tied.copy()
        tied.sum_gradients()
        assert not tied.is_owner
        return None
    weight = nn.Parameter(torch.randn(5, 3, generator=generator))
    tied = TiedWeight(mesh, "pp", weight)
    tied.copy()
    if gradients or coord == 0:
        weight.grad = torch.randn(5, 3, generator=generator)
    tied.sum_gradients()
    assert weight.grad is not None
    return weight.detach(), weight.grad, tied.is_owner


def test_holders_of_a_tied_weight_have_equal_values_and_gradients_to_the_last_bit() -> None:
    # rank = pp * 2 + tp: each part of the split weight has its own two holders.
    ranks = meshcomm.simulate(tied_program, dims={"pp": 4, "tp": 2}, args=(False, True))
    for tp in range(2):
        first, last = ranks[tp], ranks[6 + tp]
        generators = [torch.Generator().manual_seed(rank) for rank in (tp, 6 + tp)]
        values = [torch.randn(5, 3, generator=generator) for generator in generators]
        sums = sum(torch.randn(5, 3, generator=generator) for generator in generators)
        assert torch.equal(first[0], values[0])
        assert torch.equal(last[0], values[0])
        assert torch.equal(first[1], cast(Tensor, sums))
        assert torch.equal(last[1], cast(Tensor, sums))
        assert (first[2], last[2]) == (True, False)
    assert ranks[2:6] == [None] * 4


def test_a_tied_weight_is_refused_on_ranks_between_and_without_a_gradient() -> None:
    with pytest.raises(meshcomm.MeshcommError) as caught:
        meshcomm.simulate(tied_program, dims={"pp": 4}, args=(True, True))
    assert isinstance(caught.value.__cause__, LayoutError)
    assert str(caught.value.__cause__) == (
        "coord 1 of 4 along pp does not hold the tied weight\n"
        "  given:    a weight of shape (1,)\n"
        "  expected: the embedding's on coord 0, the head's on the last, None on all others\n"
        "  try:      TiedWeight(mesh, dim, parameter if this rank has it else None)"
    )
    with pytest.raises(meshcomm.MeshcommError) as caught:
        meshcomm.simulate(tied_program, dims={"pp": 4}, args=(False, False))
    assert isinstance(caught.value.__cause__, TrainingError)
    assert str(caught.value.__cause__).startswith(
        "the tied weight got no gradient\n  given:    the head of shape (5, 3)\n"
    )


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "modules", "microbatches", "text"),
    [
        ("1f1b", 1, 3, "3 microbatches cannot fill a 1f1b pipeline of 4 stages"),
        ("interleaved_1f1b", 2, 3, "3 microbatches cannot fill a interleaved_1f1b pipeline of 4 ranks"),
        ("interleaved_1f1b", 2, 6, "interleaved_1f1b cannot divide 6 microbatches into equal rounds"),
        ("zero_bubble", 2, 11, "zero_bubble cannot divide 11 microbatches into equal rounds"),
        ("zero_bubble", 1, 8, "zero_bubble does not run 1 stage on each rank"),
        ("gpipe", 2, 8, "gpipe does not run 2 stages on each rank"),
    ],
)
def test_what_a_schedule_does_not_run_is_refused(
    schedule: PipelineSchedule, modules: int, microbatches: int, text: str
) -> None:
    def program(mesh: Mesh) -> str:
        with pytest.raises(LayoutError) as caught:
            Pipelined(
                mesh,
                "pp",
                [nn.Identity() for _ in range(modules)],
                lambda output, targets: output.sum(),
                microbatches=microbatches,
                schedule=schedule,
                shapes=((1,), (1,), (1,)),
                dtype=torch.float32,
            )
        return str(caught.value)

    for found in meshcomm.simulate(program, dims={"pp": 4}):
        assert found.startswith(text + "\n  given:"), found


def test_a_pipeline_of_one_rank_is_refused() -> None:
    def program(mesh: Mesh) -> None:
        with pytest.raises(LayoutError, match="a pipeline along pp has one rank"):
            Pipelined(
                mesh,
                "pp",
                nn.Identity(),
                lambda output, targets: output.sum(),
                microbatches=2,
                schedule="gpipe",
                shapes=((1,), (1,), (1,)),
                dtype=torch.float32,
            )

    meshcomm.simulate(program, dims={"pp": 1, "dp": 2})

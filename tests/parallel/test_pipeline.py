"""Pipelines: every schedule against plain gradient accumulation, tied weights, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast, get_args
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import meshcomm
from meshcomm.config import MeshConfig
from meshcomm.config.parallel import PipelineSchedule
from meshcomm.errors import LayoutError, ShapeError, TrainingError
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
from meshcomm.predict.passes import Pass, orders, schedule_properties
from meshcomm.predict.stages import stages_of_rank
from meshcomm.testing import Pool
from tests.parallel.same import close, randn

SCHEDULES = cast(tuple[PipelineSchedule, ...], get_args(PipelineSchedule))
WIDTH, WORDS, MICROBATCHES = 6, 8, 4


def stages_each(schedule: PipelineSchedule) -> int:
    return 2 if schedule_properties(schedule).several_stages else 1


# -- every schedule on processes --------------------------------------------------------------------


class Scale(torch.autograd.Function):
    """x * weight in one autograd Function that needs both: its backward serves the input half and the weight half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class Turned(torch.autograd.Function):
    """The identity, with a gradient that is not contiguous, as a convolution over the sequence returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.transpose(1, 2).contiguous().transpose(1, 2)


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
            assign(parameter, randn(*parameter.shape, seed=100 * index + number))

    def forward(self, x: Tensor) -> Tensor:
        x = cast(Tensor, cast(Any, Turned).apply(x)) if self.embed is None else self.embed(x)
        y = self.row(torch.tanh(self.column(self.split.enter(x))))
        scaled = cast(Tensor, cast(Any, Scale).apply(y, self.scale))
        return (x + scaled + self.shift).view(x.shape)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum").view(())


@contextmanager
def recorded() -> Iterator[list[Pass]]:
    """Record the passes that torch's stages run in this process."""
    ran: list[Pass] = []

    def noted(method: str, kind: Callable[[Any, bool], str]) -> Any:
        known = getattr(PipelineStage, method)

        def call(self: Any, chunk: int, *args: Any, **more: Any) -> Any:
            if what := kind(self, more.get("full_backward", True)):
                ran.append(Pass(cast(Any, what), self.stage_index, chunk))
            return known(self, chunk, *args, **more)

        return patch.object(PipelineStage, method, call)

    # Stage 0 has no input gradient: its backward pass computes only the weights' gradients.
    with (
        noted("forward_one_chunk", lambda stage, full: "F"),
        noted("backward_one_chunk", lambda stage, full: "B" if full else "" if stage.is_first else "I"),
        noted("backward_weight_one_chunk", lambda stage, full: "B" if stage.is_first else "W"),
    ):
        yield ran


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(WIDTH, (2, 2 * MICROBATCHES, 3), generator=generator)
    return words[0], words[1]


def one_schedule(mesh: Mesh, dim: str, tensor: str | None, schedule: PipelineSchedule) -> None:
    """Check the loss, the gradients, the order of passes, the hooks and the calls of one schedule."""
    ranks, coord, each = mesh.size(dim), mesh.coord(dim), stages_each(schedule)
    inputs, targets = batch()
    whole = nn.Sequential(*(Part(TensorSplit(mesh, None, torch.float64), n) for n in range(ranks * each)))
    expected = Accumulate(whole, loss_of, MICROBATCHES)(inputs, targets)

    mine = [Part(TensorSplit(mesh, tensor, torch.float64), n) for n in stages_of_rank(coord, ranks, each)]
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

    for again in (1, 2):  # the second step adds to the gradients
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
    # GradientSync relies on this.
    assert all(p.grad is gradient for p, gradient in zip(parameters, attached, strict=True))
    assert [local(cast(Tensor, p.grad)).data_ptr() for p in parameters] == memory
    counted = [hooked[number] for number in range(len(parameters))]
    if schedule_properties(schedule).hooks_fire:
        assert set(counted) == {2 * MICROBATCHES}
    else:
        of_first = len(list(mine[0].parameters())) if mine[0].index == 0 else 0
        assert counted == [2 * MICROBATCHES] * of_first + [0] * (len(parameters) - of_first)


def every_schedule() -> None:
    config = MeshConfig(dims={"pp": 2, "tp": 2}, merge={"line": ("pp", "tp")}, device="cpu", timeout_s=30.0)
    with meshcomm.init(config) as mesh:
        for schedule in SCHEDULES:
            one_schedule(mesh, "pp", "tp", schedule)
            one_schedule(mesh, "line", None, schedule)


def test_every_schedule_gives_the_gradients_of_plain_accumulation(pool: Pool) -> None:
    pool.run(every_schedule, ranks=4)


# -- tied weights -----------------------------------------------------------------------------------


def tied_program(mesh: Mesh, wrong: str) -> tuple[Tensor, Tensor, bool] | None:
    generator = torch.Generator().manual_seed(mesh.rank)
    coord = mesh.coord("pp")
    if coord not in (0, 3):
        tied = TiedWeight(mesh, "pp", nn.Parameter(torch.zeros(1)) if wrong == "between" else None)
        tied.copy()
        tied.sum_gradients()
        assert not tied.is_owner
        return None
    weight = nn.Parameter(torch.randn(5, 3, generator=generator))
    tied = TiedWeight(mesh, "pp", weight)
    tied.copy()
    if wrong != "no gradient" or coord == 0:
        weight.grad = torch.randn(5, 3, generator=generator)
    tied.sum_gradients()
    return weight.detach(), cast(Tensor, weight.grad), tied.is_owner


def test_holders_of_a_tied_weight_have_equal_values_and_gradients_to_the_last_bit() -> None:
    # rank = pp * 2 + tp: two ranks hold each part of the split weight.
    ranks = meshcomm.simulate(tied_program, dims={"pp": 4, "tp": 2}, args=("",))
    for tp in range(2):
        first, last = ranks[tp], ranks[6 + tp]
        generators = [torch.Generator().manual_seed(rank) for rank in (tp, 6 + tp)]
        values = [torch.randn(5, 3, generator=generator) for generator in generators]
        gradients = [torch.randn(5, 3, generator=generator) for generator in generators]
        for found, is_owner in ((first, True), (last, False)):
            assert torch.equal(found[0], values[0]) and found[2] == is_owner
            assert torch.equal(found[1], gradients[0] + gradients[1])
    assert ranks[2:6] == [None] * 4


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (
            "between",
            LayoutError,
            "coord 1 of 4 along pp does not hold the tied weight\n"
            "  given:    a weight of shape (1,)\n"
            "  expected: the embedding's weight on coord 0, the head's weight on the last coord, None on all others\n"
            "  try:      TiedWeight(mesh, dim, parameter if this rank has it else None)",
        ),
        (
            "no gradient",
            TrainingError,
            "the tied weight got no gradient\n  given:    the head of shape (5, 3)\n",
        ),
    ],
)
def test_a_tied_weight_is_refused_on_ranks_between_and_without_a_gradient(
    wrong: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(meshcomm.MeshcommError) as caught:
        meshcomm.simulate(tied_program, dims={"pp": 4}, args=(wrong,))
    assert isinstance(caught.value.__cause__, kind) and str(caught.value.__cause__).startswith(text)


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "modules", "microbatches", "texts"),
    [
        ("1f1b", 1, 3, ["3 microbatches cannot fill a 1f1b pipeline of 4 stages", "at least 4", '"gpipe"']),
        ("interleaved_1f1b", 2, 3, ["3 microbatches cannot fill a interleaved_1f1b pipeline of 4 ranks"]),
        ("interleaved_1f1b", 2, 6, ["divide 6 microbatches into equal rounds", "multiple of 4", "4 micro"]),
        ("zero_bubble", 2, 11, ["divide 11 microbatches into equal rounds", "multiple of 2", "8 micro"]),
        ("zero_bubble", 1, 8, ["zero_bubble does not run 1 stage on each rank"]),
        ("gpipe", 2, 8, ["gpipe does not run 2 stages on each rank"]),
        ("gpipe", 1, 2, ["a pipeline along one has one rank"]),
    ],
)
def test_what_a_schedule_does_not_run_is_refused(
    schedule: PipelineSchedule, modules: int, microbatches: int, texts: list[str]
) -> None:
    def program(mesh: Mesh) -> str:
        with pytest.raises(LayoutError) as caught:
            Pipelined(
                mesh,
                "one" if "one rank" in texts[0] else "pp",
                [nn.Identity() for _ in range(modules)],
                lambda output, targets: output.sum(),
                microbatches=microbatches,
                schedule=schedule,
                shapes=((1,), (1,), (1,)),
                dtype=torch.float32,
            )
        return str(caught.value)

    for found in meshcomm.simulate(program, dims={"pp": 4, "one": 1}):
        assert [text for text in texts if text not in found] == [], found


class Wall(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ShapeError("a wall", given="a tensor")


def failing_stage() -> None:
    # The other stage waits for gradients that never arrive, until the mesh's timeout.
    with meshcomm.init(MeshConfig(dims={"pp": 2}, device="cpu", timeout_s=2.0)) as mesh:
        last = mesh.coord("pp") == 1
        run = Pipelined(
            mesh,
            "pp",
            Wall() if last else nn.Embedding(5, 5),
            lambda logits, targets: logits.sum(),
            microbatches=2,
            schedule="1f1b",
            shapes=((1, 3), (1, 3, 5), (1, 3, 5)),
            dtype=torch.float32,
        )
        batch = torch.zeros(2, 3, dtype=torch.int64)
        # torch wraps an exception that a stage raises; the caller sees the original one.
        with pytest.raises(ShapeError if last else RuntimeError, match="^a wall" if last else "."):
            run(batch, batch)


def test_what_a_stage_raises_is_not_wrapped(pool: Pool) -> None:
    pool.run(failing_stage, ranks=2)

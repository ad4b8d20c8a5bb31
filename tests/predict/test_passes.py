"""The passes of pipeline schedules: orders against torch's, the timeline, and what ranks wait and keep."""

from __future__ import annotations

import types
from typing import Any, cast, get_args

import pytest
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from meshcomm.config.parallel import PipelineSchedule, runs
from meshcomm.predict.passes import (
    Costs,
    Pass,
    bubble,
    microbatches_held,
    orders,
    schedule_properties,
    timeline,
)

SCHEDULES = cast(tuple[PipelineSchedule, ...], get_args(PipelineSchedule))


TORCH: dict[PipelineSchedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


SIZES = [
    (schedule, ranks, each, microbatches)
    for schedule in SCHEDULES
    for ranks in (2, 3, 4, 8)
    for each in ((2, 3, 4) if schedule_properties(schedule).several_stages else (1,))
    for microbatches in (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 24)
    if runs(schedule, microbatches, ranks)
]


def torch_order(schedule: PipelineSchedule, ranks: int, each: int, microbatches: int) -> list[list[Pass]]:
    """The passes in torch's schedule for every rank, made without a process group."""
    stubs = [
        types.SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * each,
            stage_index=ranks * turn,
            submod=nn.Identity(),
        )
        for turn in range(each)
    ]
    made = TORCH[schedule](stubs if schedule_properties(schedule).several_stages else stubs[0], microbatches)
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found = []
    for rank in range(ranks):
        listed = [
            Pass(cast(Any, kinds[action.computation_type.name]), action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None and action.computation_type.name in kinds
        ]
        if schedule == "1f1b" and rank == ranks - 1 and listed[0].microbatch == 1:
            # torch 2.13 numbers the last rank's forward passes from 1 in this list, but from 0 when
            # it runs them: see test_pipeline.py.
            listed = [p._replace(microbatch=p.microbatch - 1) if p.kind == "F" else p for p in listed]
        if schedule == "zero_bubble":
            # Stage 0 sends no input gradients. torch does nothing at I there, and the whole backward at W.
            listed = [p._replace(kind="B") if p.kind == "W" and not p.stage else p for p in listed]
            listed = [p for p in listed if p.kind != "I" or p.stage]
        found.append(listed)
    return found


@pytest.mark.parametrize(("schedule"), SCHEDULES)
def test_orders_are_those_of_torch(schedule: PipelineSchedule) -> None:
    sizes = [size for size in SIZES if size[0] == schedule]
    assert len(sizes) > 12
    for size in sizes:
        assert orders(*size) == torch_order(*size), size


def tick_by_tick(lists: list[list[Pass]]) -> list[dict[Pass, int]]:
    """The start of each pass, simulated slot by slot: F takes 1, B 2, I and W 1."""
    stages = 1 + max(p.stage for order in lists for p in order)
    begun: list[dict[Pass, int]] = [{} for _ in lists]
    ended: dict[tuple[bool, int, int], int] = {}
    free = [0] * len(lists)
    for now in range(10_000):
        for rank, order in enumerate(lists):
            if len(begun[rank]) == len(order) or free[rank] > now:
                continue
            p = order[len(begun[rank])]
            forward = p.kind == "F"
            other = p.stage - 1 if forward else p.stage + 1
            if (
                p.kind != "W"
                and 0 <= other < stages
                and ended.get((forward, other, p.microbatch), now + 1) > now
            ):
                continue
            begun[rank][p] = now
            free[rank] = now + (2 if p.kind == "B" else 1)
            if p.kind != "W":
                ended[forward, p.stage, p.microbatch] = free[rank]
    return begun


def test_the_timeline_is_that_of_a_clock_and_has_every_pass_once() -> None:
    for schedule, ranks, each, microbatches in SIZES[::5]:
        lists = orders(schedule, ranks, each, microbatches)
        times = timeline(lists)
        found = [{slot.work: slot.start for slot in slots} for slots in times.ranks]
        assert found == tick_by_tick(lists)
        halves = schedule_properties(schedule).splits_backward
        expected = {
            Pass(cast(Any, kind), stage, microbatch)
            for stage in range(ranks * each)
            for microbatch in range(microbatches)
            for kind in ("FIW" if halves and stage else "FB")
        }
        assert {p for rank in found for p in rank} == expected
        assert sum(map(len, lists)) == len(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "number"), [(1, 4), (2, 8), (4, 8), (4, 16), (8, 16)])
def test_what_ranks_wait_and_keep_is_that_of_timelines(
    schedule: PipelineSchedule, ranks: int, number: int
) -> None:
    for each in (2, 4) if schedule_properties(schedule).several_stages and ranks > 1 else (1,):
        line = timeline(orders(schedule, ranks, each, number))
        # A micro-batch takes 3 slots for each of a rank's stages.
        idle = line.length / (3 * each) - number
        assert bubble(schedule, ranks, each) == pytest.approx(idle)
        assert line.bubble == pytest.approx(idle / (number + idle))
        # Without a pipeline, micro-batches run one after the other, forward and backward.
        most = max(line.held(rank) for rank in range(ranks)) / each if ranks > 1 else 1
        assert microbatches_held(schedule, ranks, each, number) == pytest.approx(most)


def test_what_a_rank_keeps_and_how_unequal_stages_stretch_the_step() -> None:
    times = timeline(orders("1f1b", 4, 1, 8))
    assert [times.held(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [timeline(orders("gpipe", 4, 1, 8)).held(rank) for rank in range(4)] == [8] * 4
    # Activations are kept until the end of the weights' pass, not the inputs' pass.
    late = timeline(orders("zero_bubble", 4, 2, 8))
    for rank, slots in enumerate(late.ranks):
        ends = {(slot.work.kind in "BW", slot.work.stage, slot.work.microbatch): slot.end for slot in slots}
        begun = [slot.start for slot in slots if slot.work.kind == "F"]
        alive = [
            sum(s <= now for s in begun) - sum(over and e <= now for (over, *_), e in ends.items())
            for now in begun
        ]
        assert late.held(rank) == max(alive)
    assert times.length == 3 * (8 + 3)
    # The last stage is twice as slow, so the others wait for it: one way in, 8 microbatches there, one way out.
    slow = timeline(orders("1f1b", 4, 1, 8), [*[Costs()] * 3, Costs(2, 2, 2)])
    assert slow.length == 3 * (2 * 8 + 3)
    assert timeline(orders("1f1b", 4, 1, 8), [Costs(2, 2, 2)] * 4).length == 2 * times.length

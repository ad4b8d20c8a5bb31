"""Pipeline stages without a process: the split, orders against torch's, the timeline and its picture."""

from __future__ import annotations

import itertools
import json
import random
import types
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from rich.console import Console
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from typer.testing import CliRunner

from meshcomm.commands import app
from meshcomm.config import load_config
from meshcomm.config.parallel import PipelineSchedule, runs
from meshcomm.errors import ConfigError, LayoutError
from meshcomm.predict.passes import (
    Costs,
    Pass,
    bubble,
    microbatches_held,
    orders,
    schedule_properties,
    timeline,
)
from meshcomm.predict.stages import model_stages, part_costs, split_layers, stages_of_rank
from meshcomm.show.schedule import ScheduleView, schedule_facts

ROOT = Path(__file__).parents[2]
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


# -- split ------------------------------------------------------------------------------------------


def all_splits(layers: int, stages: int) -> list[list[range]]:
    found = []
    for inner in itertools.combinations(range(1, layers), stages - 1):
        bounds = [0, *inner, layers]
        found.append([range(a, b) for a, b in itertools.pairwise(bounds)])
    return found


def test_no_split_has_a_cheaper_largest_stage_and_none_as_good_is_more_even() -> None:
    draw = random.Random(5)
    for _ in range(150):
        layers = draw.randint(1, 9)
        stages = draw.randint(1, layers)
        costs = [draw.choice([1.0, 1.0, 0.5, 2.25, 0.1]) for _ in range(layers)]
        first, last = draw.choice([0.0, 0.3, 3.0]), draw.choice([0.0, 0.7, 2.0])

        def of(parts: list[range], costs: list[float] = costs, ends: Any = (first, last)) -> list[float]:
            each = [sum(costs[layer] for layer in part) for part in parts]
            each[0] += ends[0]
            each[-1] += ends[1]
            return each

        found = split_layers(layers, stages, costs, first=first, last=last)
        assert [layer for part in found for layer in part] == list(range(layers))
        every = [of(parts) for parts in all_splits(layers, stages)]
        least = min(max(each) for each in every)
        assert max(of(found)) == pytest.approx(least)
        even = min(sum(c * c for c in each) for each in every if max(each) <= least + 1e-9)
        assert sum(c * c for c in of(found)) == pytest.approx(even)


@pytest.mark.parametrize(
    ("layers", "stages", "settings", "expected"),
    [
        (6, 4, {}, [1, 2, 2, 1]),
        (7, 4, {}, [2, 2, 2, 1]),
        (5, 4, {}, [1, 2, 1, 1]),
        (8, 2, {"last": 2.0}, [5, 3]),
        (8, 2, {"first": 2.0}, [3, 5]),
        (4, 2, {"last": 9.0}, [3, 1]),
        (4, 2, {"costs": [1, 1, 1, 3]}, [3, 1]),
        (4, 1, {"last": 9.0}, [4]),
        # 0.1 + 0.2 and 0.3 are different floats. Rounding must not lead to a worse split.
        (4, 2, {"costs": [0.1, 0.2, 0.3, 1e-17]}, [2, 2]),
        (3, 2, {"costs": [1.04, 1.0, 1.03]}, [1, 2]),
    ],
)
def test_ends_and_costs_move_the_split(
    layers: int, stages: int, settings: dict[str, Any], expected: list[int]
) -> None:
    assert [len(part) for part in split_layers(layers, stages, **settings)] == expected


@pytest.mark.parametrize(
    ("arguments", "settings", "text"),
    [
        ((3, 4), {}, "3 layers cannot fill 4 pipeline stages"),
        ((3, 0), {}, "3 layers cannot fill 0 pipeline stages"),
        ((3, 2), {"costs": [1, 2]}, "every layer has one cost"),
        ((2, 2), {"costs": [1, float("nan")]}, "stages cannot be balanced by this cost"),
        ((2, 2), {"last": -1.0}, "stages cannot be balanced by this cost"),
    ],
)
def test_a_wrong_split_is_refused(arguments: tuple[int, int], settings: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=f"^{text}"):
        split_layers(*arguments, **settings)


def test_a_model_is_split_by_what_its_parts_cost() -> None:
    model = load_config(ROOT / "configs/quickstart.toml", ["model.num_layers=8"]).model
    assert model is not None
    costs = part_costs(model, 128)
    assert costs.head == 128 * 256
    assert costs.layers == (2 * 128 * (128 + 64) + 2 * 128 * 128 + 3 * 128 * 384,) * 8
    parts = model_stages(model, 128, 3)
    assert [len(part) for part in parts] == [3, 3, 2]
    assert sum(costs.of_stages(parts)) == sum(costs.layers) + costs.head
    some = model.model_copy(update={"experts": 8, "experts_per_token": 2, "experts_every": 2})
    dense, experts = part_costs(some, 128).layers[:2]
    assert experts - dense == 3 * 128 * 384 + 128 * 8


def test_stage_s_lies_on_coord_s_mod_ranks() -> None:
    for ranks, each in ((2, 1), (4, 2), (3, 3)):
        found = {stage: coord for coord in range(ranks) for stage in stages_of_rank(coord, ranks, each)}
        assert found == {stage: stage % ranks for stage in range(ranks * each)}


# -- orders -----------------------------------------------------------------------------------------


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


# -- timeline ---------------------------------------------------------------------------------------


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


# -- picture ----------------------------------------------------------------------------------------


def facts(*overrides: str) -> dict[str, Any]:
    return schedule_facts(load_config(ROOT / "configs/quickstart.toml", overrides))


def drawn(what: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(ScheduleView(what))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_picture_of_1f1b() -> None:
    assert drawn(facts(), 80) == [
        "1f1b along pp: 2 ranks, 2 stages, 4 microbatches; 15 slots, bubble 20.0%",
        "slot  0              5              10",
        "pp=0  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -",
        "pp=1  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .",
        "F forward 1 slot, B backward 2; - continues, . waits; messages take no time",
        "kept at once, in microbatches of one stage, by rank: 2 1",
        "stage 0 on pp=0: embedding, layers 0 to 1; 48.3% of the work",
        "stage 1 on pp=1: layers 2 to 3, head; 51.7% of the work",
    ]


MANY = ("mesh.dims={ pp = 4, dp = 1, tp = 2 }", "model.num_layers=8", "parallel.options.stages_per_rank=2")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_picture_fits_its_width_and_holds_every_pass(width: int) -> None:
    what = facts(*MANY, "parallel.options.schedule='zero_bubble'", "train.global_batch_size=64")
    assert (what["ranks"], what["microbatches"]) == (4, 16)
    lines = drawn(what, width)
    assert max(map(len, lines)) <= width
    cell = 5
    rows: dict[str, str] = {f"pp={rank}": "" for rank in range(4)}
    missing: list[range] = []
    for line in lines:
        name, cells = line[:6].strip(), line[6:]
        if name in rows and set(line[:4]) != {" "}:
            columns = (width - 6) // cell
            rows[name] += cells.ljust(columns * cell)
        if line.startswith("slots "):
            words = line.split()
            missing.append(range(int(words[1]), int(words[3]) + 1))
            for row in rows:
                rows[row] += "?" * (cell * len(missing[-1]))
    assert bool(missing) == (width < 120)
    hidden = {slot for part in missing for slot in part}
    for rank, passes in enumerate(what["passes"]):
        row = rows[f"pp={rank}"]
        labels = [row[start : start + cell].strip() for start in range(0, len(row), cell)]
        expected = ["."] * what["slots"]
        for kind, stage, microbatch, start, end in passes:
            expected[start:end] = [f"{kind}{microbatch}{'ab'[stage // 4]}"] + ["-"] * (end - start - 1)
        for slot, label in enumerate(expected):
            assert labels[slot] == ("?????" if slot in hidden else label)


def test_the_command_draws_and_gives_the_facts() -> None:
    config = str(ROOT / "configs/quickstart.toml")
    shown = CliRunner().invoke(app, ["plan", config, "--schedule"])
    assert shown.exit_code == 0
    assert "mesh of 8 ranks" in shown.output
    assert "bubble 20.0%" in shown.output
    told = json.loads(CliRunner().invoke(app, ["plan", config, "--schedule", "--json"]).output)
    assert told["schedule"] == json.loads(json.dumps(facts()))
    assert "schedule" not in json.loads(CliRunner().invoke(app, ["plan", config, "--json"]).output)


def test_without_a_pipeline_there_is_nothing_to_draw() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_facts(load_config({"mesh": {"dims": {"dp": 2}}}))
    assert str(caught.value).startswith(
        "there is no pipeline whose schedule could be drawn\n  given:    config has no training\n"
    )
    with pytest.raises(ConfigError) as caught:
        facts("mesh.dims={ pp = 1, dp = 2, tp = 2 }")
    assert 'given:    pipeline = "pp", mesh.dims = { pp = 1, dp = 2, tp = 2 }\n' in str(caught.value)

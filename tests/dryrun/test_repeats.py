"""A step with replayed microbatches against the same step in which every microbatch runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any

import pytest
from torch import nn

from meshcomm.config import Config
from meshcomm.dryrun.rank import RankStep, alone, counted_step, pretended_step, pretended_world
from meshcomm.dryrun.repeats import Irregular, Repeats
from meshcomm.mesh.opening import init
from meshcomm.models.transformer import Block
from tests.dryrun.test_rank import BUILT_IN, config_of

# A mesh keeps the tensors of its last messages, if these are small.
LARGE: dict[str, Any] = {**BUILT_IN, "hidden_size": 32768, "intermediate_size": 32768}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data": ("dp=4", {"data": "dp"}, {}),
    "1f1b, data, tensor": (
        "pp=2 dp=2 tp=2",
        {"pipeline": "pp", "data": "dp", "tensor": "tp"},
        {"activation_checkpointing": True},
    ),
    "gpipe, ring": (
        "pp=2 cp=4",
        {"pipeline": "pp", "context": "cp", "options": {"schedule": "gpipe"}},
        {"activation_checkpointing": True},
    ),
    "interleaved, sharded": (
        "pp=2 fsdp=4",
        {
            "pipeline": "pp",
            "shard": "fsdp",
            "options": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
        },
        {"compute_dtype": "bfloat16"},
    ),
    "1f1b, sharded, kept gathered": (
        "pp=2 fsdp=2 tp=2",
        {"pipeline": "pp", "shard": "fsdp", "tensor": "tp", "options": {"reshard": False}},
        {},
    ),
}


def stepped(config: Config, rank: int, world: int, repeats: bool) -> RankStep:
    mesh_only = alone(config)
    with pretended_world(rank, world), init(mesh_only) as mesh:
        return counted_step(mesh, config, repeats=repeats)


def comparable(step: RankStep) -> RankStep:
    """Without times, lines of this file, and without the numbers of calls, which a dry run does not compare."""
    calls = [
        replace(
            span, site="", began=0.0, left=None, number=0, waits=[], parts=[part[:3] for part in span.parts]
        )
        for span in step.calls
    ]
    return step._replace(calls=calls)


@pytest.fixture
def passes_played(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    played, play = count(), Repeats._play

    def counting(self: Repeats, *args: Any) -> Any:
        next(played)
        return play(self, *args)

    monkeypatch.setattr(Repeats, "_play", counting)
    return lambda: next(played)


# The schedule 1f1b and the interleaved one, tensor parallelism and sharding stand for the others.
@pytest.mark.deep_cases("gpipe|kept gathered")
@pytest.mark.parametrize("case", CASES)
def test_a_replayed_step_is_the_step(case: str, passes_played: Callable[[], int]) -> None:
    dims, parallel, train = CASES[case]
    config = config_of(dims, parallel, {"micro_batch_size": 1, **train}, LARGE)
    world = prod(config.mesh.dims.values())
    for rank in (0, world - 1):
        assert comparable(stepped(config, rank, world, True)) == comparable(
            stepped(config, rank, world, False)
        )
    # Forward and backward passes over four of eight microbatches, on two ranks.
    assert passes_played() >= 16


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_differs_is_run(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second microbatch has one more operator, in its forward or only in its backward pass."""
    options = {"schedule": schedule, **({"stages_per_rank": 2} if schedule == "zero_bubble" else {})}
    config = config_of(
        "pp=2 dp=2",
        {"pipeline": "pp", "data": "dp", "options": options},
        {"micro_batch_size": 1, "global_batch_size": 32},
        BUILT_IN,
    )
    forward = Block.forward
    for is_backward in (False, True):
        calls = dict[int, int]()

        def uneven(self: nn.Module, *args: Any, **more: Any) -> Any:
            x = forward(self, *args, **more)  # type: ignore[arg-type]
            calls[id(self)] = calls.get(id(self), 0) + 1
            if calls[id(self)] % 2 and not is_backward:
                return x * 2
            if calls[id(self)] % 2:
                x.register_hook(lambda gradient: gradient * 2)
            return x

        monkeypatch.setattr(Block, "forward", uneven)
        runs = comparable(stepped(config, 1, 4, False))
        calls.clear()
        assert comparable(pretended_step(config, 1, 4)) == runs
        calls.clear()
        if is_backward and schedule == "1f1b":
            with pytest.raises(Irregular):
                stepped(config, 1, 4, True)


def test_an_error_in_a_recorded_pass_ends_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("dp=2", {"data": "dp"}, {"micro_batch_size": 1}, BUILT_IN)
    forward, calls = Block.forward, count()

    def failing(self: Block, *args: Any, **more: Any) -> Any:
        if next(calls) == BUILT_IN["num_layers"]:  # the first block of the second microbatch
            raise ValueError("the model's own")
        return forward(self, *args, **more)

    monkeypatch.setattr(Block, "forward", failing)
    with pytest.raises(ValueError, match="the model's own"):
        stepped(config, 0, 2, True)
    assert gc.isenabled()

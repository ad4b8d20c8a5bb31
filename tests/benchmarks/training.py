"""How fast does a mesh train, compared with the machine's limit and with torch's own ways? All are measured in one run, in turn.

    torchrun --nproc-per-node 4 -m tests.benchmarks.training [CONFIG] [--rounds 9] [--steps 2] [--json] [--set key=value]...

Without CONFIG: data parallelism along one dim, on the CPU. A config without [model] and [train] trains the yardstick.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshcomm.commands.measure import in_turn, machine_facts, slowest
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.layout.sizes import coords_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.opening import init
from meshcomm.models import model_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.memory import materialise
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.splits import Splits, sections
from meshcomm.parallel.tensor import TensorSplit
from meshcomm.show.page import Cells, Line, PagePart, as_text, page_view
from meshcomm.show.units import count, seconds_text
from tests.benchmarks.breakdown import expected_exposure, parts_of_a_step
from tests.benchmarks.loops import Loop, by_torch, no_counterpart

# The model and data if the configuration has none: 4.3 million parameters, 4 microbatches of 4 samples on each rank along
# data and shard.
YARDSTICK: Final = (
    "model={ num_layers = 4, hidden_size = 256, num_heads = 8, num_kv_heads = 8, intermediate_size = 1024 }",
    "data={ seq_len = 256 }",
)
MICROBATCH: Final = 4
MICROBATCHES: Final = 4
OURS: Final = "meshcomm"
_DATA_ALONE: Final = {
    "mesh": {"dims": {"dp": -1}, "device": "cpu", "timeout_s": 300.0},
    "parallel": {"data": "dp"},
}
_NOTE = """\
tokens/s: the median of the rounds, each of its slowest rank; ratio: the median of
the rounds' ratios of meshcomm's tokens/s to this way's; CPU: processor time of all
ranks' threads for 1,000 tokens, those that serve communication in brackets"""
_STEP_NOTE = """\
a step of meshcomm, the mean over ranks: along a dim the time in which the program
stood still in its calls, of it late until the last rank came to the call; bubble:
between a pipeline's first pass and its last; what FSDP2 waits for is in the passes.
predicted: calls along a dim, each as long as it takes by itself, which is seconds
less late; a bubble by the order of the schedule's passes, each as long as measured"""


class Way(NamedTuple):
    """One way to train. tokens: of one step, over all ranks. step: runs one step on this rank.

    losses: of each step, the mean over this rank's samples (for the mesh, over all samples); empty on ranks without a loss.
    """

    name: str
    tokens: int
    step: Callable[[], object]
    losses: list[float]


class Without(NamedTuple):
    """A way that is not measured, and why."""

    name: str
    why: str


def ways(mesh: Mesh, config: Config) -> tuple[list[Way], list[Without], Engine]:
    """The mesh first, the limit second, then torch's ways.

    config: with [parallel], [model], [data] and [train]. Called by: every rank; the mesh has all ranks of the world.
    """
    known = sections(mesh, config)
    _, settings, data, train = known
    assert settings is not None and data is not None
    model = model_of(settings, data, train)
    if not model.vocab_size:
        raise UnsupportedOp(
            "the samples of a measurement are tokens",
            given="a model whose inputs are no tokens: vocab_size = 0",
            expected="a model of tokens",
            hint="leave [model] out: the yardstick is trained",
        )
    engine = Engine(mesh, config, model)
    each = train.micro_batch_size * engine.microbatches * data.seq_len
    x, y = _samples(
        mesh, model.vocab_size, train.micro_batch_size * engine.microbatches, data.seq_len, engine.data_coord
    )
    losses: list[float] = []

    def ours() -> None:
        engine.step(x, y, train.lr, len(losses) + 1)
        losses.extend(step.loss for step in engine.results())

    found = [Way(OURS, each * engine.data_size, ours, losses)]
    independent = _alone(mesh)

    def whole() -> nn.Module:
        """The whole model on this rank, not split."""
        splits = Splits(TensorSplit(mesh, None, getattr(torch, train.dtype)), ContextSplit(mesh, None))
        stage = Stage(0, 1, range(model.num_layers))
        module = model.stage(splits, stage)
        materialise(module, mesh.device)
        model.fill(module, stage)
        return module

    loop = Loop(whole(), train, engine.microbatches, x, y)
    alone = loop.step if mesh.rank < independent else _nothing
    name = f"limit: {independent} independent process{'es' * (independent > 1)}"
    found.append(Way(name, each * independent, alone, loop.losses))
    without: list[Without] = []
    if mesh.world_size > 1:
        copied: nn.Module = DistributedDataParallel(whole(), process_group=dist.new_group())
        loop = Loop(copied, train, engine.microbatches, x, y)
        found.append(Way("torch: DDP on all ranks", each * mesh.world_size, loop.step, loop.losses))
        why = no_counterpart(settings)
        if why is None:
            mine = [engine.splits.context.split(samples, 1) for samples in (x, y)]
            name, same = by_torch(mesh, engine, settings, *mine)
            found.append(Way(f"torch: {name}", each * engine.data_size, same.step, same.losses))
        else:
            without.append(Without("torch: the same mesh", why))
    return found, without, engine


def measured(mesh: Mesh, found: Sequence[Way], rounds: int, steps: int) -> dict[str, Any]:
    """Measure every way in turn, `rounds` times `steps` steps. Returns data that JSON can hold.

    Called by: every rank. The result is equal on all ranks.
    """
    spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def counted(way: Way) -> Callable[[], None]:
        def call() -> None:
            thread, process = time.thread_time(), time.process_time()
            way.step()
            spent[way.name].append((time.thread_time() - thread, time.process_time() - process))

        return call

    def finish() -> None:
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize(mesh.device)

    seconds = in_turn(
        {way.name: counted(way) for way in found}, rounds, steps, align=mesh.barrier, finish=finish
    )
    times = dict(zip(seconds, slowest(mesh, list(seconds.values())), strict=True))
    # The warm-up round is not counted here either.
    per_step = [[fmean(each) for each in zip(*spent[way.name][steps:], strict=True)] for way in found]
    mine = torch.tensor(per_step, dtype=torch.float64, device=mesh.device)
    for dim in mesh.dims:
        mesh.all_reduce(dim, mine)
    rows = []
    for way, (threads, processes) in zip(found, mine.tolist(), strict=True):
        # Only some ranks ran an independent process.
        rows.append(
            {
                "way": way.name,
                "tokens": way.tokens,
                "seconds": median(times[way.name]),
                "tokens_s": median(way.tokens / each for each in times[way.name]),
                "cpu_s": processes,
                "main_threads_s": threads,
                "ratio": median(
                    (found[0].tokens / ours) / (way.tokens / theirs)
                    for ours, theirs in zip(times[OURS], times[way.name], strict=True)
                ),
            }
        )
    return {"rounds": rounds, "steps": steps, "ways": rows}


def _alone(mesh: Mesh) -> int:
    """How many ranks can compute at once without taking turns."""
    return mesh.world_size if mesh.device.type != "cpu" else min(mesh.world_size, os.cpu_count() or 1)


def _samples(mesh: Mesh, vocab_size: int, count: int, seq_len: int, coord: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(coord)
    tokens = torch.randint(vocab_size, (count, seq_len + 1), generator=generator).to(mesh.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _nothing() -> None:
    pass


def trained(settings: Config, world: int) -> Config:
    """`settings`, with the yardstick's model if they have none. Raises ConfigError for settings that cannot be measured."""
    part = settings.parallel
    if part is None or settings.mesh.ranks is not None or (settings.train and settings.model is None):
        raise ConfigError(
            f"{settings.source} cannot be measured",
            expected="[parallel], all ranks of the job, and [model] if there is [train]",
            hint=f'--set parallel.data="{next(iter(settings.mesh.dims))}"',
        )
    if settings.model is None:
        share = part.copies(settings.mesh.sizes(world))
        batch = share * MICROBATCH * MICROBATCHES
        train = f"train={{ steps = 1, global_batch_size = {batch}, micro_batch_size = {MICROBATCH} }}"
        settings = load_config(settings, [*YARDSTICK, train])
    quiet = settings.mesh.model_copy(update={"validate_calls": 0})
    return settings.model_copy(update={"mesh": quiet})


def facts_of(settings: Config, rounds: int, steps: int) -> dict[str, Any] | None:
    """The measurements of one run as data that JSON can hold, or None on all ranks but the first. Called by: every rank."""
    with init(settings) as mesh:
        if mesh.device.type == "cpu":
            torch.set_num_threads(1)
        facts: dict[str, Any] = {"machine": machine_facts(mesh), "mesh": dict(mesh.dims)}
        found, without, engine = ways(mesh, settings)
        facts |= measured(mesh, found, rounds, steps)
        facts["without"] = [each._asdict() for each in without]
        facts["model"] = _described(settings)
        if mesh.device.type == "cpu":
            parts = parts_of_a_step(mesh, found[0].step, engine, max(steps, 2))
            facts["step"], facts["lanes"], facts["late"] = parts.seconds, parts.lanes, parts.late
            facts["predicted"] = parts.predicted | expected_exposure(mesh, settings)
        return facts if mesh.rank == int(mesh.layout.ranks.min()) else None


def _described(settings: Config) -> str:
    model, data, train = settings.model, settings.data, settings.train
    assert model is not None and data is not None and train is not None
    what = model.pretrained or model.build
    if what is None:
        what = f"{model.num_layers} layers, width {model.hidden_size}, {model.num_heads} heads, feed-forward {model.intermediate_size}"
    each = f"sequence {data.seq_len}, microbatch {train.micro_batch_size}, global batch {train.global_batch_size}"
    return f"{what}, {each}, {train.compute_dtype or train.dtype}"


def training_text(facts: Mapping[str, Any]) -> str:
    """The facts as text tables."""
    machine = facts["machine"]
    head = (
        f"mesh {coords_text(facts['mesh'])}, {machine['device']}, torch {machine['torch']}\n"
        f"{facts['model']}\n"
        f"{count(machine['cpus'], 'core')} on rank 0's host, load {machine['load']:.1f} before it began; "
        f"{count(facts['rounds'], 'round')} of {count(facts['steps'], 'step')}"
    )
    table = Cells.of(
        facts["ways"],
        {
            "way": lambda row: row["way"],
            ">tokens/s": lambda row: f"{row['tokens_s']:,.0f}",
            ">a step": lambda row: seconds_text(row["seconds"]),
            ">ratio": lambda row: f"{row['ratio']:.2f}",
            ">CPU": lambda row: (
                f"{row['cpu_s'] / row['tokens'] * 1e3:.3f} s ({(row['cpu_s'] - row['main_threads_s']) / row['tokens'] * 1e3:.3f})"
            ),
        },
    )
    parts: list[PagePart] = [Line(head), table]
    parts.append(
        Line("\n".join([*(f"not measured: {e['name']}: {e['why']}" for e in facts["without"]), _NOTE]))
    )
    if "step" in facts:
        whole = sum(facts["step"].values())
        said, late = _by_row(facts, "predicted"), _by_row(facts, "late")
        columns = {
            "in a step": lambda each: each[0],
            ">seconds": lambda each: seconds_text(max(each[1], 0.0)),
            ">share": lambda each: f"{each[1] / whole:.1%}",
            ">late": lambda each: seconds_text(late[each[0]]) if each[0] in late else "",
            ">predicted": lambda each: seconds_text(said[each[0]]) if each[0] in said else "",
        }
        parts += [Cells.of(_by_row(facts, "step").items(), columns), Line(_STEP_NOTE)]
    return as_text(page_view(parts), 110)


def _by_row(facts: Mapping[str, Any], key: str) -> dict[str, float]:
    found = facts.get(key, {})
    return {f"along {name}" if name in facts["lanes"] else name: value for name, value in found.items()}


def _main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    settings = trained(load_config(given.config or _DATA_ALONE, given.set), int(os.environ["WORLD_SIZE"]))
    facts = facts_of(settings, given.rounds, given.steps)
    if facts is not None:
        print(json.dumps(facts, indent=2) if given.json else training_text(facts))


if __name__ == "__main__":
    _main()

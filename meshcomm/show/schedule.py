"""Shows a pipeline's schedule as plain facts, and as a picture with one row per rank and time running to the right."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_letters
from typing import TYPE_CHECKING, Final, final

from meshcomm.config import Config
from meshcomm.config.write import toml
from meshcomm.errors import ConfigError
from meshcomm.predict.passes import orders, timeline
from meshcomm.predict.stages import model_stages, part_costs
from meshcomm.show.page import Facts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

_COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
# How many bands of a long schedule are drawn at most.
_BANDS: Final = 6
# The maximum number of passes in a step for which a timeline is computed.
_PASSES: Final = 1_000_000


def schedule_facts(config: Config, world_size: int | None = None) -> Facts:
    """Return one step of the pipeline as JSON-serializable data.

    Times are in slots: 1 for a forward pass, 1 for each half of a backward pass, and 0 for messages.
    slots: the length of the step. bubble: the share of the step that ranks spend waiting.
    held: the largest number of activations that each rank keeps, in microbatches of one stage.
    passes: for each rank, a list of [kind, stage, microbatch, start, end]. The kind is F for forward, B for backward, I for
    the backward pass for the inputs, or W for the backward pass for the weights.

    world_size: required if a size is -1. Raises ConfigError if no pipeline is configured.
    """
    parallel, model, data, train = config.parallel, config.model, config.data, config.train
    sizes = config.mesh.sizes(world_size)
    if parallel is None or model is None or data is None or train is None:
        raise _nothing(f"{config.source} has no training", "the sections [parallel] [model] [data] [train]")
    if parallel.pipeline is None or sizes[parallel.pipeline] == 1:
        given = (
            "no parallel.pipeline" if parallel.pipeline is None else f"pipeline = {toml(parallel.pipeline)}"
        )
        raise _nothing(f"{given}, mesh.dims = {toml(sizes)}", "a dim of 2 or more ranks in parallel.pipeline")
    model = model.sized("a schedule")
    ranks, per_rank = sizes[parallel.pipeline], parallel.options.stages_per_rank
    microbatches = config.microbatches(sizes)
    if max(microbatches * ranks * per_rank, model.num_layers) > _PASSES:
        raise ConfigError(
            f"{config.source}: the schedule has too many passes to draw",
            given=f"{microbatches} micro-batches through {ranks * per_rank} stages, num_layers = {model.num_layers}",
            expected=f"at most {_PASSES:,} passes and at most as many layers",
            hint="a smaller train.global_batch_size, which results in the same drawing",
        )
    times = timeline(orders(parallel.options.schedule, ranks, per_rank, microbatches))
    parts = model_stages(model, data.seq_len, ranks * per_rank)
    costs = part_costs(model, data.seq_len).of_stages(parts)
    return {
        "name": parallel.options.schedule,
        "dim": parallel.pipeline,
        "ranks": ranks,
        "stages_per_rank": per_rank,
        "microbatches": microbatches,
        "slots": int(times.length),
        "bubble": times.bubble,
        "stages": [
            {"layers": list(part), "share": cost / sum(costs)}
            for part, cost in zip(parts, costs, strict=True)
        ],
        "held": [times.held(rank) for rank in range(ranks)],
        "passes": [[[*slot.work, int(slot.start), int(slot.end)] for slot in slots] for slots in times.ranks],
    }


def _nothing(given: str, expected: str) -> ConfigError:
    return ConfigError(
        "there is no pipeline whose schedule could be drawn",
        given=given,
        expected=expected,
        hint='mesh.dims = { pp = 4, ... } and parallel.pipeline = "pp", or leave --schedule out',
    )


@final
class ScheduleView:
    """Shows `schedule_facts` on a rich console. The time axis is folded into bands if it is wider than the console.

    Each cell is one slot: F3 is the forward pass of microbatch 3, - is the second slot of the same pass, and . is a slot in
    which the rank waits. If a rank has several stages, the cell ends with a letter for the stage.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the headline, the bands and the legend."""
        from rich.text import Text

        facts = self._facts
        ranks, slots, dim = facts["ranks"], facts["slots"], facts["dim"]
        # The width of the longest label plus a space.
        cell = 2 + len(str(facts["microbatches"] - 1)) + (facts["stages_per_rank"] > 1)
        yield Text(
            f"{facts['name']} along {dim}: {ranks} ranks, {ranks * facts['stages_per_rank']} stages, "
            f"{facts['microbatches']} microbatches; {slots} slots, bubble {100 * facts['bubble']:.1f}%"
        )
        names = [f"{dim}={rank}" for rank in range(ranks)]
        margin = max(len("slot"), *map(len, names)) + 2
        columns = max(1, (options.max_width - margin) // cell)
        rows = [self._cells(rank, cell) for rank in range(ranks)]
        drawn = columns * _BANDS
        for start in range(0, min(slots, drawn), columns):
            yield Text("slot".ljust(margin) + _ruler(start, min(start + columns, slots), cell))
            for name, cells in zip(names, rows, strict=True):
                line = Text(name.ljust(margin), no_wrap=True, overflow="crop")
                for text, style in cells[start : start + columns]:
                    line.append(text, style)
                line.rstrip()
                yield line
        if slots > drawn:
            yield Text(f"slots {drawn} to {slots - 1} are not drawn; --json lists all of them")
        yield from self._legend()

    def _cells(self, rank: int, width: int) -> list[tuple[str, str]]:
        """Return the text and the style of each slot of the step."""
        facts = self._facts
        cells = [(".".ljust(width), "dim")] * facts["slots"]
        for kind, stage, microbatch, start, end in facts["passes"][rank]:
            style = _COLOURS[stage % len(_COLOURS)] + ("" if kind == "F" else " bold")
            cells[start:end] = [("-".ljust(width), style)] * (end - start)
            cells[start] = (f"{kind}{microbatch}{self._letter(stage)}".ljust(width), style)
        return cells

    def _letter(self, stage: int) -> str:
        """Return the letter of a stage: a for the rank's first stage, up to z, then A to Z, then + for all others."""
        turn = stage // self._facts["ranks"]
        return "" if self._facts["stages_per_rank"] == 1 else (ascii_letters[turn : turn + 1] or "+")

    def _legend(self) -> Iterator[Text]:
        from rich.text import Text

        facts = self._facts
        kinds = "F forward 1 slot, B backward 2"
        if any(kind in "IW" for row in facts["passes"] for kind, *_ in row):
            kinds = "F forward 1 slot, I backward for inputs 1, W for weights 1, B both 2"
        yield Text(f"{kinds}; - continues, . waits; messages take no time")
        held = " ".join(map(str, facts["held"]))
        yield Text(f"kept at once, in microbatches of one stage, by rank: {held}")
        for number, stage in enumerate(facts["stages"]):
            first, last = stage["layers"][0], stage["layers"][-1]
            parts = ["embedding"] * (number == 0)
            parts.append(f"layer {first}" if first == last else f"layers {first} to {last}")
            parts += ["head"] * (number == len(facts["stages"]) - 1)
            rank = f"{facts['dim']}={number % facts['ranks']} {self._letter(number)}".rstrip()
            text = Text(f"stage {number}", style=_COLOURS[number % len(_COLOURS)])
            share = f"{100 * stage['share']:.1f}% of the work"
            yield text.append(f" on {rank}: {', '.join(parts)}; {share}", style="default")


def _ruler(start: int, end: int, cell: int) -> str:
    """Return a line with the number of every fifth slot of a band."""
    return "".join(str(slot).ljust(5 * cell) for slot in range(start, end, 5)).rstrip()

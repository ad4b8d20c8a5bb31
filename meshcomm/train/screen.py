"""A training run on the screen: one progress bar, then a summary with its loss curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import final

from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from meshcomm.show.page import page_view
from meshcomm.show.stats import stats_page
from meshcomm.show.units import bytes_text
from meshcomm.train.callbacks import Callback, Evaluation, Resumed, Start, Step, Summary
from meshcomm.train.cost import Rates

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", " .:-=+*#"
_QUIET_S = 30.0


@final
class TrainingReporter(Callback):
    """The callback of the rank that prints.

    On a terminal it draws a bar with step, loss, tokens per second and time left. Elsewhere it
    prints a plain line for the first and last step, every tenth of the run, and every 30 s.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._start: Start | None = None
        self._said: Step | None = None

    def on_start(self, start: Start) -> None:
        """Print what is about to run, and open the bar."""
        self._start = start
        self._say(
            f"{start.parameters:,} parameters, {data_line(start)}, "
            f"{start.steps} steps of {start.tokens_per_step:,} tokens, "
            f"{start.threads} CPU thread{'s' if start.threads > 1 else ''} per rank"
        )
        if start.warm_up_s:
            took = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in start.warm_up_s.items())
            self._say(f"groups warmed up: {took}")
        done = 0
        if start.resumed is not None:
            done = start.resumed.step
            self._say("\n".join(resumed_lines(start.resumed)))
        if not self._console.is_terminal and done < start.steps:
            self._say(f"running step {done + 1} of {start.steps}; the first takes longest")
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("{task.fields[speed]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self._console,
            )
            self._task = self._progress.add_task(
                "train", total=start.steps, completed=done, loss="-", speed="- tokens/s"
            )
            self._progress.start()

    def on_step(self, step: Step) -> None:
        """Move the bar, or print a line now and then, and one for a step that was left out."""
        if step.fault:
            self._say(f"step {step.step} is left out: " + step.fault.partition("\n")[0])
        if self._progress is not None:
            self._progress.update(self._task, completed=step.step, loss=f"{step.loss:.4f}", speed=speed(step))
            return
        assert self._start is not None
        steps, said = self._start.steps, self._said
        tenth = max(1, steps // 10)
        if (
            said is None
            or step.step == steps
            or step.step // tenth > said.step // tenth
            or step.seconds - said.seconds > _QUIET_S
        ):
            self._said = step
            left = step.seconds / step.step * (steps - step.step)
            self._say(f"step {step.step}/{steps}  loss {step.loss:.4f}  {speed(step)}  {duration(left)} left")

    def on_eval(self, evaluation: Evaluation) -> None:
        """Print a line."""
        self._say(
            f"step {evaluation.step}  validation loss {evaluation.validation_loss:.4f} over "
            f"{evaluation.validation_tokens:,} tokens, {duration(evaluation.seconds)}"
        )

    def on_end(self, summary: Summary, error: BaseException | None) -> None:
        """Close the bar, and print the summary or how far the run came."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if error is not None:
            steps = self._start.steps if self._start else 0
            loss = f", loss {summary.losses[-1]:.4f}" if summary.losses else ""
            self._say(f"stopped after step {summary.steps} of {steps}{loss}; metrics in {summary.metrics}")
            return
        self._console.print(summary_panel(summary, unicode=self._console.encoding.startswith("utf")))
        if summary.traffic is not None and summary.traffic.rows:
            self._console.print(page_view(stats_page(summary.traffic.facts(), summary.traffic_steps)))

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def resumed_lines(resumed: Resumed) -> list[str]:
    """Where a run goes on from, and what is different from then, as text.

    >>> from pathlib import Path
    >>> print(*resumed_lines(Resumed(40, Path("x"), ("mesh.dims: { dp = 4 } -> { dp = 2 }",), 1)), sep="\\n")
    restart 1: resumed after step 40 from x; different from then:
      mesh.dims: { dp = 4 } -> { dp = 2 }
    """
    why = f"restart {resumed.restarts}: " if resumed.restarts else ""
    if not resumed.step:
        return [f"{why}no checkpoint in {resumed.folder}, so the first step is next"]
    more = "; different from then:" if resumed.differences else ""
    first = f"{why}resumed after step {resumed.step} from {resumed.folder}{more}"
    return [first, *(f"  {line}" for line in resumed.differences)]


def summary_panel(summary: Summary, *, unicode: bool = True) -> Panel:
    """Final loss, speed, time and the loss curve of a run that did at least one step."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("loss", f"{summary.losses[0]:.4f} -> {summary.losses[-1]:.4f} nats per {summary.unit}")
    if summary.evaluation is not None:
        last = summary.evaluation
        facts.add_row("validation", f"{last.validation_loss:.4f} after step {last.step}")
    if summary.skipped:
        facts.add_row("left out", f"{summary.skipped} of {summary.steps} steps, not finite")
    facts.add_row("speed", f"{summary.tokens_per_s:,.0f} tokens/s")
    if summary.rates is not None:
        facts.add_row("model FLOP/s", _flops(summary.rates))
    if summary.memory is not None:
        memory = summary.memory
        facts.add_row("peak memory", f"{bytes_text(memory.nbytes)} on rank {memory.rank}, {memory.kind}")
    if summary.stopped:
        facts.add_row("ended early", summary.stopped)
    facts.add_row("time", f"{duration(summary.seconds)} for {summary.steps} steps, {summary.tokens:,} tokens")
    if summary.late:
        late = (f"{dim}: rank {rank}, {mean * 1e3:.1f} ms" for dim, (rank, mean) in summary.late.items())
        facts.add_row("latest to come", "; ".join(late))
    facts.add_row("metrics", str(summary.metrics))
    if line := curve(summary.losses, BARS if unicode else ASCII_BARS):
        facts.add_row("curve", Text(line))
    return Panel(facts, title="training finished", expand=False)


def speed(step: Step) -> str:
    """Tokens each second, and MFU where it is known."""
    return f"{step.tokens_per_s:,.0f} tokens/s" + ("" if step.mfu is None else f"  MFU {100 * step.mfu:.3g}%")


def _flops(rates: Rates) -> str:
    shares = [
        f"{name} {100 * share:.3g}%" for name, share in (("MFU", rates.mfu), ("HFU", rates.hfu)) if share
    ]
    return ", ".join([f"{bytes_text(rates.model_flops_per_s).removesuffix('B')}FLOP/s a rank", *shares])


def data_line(start: Start) -> str:
    """How much there is to train on."""
    count = f"{start.text_bytes:,} " if start.text_bytes else ""
    files = f" from {start.text_files} file{'' if start.text_files == 1 else 's'}" if start.text_files else ""
    return f"{count}{start.unit}{files}"


def duration(seconds: float) -> str:
    """A time span to read.

    >>> [duration(seconds) for seconds in (0, 7.24, 59.99, 83, 3599.7, 7260)]
    ['0.0 s', '7.2 s', '1 min 0 s', '1 min 23 s', '1 h 0 min', '2 h 1 min']
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def curve(losses: Sequence[float], bars: str = BARS, columns: int = 60) -> str:
    """The losses over the steps as one line of `bars`, lowest first. A bar is the mean of the steps that it covers.

    >>> curve([4.0, 3.0, 2.0, 1.0]), curve([1.0, 3.0, 5.0, 7.0], "_^", 2), curve([2.0, math.nan])
    ('█▆▃▁', '_^', '▁')
    """
    losses = [loss for loss in losses if math.isfinite(loss)]
    count = len(losses)
    columns = min(columns, count)
    means = [fmean(losses[x * count // columns : (x + 1) * count // columns]) for x in range(columns)]
    low, top = min(means, default=0.0), max(means, default=0.0)
    scale = (len(bars) - 1) / (top - low) if top > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)

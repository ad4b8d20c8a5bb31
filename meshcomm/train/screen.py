"""Show a training run on the screen, with a progress bar and a summary at the end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import final

from rich import progress
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from meshcomm.errors import RankLost
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.all_ranks import is_first
from meshcomm.show.page import page_view
from meshcomm.show.stats import stats_page
from meshcomm.show.units import bytes_text, count
from meshcomm.train.callbacks import Callback, Evaluation, Resumed, Start, Step, Summary

_QUIET_S = 30.0


@final
class TrainingReporter(Callback):
    """Prints on the first rank of the mesh.

    On a terminal, it draws a progress bar with the step, loss, tokens per second and time left. Otherwise it
    prints a plain line for the first and the last step, after every tenth of the run, and every 30 s.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar: progress.Progress | None = None
        self._task = progress.TaskID(0)
        self._steps = 0
        self._said: Step | None = None
        self._first = True

    def on_start(self, start: Start) -> None:
        """Print a description of the run, and open the bar."""
        # After a loss of ranks, another rank may be the first one.
        self._console.quiet = self.trainer is not None and not is_first(self.trainer.mesh)
        self._steps, self._said = start.steps, None
        size = f"{start.text_bytes:,} " if start.text_bytes else ""
        files = f" from {count(start.text_files, 'file')}" if start.text_files else ""
        self._say(
            f"{start.parameters:,} parameters, {size}{start.unit}{files}, "
            f"{start.steps} steps of {start.tokens_per_step:,} tokens, "
            f"{count(start.threads, 'CPU thread')} per rank"
        )
        if start.note:
            self._say(start.note)
        done = 0
        if start.resumed is not None:
            done = start.resumed.step
            self._say(resumed_text(start.resumed))
        if self._console.is_terminal:
            self._bar = progress.Progress(
                progress.TextColumn("step"),
                progress.MofNCompleteColumn(),
                progress.BarColumn(bar_width=None),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=self._console,
            )
            self._task = self._bar.add_task("loss -", total=start.steps, completed=done)
            self._bar.start()
        elif done < start.steps:
            self._say(f"running step {done + 1} of {start.steps}; the first takes longest")

    def on_step(self, step: Step) -> None:
        """Update the bar, or print a line from time to time. Also print a line for each skipped step."""
        first, self._first = self._first, False
        if first and self.trainer is not None and (why := self.trainer.not_checked):
            self._say(not_compared(why))
        if step.fault:
            self._say(f"step {step.step} is skipped: " + step.fault.partition("\n")[0])
        mfu = "" if step.mfu is None else f"  MFU {100 * step.mfu:.3g}%"
        load = step.experts.get("expert_max_over_mean")
        experts = "" if load is None else f"  busiest expert {load:.2f}x"
        description = f"loss {step.loss:.4f}  {step.tokens_per_s:,.0f} tokens/s{mfu}{experts}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step.step, description=description)
        elif self._is_due(step):
            self._said = step
            seconds_left = step.seconds / step.step * (self._steps - step.step)
            self._say(f"step {step.step}/{self._steps}  {description}  {duration(seconds_left)} left")

    def _is_due(self, step: Step) -> bool:
        last, tenth = self._said, max(1, self._steps // 10)
        return (
            last is None
            or step.step == self._steps
            or step.step // tenth > last.step // tenth
            or step.seconds - last.seconds > _QUIET_S
        )

    def on_eval(self, evaluation: Evaluation) -> None:
        """Print a line."""
        over = f" over {evaluation.validation_tokens:,} tokens" if evaluation.validation_tokens else ""
        more = "".join(f", {name} {value:.4g}" for name, value in evaluation.more.items())
        loss = f"validation loss {evaluation.validation_loss:.4f}{over}{more}"
        self._say(f"step {evaluation.step}  {loss}, {duration(evaluation.seconds)}")

    def on_end(self, summary: Summary, error: BaseException | None) -> None:
        """Close the bar, and print the summary, or how far the run got before an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if isinstance(error, RankLost):
            return  # the other ranks continue, and report it
        if error is not None:
            loss = f", loss {summary.losses[-1]:.4f}" if summary.losses else ""
            self._say(
                f"stopped after step {summary.steps} of {self._steps}{loss}; metrics in {summary.metrics}"
            )
            return
        facts = Table.grid(padding=(0, 2))
        for name, fact in summary_rows(summary):
            facts.add_row(name, fact)
        saved = "training saved; train.resume = true continues it"
        title = saved if summary.asked_to_stop else "training finished"
        self._console.print(Panel(facts, title=title, expand=False))
        if summary.traffic is not None and summary.traffic.rows:
            self._console.print(page_view(stats_page(summary.traffic.facts(), summary.traffic_steps)))

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def not_compared(why: str) -> str:
    """Return the line about the parts of a program that are not checked: see `Trainer.not_checked`."""
    return f"not compared with one process before the first step: {why}"


def resumed_text(resumed: Resumed) -> str:
    """Return a text with the step and checkpoint from which a run resumes, and the settings that have changed since."""
    met = resumed.generation
    if met is not None:
        new = f"{ranks_text(sorted(met.replaced))} replaced: " if met.replaced else ""
        sizes = "".join(f", {name}={size}" for name, size in met.dims.items())
        return f"{new}continues after step {resumed.step} with the state of the other ranks{sizes}"
    why = f"restart {resumed.restarts}: " if resumed.restarts else ""
    if not resumed.step:
        return f"{why}no checkpoint in {resumed.folder}; starts with the first step"
    more = "; changed since then:" if resumed.differences else ""
    first = f"{why}resumed after step {resumed.step} from {resumed.folder}{more}"
    return "\n  ".join([first, *resumed.differences])


def summary_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows of the summary of a run with at least one step."""
    yield "loss", f"{summary.losses[0]:.4f} -> {summary.losses[-1]:.4f} nats per {summary.unit}"
    if summary.evaluation is not None:
        last = summary.evaluation
        yield "validation", f"{last.validation_loss:.4f} after step {last.step}"
    if summary.skipped:
        yield "skipped", f"{summary.skipped} of {summary.steps} steps, not finite"
    yield "speed", f"{summary.tokens_per_s:,.0f} tokens/s"
    if summary.rates is not None:
        flops, mfu = summary.rates
        share = "" if mfu is None else f", MFU {100 * mfu:.3g}%"
        yield "model FLOP/s", f"{bytes_text(flops).removesuffix('B')}FLOP/s per rank{share}"
    if summary.memory is not None:
        nbytes, rank, kind = summary.memory
        yield "peak memory", f"{bytes_text(nbytes)} on rank {rank}, {kind}"
    if summary.stopped:
        yield "ended early", summary.stopped
    yield "time", f"{duration(summary.seconds)} for {summary.steps} steps, {summary.tokens:,} tokens"
    if summary.late:
        late = (f"{dim}: rank {rank}, {mean * 1e3:.1f} ms" for dim, (rank, mean) in summary.late.items())
        yield "last to arrive", "; ".join(late)
    yield "metrics", str(summary.metrics)


def duration(seconds: float) -> str:
    """Return a duration such as `7.2 s`, or `1:01:23` for a minute or more."""
    return f"{seconds:.1f} s" if seconds < 59.95 else str(timedelta(seconds=round(seconds)))

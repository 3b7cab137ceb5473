"""What a run shows on rank 0: a progress bar on a terminal, plain lines elsewhere, and a closing summary."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self, final

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from themis.cli.units import format_bytes
from themis.models import TransformersConfig
from themis.train.config import RunConfig
from themis.train.metrics import StepMetrics, Summary
from themis.train.observer import Observer

#: Plain output shows a step at most this often; evaluations always.
_LINE_EVERY_S = 10.0
#: How wide tables are where no terminal says it.
PLAIN_WIDTH = 140


@final
class Console(Observer):
    """Draws on standard output; with `as_json`, nothing but the summary as one JSON object."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        self._terminal = Terminal(file=sys.stdout, highlight=False, width=width)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._status: Status | None = None
        self._shown_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the terminal back as it was, however the run ends."""
        self._end_status()
        if self._progress is not None:
            self._progress.stop()

    def preparing(self, what: str) -> None:
        """See Observer: a moving line on a terminal, until something else is shown; a plain one elsewhere."""
        if self._as_json:
            return
        self._end_status()
        if self._progress is not None:
            self._progress.update(self._task, description=what)
        elif self._terminal.is_terminal:
            self._status = self._terminal.status(Text(what))
            self._status.start()
        else:
            self.say(f"preparing: {what}")

    def started(self, config: RunConfig, run_dir: Path, step: int, world_size: int) -> None:
        """See Observer."""
        if self._as_json:
            return
        self._end_status()
        model = config.model
        family = f" ({model.model_type})" if isinstance(model, TransformersConfig) else ""
        self.say(
            f"{config.name}{family}: {model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}, "
            f"policy {config.policy.name}, {world_size} rank(s), {run_dir}"
        )
        if step:
            self.say(f"going on after step {step}")
        if self._terminal.is_terminal:
            columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")]
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._terminal)
            self._task = self._progress.add_task("", total=config.steps, completed=step)
            self._progress.start()

    def noticed(self, line: str) -> None:
        """See Observer; such lines go to standard error."""
        print(f"themis: {line}", file=sys.stderr, flush=True)

    def stepped(self, metrics: StepMetrics) -> None:
        """See Observer."""
        if self._as_json:
            return
        text = _describe(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, description=text)
        now_s = time.monotonic()
        evaluated = metrics.held_out_loss is not None
        if evaluated or (self._progress is None and now_s - self._shown_s >= _LINE_EVERY_S):
            held_out = f"  held-out {metrics.held_out_loss:.3f}" if evaluated else ""
            self.say(f"step {metrics.step:>6}  {text}{held_out}")
            self._shown_s = now_s

    def finished(self, summary: Summary, prompt: str, text: str) -> None:
        """See Observer."""
        if self._progress is not None:
            self._progress.stop()
        if self._as_json:
            print(json.dumps({**asdict(summary), "prompt": prompt, "sample": text}), flush=True)
            return
        if text:
            self.say("\nsample (prompt, then what the model wrote):")
            self._terminal.print(Text(_printable(prompt), style="dim"), Text(_printable(text)), sep="")
            self.say("")
        self._terminal.print(summary_table(summary))

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, line: str) -> None:
        """A line, plain and for good; none with `as_json`."""
        if self._as_json:
            return
        self._terminal.print(Text(line), soft_wrap=True)


def summary_table(summary: Summary) -> Table:
    """The closing lines."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("training loss", f"{summary.first_loss:.3f} → {summary.last_loss:.3f} nats a token")
    if summary.held_out_loss is not None:
        table.add_row("held-out loss", f"{summary.held_out_loss:.3f} nats a token")
    gain = f"{summary.imbalance_before:.3f} with owners alone → {summary.imbalance_after:.3f} as it ran"
    table.add_row("imbalance", f"{gain} (busiest over mean device)")
    moved = [
        f"{name.replace('_', ' ')} {format_bytes(sum(links.values()))}"
        for name, links in summary.bytes_sent.items()
        if sum(links.values())
    ]
    inter = sum(links.get("inter", 0) for links in summary.bytes_sent.values())
    table.add_row("bytes moved", ", ".join(moved) + f"; between nodes {format_bytes(inter)}" if moved else "none")
    table.add_row("speed", f"{summary.tokens_per_s:,.0f} tokens/s, the median of its steps")
    waits = [f"{name.replace('_', ' ')} {100 * share:.1f} %" for name, share in summary.exposed_share.items()]
    table.add_row("waiting", ", ".join(waits) + " of the time")
    table.add_row("run directory", summary.run_dir)
    return table


def _describe(metrics: StepMetrics) -> str:
    before = sum(metrics.imbalance_before_L) / len(metrics.imbalance_before_L)
    after = sum(metrics.imbalance_after_L) / len(metrics.imbalance_after_L)
    return (
        f"loss {metrics.cross_entropy:.3f}  imbalance {before:.2f} → {after:.2f}  {metrics.tokens_per_s:,.0f} tokens/s"
    )


def _printable(text: str) -> str:
    """`text` without control characters, which could do things to a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)

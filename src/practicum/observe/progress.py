"""Progress of a run: a live panel on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from practicum.observe.text import duration, plain, say, shorten, sparkline

COLOURS = ("cyan", "magenta", "blue", "green", "yellow", "red")
LINE_EVERY_S = 10.0
WARNINGS_SHOWN = 3
BORDER = 4
"""Columns that the panel's frame takes."""

CURVES: dict[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "loss": ("train/loss",),
    "eval": ("eval/greedy", "eval/mean@", "eval/pass@"),
    "KL to teachers": ("train/teacher_kl", "advantage/teacher_kl"),
    "KL to reference": ("train/kl", "advantage/kl_reward"),
    "KL of update": ("train/approx_kl",),
}
"""What is drawn over the steps, and the metrics that may hold it; a name that ends in @ takes any k."""
INSTEAD = {"loss": ("reward",), "KL of update": ("KL to teachers", "KL to reference")}
"""Curves that are only shown where those others are not known."""


class ProgressView:
    """Shows step, time left, reward, evaluation and KL over the steps, where the time goes, the newest
    sample and warnings."""

    def __init__(self, name: str, steps: int, done: int = 0, console: Console | None = None) -> None:
        self.name, self.steps = plain(name), steps
        self.console = console or Console()
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.warnings: list[str] = []
        self._lock = threading.RLock()
        self._began = self._shown = self._stage_began = time.monotonic()
        self._durations: deque[float] = deque(maxlen=20)
        self._step, self._stage = done, "starting"
        self._printed: int | None = None
        self._metrics: dict[str, float] = {}
        self._curves: dict[str, list[float]] = {}
        self._sample: Mapping[str, Any] | None = None
        self._live = Live(
            console=self.console, refresh_per_second=4, transient=True, get_renderable=self._panel
        )

    def __enter__(self) -> ProgressView:
        if self.is_live:
            self._live.start()
        else:
            self.say(f"{self.name} · starting · step {self._step}/{self.steps}")
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self._live.stop()
        if self._metrics and self._printed != self._step:
            self._print_line()

    def stage(self, name: str) -> None:
        """Show the stage that begins."""
        with self._lock:
            self._stage, self._stage_began = name, time.monotonic()

    def waiting(self, what: str) -> None:
        """Show what the learner waits for: a stage of the panel; without one a line, now and then."""
        self.stage(f"waiting: {what}")
        if not self.is_live and time.monotonic() - self._shown >= LINE_EVERY_S:
            self._shown = time.monotonic()
            self.say(f"{self.name} · step {self._step}/{self.steps} · waiting: {what}")

    def starting(self, what: str) -> None:
        """Show what the start is busy with: a stage of the panel; without one it is a line."""
        self.stage(what)
        if not self.is_live:
            self.say(f"{what} …")

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Show that a step is done; step 0 is the evaluation before the first."""
        with self._lock:
            self._step, self._metrics = number, dict(metrics)
            self._add(metrics)
        measured = any(name.startswith("eval/") for name in metrics)
        if not self.is_live and (measured or time.monotonic() - self._shown >= LINE_EVERY_S):
            self._print_line()

    def recall(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Add steps that were done before this start to the curves."""
        with self._lock:
            for row in rows:
                self._add(row)

    def sample(self, row: Mapping[str, Any]) -> None:
        """Show the newest sample: a row of samples.jsonl."""
        with self._lock:
            self._sample = dict(row)

    def warn(self, sentence: str) -> None:
        """Show a warning that stays in the panel; without one it is a line."""
        with self._lock:
            self.warnings.append(sentence)
        if not self.is_live:
            self.say(f"warning: {sentence}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        say(text, self.console)

    def _add(self, metrics: Mapping[str, float]) -> None:
        if "time/step" in metrics:
            self._durations.append(metrics["time/step"])
        for name in CURVES:
            value = find_curve(name, metrics)
            if value is not None:
                self._curves.setdefault(name, []).append(value)

    def _print_line(self) -> None:
        self._shown, self._printed = time.monotonic(), self._step
        facts = [f"step {self._step}/{self.steps}"]
        for name in self._drawn():
            value = find_curve(name, self._metrics)
            if value is not None:
                facts.append(f"{name} {value:.3f}")
        self.say(" · ".join([self.name, *facts, *self._speed(), self._left()]))

    def _drawn(self) -> list[str]:
        known = [name for name in CURVES if name in self._curves]
        return [name for name in known if not any(other in known for other in INSTEAD.get(name, ()))]

    def _speed(self) -> list[str]:
        m, facts = self._metrics, []
        if "time/step" in m:
            facts.append(f"{m['time/step']:.2f} s/step")
        if "rollout/tokens_per_second" in m:
            facts.append(f"rollout {m['rollout/tokens_per_second']:,.0f} tokens/s")
        return facts

    def _left(self) -> str:
        if not self._durations or self._step >= self.steps:
            return "time left unknown" if self._step < self.steps else "last step done"
        return f"{duration(fmean(self._durations) * (self.steps - self._step))} left"

    def _panel(self) -> Panel:
        """Return all parts; in a low terminal without the sample, then without the speed."""
        with self._lock:
            width = self.console.width - BORDER
            header, curves, times = self._header(width), self._curve_rows(width), self._times(width)
            newest, warned = self._newest(width), self._warned()
        panel = self._boxed(header, curves, times, newest, warned)
        for fewer in ((header, curves, times, warned), (header, curves, warned)):
            if len(self.console.render_lines(panel)) <= self.console.height:
                break
            panel = self._boxed(*fewer)
        return panel

    def _boxed(self, *parts: list[RenderableType]) -> Panel:
        rows: list[RenderableType] = []
        for part in parts:
            if part:
                rows += [Text(" "), *part] if rows else part
        title = Text(shorten(self.name, self.console.width - BORDER - 4), style="bold")
        return Panel(Group(*rows), box=box.ROUNDED, border_style="dim", title=title, title_align="left")

    def _header(self, width: int) -> list[RenderableType]:
        now = time.monotonic()
        stage = Text(f"step {self._step}/{self.steps}", style="bold")
        stage.append(f" · {self._stage}", style="not bold")
        if now - self._stage_began >= 1:
            stage.append(f" {duration(now - self._stage_began)}", style="not bold dim")
        clock = Text(f"{duration(now - self._began)} so far · {self._left()}", style="dim")
        bar = ProgressBar(total=max(self.steps, 1), completed=self._step, width=width)
        line = Table.grid(expand=True)
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        line.add_column(justify="right", no_wrap=True)
        line.add_row(stage, clock)
        return [line, bar]

    def _curve_rows(self, width: int) -> list[RenderableType]:
        drawn = self._drawn()
        if not drawn:
            return []
        label = max(len(name) for name in drawn)
        grid = Table.grid(padding=(0, 2, 0, 0))
        room = max(4, min(60, width - label - 10 - 17))
        for name in drawn:
            values = self._curves[name]
            grid.add_row(
                Text(name.ljust(label), style="dim", no_wrap=True),
                Text(f"{values[-1]:8.3f}", style="bold", no_wrap=True),
                Text(sparkline(values, room).ljust(room), style="cyan", no_wrap=True),
                Text(f"{min(values):.3g} … {max(values):.3g}", style="dim", no_wrap=True),
            )
        return [grid]

    def _times(self, width: int) -> list[RenderableType]:
        speed, shares = self._speed(), stage_shares(self._metrics)
        if not speed:
            return []
        bar, legend = Text(no_wrap=True), Text(no_wrap=True, overflow="ellipsis")
        for i, (name, share) in enumerate(shares):
            colour, entry = COLOURS[i % len(COLOURS)], f" {name} {share:.0%}  "
            bar.append("▄" * round(share * width), style=colour)
            if len(legend) + len(entry) + 1 <= width + 2:
                legend.append("■", style=colour).append(entry, style="dim")
        bar.truncate(width)
        legend.rstrip()
        return [Text(" · ".join(speed), no_wrap=True, overflow="ellipsis"), bar, legend]

    def _newest(self, width: int) -> list[RenderableType]:
        row = self._sample
        if row is None:
            return []
        head = Text("newest sample", style="dim", no_wrap=True, overflow="ellipsis")
        head.append(f" · {shorten(str(row.get('task') or ''), 24)}")
        if row.get("reward") is not None:
            head.append(" · reward ").append(f"{row['reward']:.3f}", style="bold not dim")
        lines: list[RenderableType] = [head]
        for mark, what in (("?", "prompt"), (">", "response"), ("=", "expected")):
            if row.get(what) not in (None, ""):
                text = Text(f"{mark} ", style="dim", no_wrap=True, overflow="ellipsis")
                lines.append(text.append(shorten(str(row[what]), width - 2), style="not dim"))
        return lines

    def _warned(self) -> list[RenderableType]:
        rows = Table.grid(padding=(0, 1, 0, 0))
        for sentence in self.warnings[-WARNINGS_SHOWN:]:
            rows.add_row(Text("!", style="bold yellow"), Text(plain(sentence), style="yellow"))
        return [rows] if self.warnings else []


def find_curve(name: str, metrics: Mapping[str, float]) -> float | None:
    """Return the value of a curve in a step's metrics, if they have it."""
    for metric in CURVES[name]:
        if metric in metrics:
            return metrics[metric]
        if metric.endswith("@"):
            for known, value in metrics.items():
                if known.startswith(metric) and known.count("/") == 1:
                    return value
    return None


def stage_shares(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return each stage's share of the step's time, largest first; under one percent is left out."""
    whole = metrics.get("time/step", 0.0)
    stages = {
        name.removeprefix("time/"): seconds
        for name, seconds in metrics.items()
        if name.startswith("time/") and name not in ("time/step", "time/eval", "time/checkpoint")
    }
    if "waited" in stages:  # what is sampled ahead takes no time of the step
        stages = {name: s for name, s in stages.items() if name not in ("rollout", "reward", "publish_lag")}
    shares = [(name, seconds / whole) for name, seconds in stages.items() if whole]
    return sorted((s for s in shares if s[1] >= 0.01), key=lambda item: -item[1])

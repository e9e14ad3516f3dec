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
"""Curves over the steps, and the metrics that may hold each. A name that ends in @ takes any k."""
INSTEAD = {"loss": ("reward",), "KL of update": ("KL to teachers", "KL to reference")}
"""Curves that are only shown where those others are not known."""


class ProgressView:
    """Shows the step, time left, curves, where the time goes, the newest sample and warnings."""

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
        with self._lock:
            self._stage, self._stage_began = name, time.monotonic()

    def waiting(self, what: str) -> None:
        """Show what the learner waits for, as a stage of the panel or now and then as a line."""
        self.stage(f"waiting: {what}")
        if not self.is_live and time.monotonic() - self._shown >= LINE_EVERY_S:
            self._shown = time.monotonic()
            self.say(f"{self.name} · step {self._step}/{self.steps} · waiting: {what}")

    def starting(self, what: str) -> None:
        """Show the current part of the start as a stage of the panel. Without a panel, print a line."""
        self.stage(what)
        if not self.is_live:
            self.say(f"{what} …")

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. Step 0 is the evaluation before training."""
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
        with self._lock:
            self._sample = dict(row)

    def warn(self, sentence: str) -> None:
        """Show a warning that stays in the panel. Without a panel, print a line."""
        with self._lock:
            self.warnings.append(sentence)
        if not self.is_live:
            self.say(f"warning: {sentence}")

    def say(self, text: str) -> None:
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
        values = {name: find_curve(name, self._metrics) for name in self._drawn()}
        facts = [f"{name} {value:.3f}" for name, value in values.items() if value is not None]
        facts = [f"step {self._step}/{self.steps}", *facts, *self._speed(), self._left()]
        self.say(" · ".join([self.name, *facts]))

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
        """Return all parts of the panel. In a low terminal, omit the sample and the times."""
        with self._lock:
            width = self.console.width - BORDER
            needed, warned = [self._header(width), self._curve_rows(width)], self._warned()
            panel = self._boxed([*needed, self._times(), self._newest(width), warned])
        if len(self.console.render_lines(panel)) > self.console.height:
            panel = self._boxed([*needed, warned])
        return panel

    def _boxed(self, parts: Iterable[list[RenderableType]]) -> Panel:
        rows: list[RenderableType] = []
        for part in filter(None, parts):
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

    def _times(self) -> list[RenderableType]:
        """Return the speed, and each stage's share of the step's time from one percent on, largest first."""
        whole, left_out = self._metrics.get("time/step", 0.0), {"time/step", "time/eval", "time/checkpoint"}
        if "time/waited" in self._metrics:  # what is sampled ahead takes no time of the step
            left_out |= {"time/rollout", "time/reward", "time/publish_lag"}
        times = {n[5:]: s for n, s in self._metrics.items() if n.startswith("time/") and n not in left_out}
        shown = sorted(
            ((s / whole, name) for name, s in times.items() if s >= 0.01 * whole > 0), reverse=True
        )
        lines = [" · ".join(self._speed()), " · ".join(f"{name} {share:.0%}" for share, name in shown)]
        return [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in lines if line]

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
    for wanted in CURVES[name]:
        for metric, value in metrics.items():
            of_any_k = wanted[-1] == "@" and metric.startswith(wanted) and metric.count("/") == 1
            if metric == wanted or of_any_k:
                return value
    return None

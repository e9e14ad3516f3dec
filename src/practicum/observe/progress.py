"""Progress of a run: a live panel on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
LINE_EVERY_S = 10.0


class ProgressView:
    """Shows step, reward or loss, tokens/s, where the time goes, and the time left."""

    def __init__(self, name: str, steps: int, done: int = 0, console: Console | None = None) -> None:
        self.name, self.steps = name, steps
        self.console = console or Console()
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)
        self._shown = time.monotonic()
        self._durations: deque[float] = deque(maxlen=20)
        self._step, self._stage = done, "starting"
        self._printed: int | None = None
        self._metrics: dict[str, float] = {}
        self._evals: dict[str, float] = {}

    def __enter__(self) -> ProgressView:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()
        if self._metrics and self._printed != self._step:
            self._print_line()

    def stage(self, name: str) -> None:
        """A stage begins."""
        self._stage = name
        self._refresh()

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        self._step, self._metrics = number, dict(metrics)
        if "time/step" in metrics:
            self._durations.append(metrics["time/step"])
        self._evals |= {k: v for k, v in metrics.items() if k.startswith("eval/")}
        self._refresh()
        if not self.console.is_terminal and time.monotonic() - self._shown >= LINE_EVERY_S:
            self._print_line()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def _print_line(self) -> None:
        self._shown, self._printed = time.monotonic(), self._step
        self.say(self.line())

    def line(self) -> str:
        """The state in one line."""
        return f"{self.name} · {' · '.join(f'{k} {v}' for k, v in self._facts().items())}"

    def _facts(self) -> dict[str, str]:
        m = self._metrics
        facts = {"step": f"{self._step}/{self.steps}"}
        if "reward/mean" in m:
            facts["reward"] = f"{m['reward/mean']:.3f}"
        elif "train/loss" in m:
            facts["loss"] = f"{m['train/loss']:.3f}"
        if "train/teacher_kl" in m:
            facts["KL to teachers"] = f"{m['train/teacher_kl']:.3f}"
        if "eval/greedy" in self._evals:
            facts["eval"] = f"{self._evals['eval/greedy']:.3f}"
        if "rollout/tokens_per_second" in m:
            facts["rollout"] = f"{m['rollout/tokens_per_second']:,.0f} tok/s"
        if "time/step" in m:
            facts["time"] = f"{m['time/step']:.2f} s/step ({self._split()})"
        facts["left"] = self._left()
        return facts

    def _split(self) -> str:
        shares = [f"{name} {share:.0%}" for name, share in stage_shares(self._metrics)[:3]]
        return ", ".join(shares)

    def _left(self) -> str:
        if not self._durations:
            return "…"
        seconds = fmean(self._durations) * (self.steps - self._step)
        return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"

    def _refresh(self) -> None:
        if self.console.is_terminal:
            self._live.update(self._panel())

    def _panel(self) -> Group:
        table = Table.grid(padding=(0, 2))
        facts = self._facts()
        table.add_row(*(Text(name, style="dim") for name in facts))
        table.add_row(*facts.values())
        bar = ProgressBar(total=max(self.steps, 1), completed=self._step, width=60)
        split = Text("time ", style="dim")
        for i, (name, share) in enumerate(stage_shares(self._metrics)):
            split.append("█" * max(1, round(share * 40)), style=COLOURS[i % len(COLOURS)])
            split.append(f" {name} {share:.0%} ", style="dim")
        return Group(Text(f"{self.name} · {self._stage}", style="bold"), bar, table, split)


def stage_shares(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Each stage's share of the step's time, largest first; what is under one percent is left out."""
    whole = metrics.get("time/step", 0.0)
    stages = {
        name.removeprefix("time/"): seconds
        for name, seconds in metrics.items()
        if name.startswith("time/") and name not in ("time/step", "time/eval", "time/checkpoint")
    }
    shares = [(name, seconds / whole) for name, seconds in stages.items() if whole]
    return sorted((s for s in shares if s[1] >= 0.01), key=lambda item: -item[1])

"""Text of models and users as a terminal may show it, numbers as a line of bars, small tables."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
SHOWN_AS = {"\n": "↵", "\t": " ", "\r": "↵"}
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that steer a terminal, hide text or turn its direction."""
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = [*_PLAIN, *range(256, 512 - len(_PLAIN))]
BYTE_LETTERS = dict(zip(map(chr, _LETTERS), [*_PLAIN, *sorted({*range(256)} - {*_PLAIN})], strict=True))
"""The byte that each letter of a byte-level vocabulary stands for."""


def plain(text: str) -> str:
    """Return one line without control characters: a line's end is ↵, others are their escape, as \\x1b."""
    shown = []
    for character in text.replace("\r\n", "\n"):
        if character in SHOWN_AS:
            character = SHOWN_AS[character]
        elif unicodedata.category(character) in HIDDEN:
            character = character.encode("unicode_escape").decode("ascii")
        shown.append(character)
    return "".join(shown)


def say(text: str, console: Console | None = None) -> None:
    """Print lines as they are, without markup. In a terminal they end between words."""
    console, lines = console or Console(), []
    for line in map(plain, text.splitlines()):
        indent = " " * (len(line) - len(line.lstrip()))
        options: Any = {"break_long_words": False, "break_on_hyphens": False}
        options["subsequent_indent"] = f"{indent}  " if indent else ""
        lines += textwrap.wrap(line, console.width, **options) or [""] if console.is_terminal else [line]
    console.print("\n".join(lines), markup=False, emoji=False, highlight=False, soft_wrap=True)


def shorten(text: str, width: int) -> str:
    """Return the text made plain, its middle left out where it is longer than `width` characters."""
    text = plain(text)
    if len(text) <= width:
        return text
    head = max(1, (width - 1) * 2 // 3)
    return f"{text[:head]}…{text[len(text) - max(0, width - 1 - head) :]}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as bars between their least and largest. More than `width` are drawn as means."""
    known = [value for value in values if math.isfinite(value)]
    if not known or width < 1:
        return ""
    count = min(width, len(known))
    edges = [len(known) * i // count for i in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span <= 1e-12 * max(1.0, abs(low)):
        return BARS[0] * count
    return "".join(BARS[min(len(BARS) - 1, int((m - low) / span * len(BARS)))] for m in means)


def duration(seconds: float) -> str:
    """Return seconds as people say them: 8 s, 3:05 min, 2:10 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def score_table(title: str, rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> Table:
    """Return scores by name and column. A score that was not measured is a dash. "" is no title."""
    table = Table(title=Text(plain(title)) if title else None, title_justify="left", title_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(Text(plain(column)), justify="right")
    for name, scores in rows.items():
        table.add_row(Text(plain(name)), *[f"{scores[c]:.3f}" if c in scores else "–" for c in columns])
    return table


_LEDGER = {
    "prompts": ("prompts", "{:,.0f}"),
    "tokens": ("tokens", "{:,.0f}"),
    "loss_share": ("of loss", "{:.0%}"),
    "gradient_share": ("of gradient", "{:.1%}"),
    "update_share": ("of update", "{:.1%}"),
    "loss": ("loss", "{:.3f}"),
    "kl": ("KL", "{:.3f}"),
    "overlap": ("overlap", "{:.2f}"),
    "reward": ("reward", "{:.3f}"),
    "entropy": ("entropy", "{:.2f}"),
    "seconds": ("seconds", "{:.1f}"),
    "wakes": ("wakes", "{:.0f}"),
}


def ledger_table(lines: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the ledger of a run as a table (`Ledger.totals`). A dash means not measured."""
    table = Table(title="teachers and domains", title_justify="left", title_style="bold", min_width=100)
    table.add_column("", no_wrap=True)
    for title, _ in _LEDGER.values():
        table.add_column(title, justify="right", no_wrap=True)
    for name, line in lines.items():
        cells = []
        for what, (_, form) in _LEDGER.items():
            cell = form.format(line[what]) if what in line else "–"
            share = line.get(f"{what}_share") if what in ("prompts", "tokens") else None
            cells.append(cell if share is None else f"{cell} {share:.0%}")
        table.add_row(Text(plain(name)), *cells)
    return table


def update_rest(rows: Sequence[Mapping[str, float]]) -> str:
    """Return a line with what no teacher had of the update, and the cosines of their gradients, as means."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(("update/", "cosine/")) and name != "update/clipping":  # totals() has it
                found.setdefault(name, []).append(value)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    rest = [f"{name[7:]} {mean:.1%}" for name, mean in means.items() if name.startswith("update/")]
    cosines = [f"{name[7:]} {mean:.2f}" for name, mean in means.items() if name.startswith("cosine/")]
    parts = {"rest of the update": rest, "cosines of gradients": cosines}
    return " · ".join(f"{title}: {', '.join(texts)}" for title, texts in parts.items() if texts)

"""Text of models and users as a terminal may show it, and numbers as a small line of bars."""

from __future__ import annotations

import html
import math
import re
import textwrap
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console

BARS = "▁▂▃▄▅▆▇█"
SHOWN_AS = {"\n": "↵", "\t": " ", "\r": "↵"}
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that steer a terminal, hide text or turn its direction."""


def plain(text: str) -> str:
    """One line without control characters: a line's end is ↵, all others are their escape, as \\x1b."""
    return "".join(_shown(character) for character in text.replace("\r\n", "\n"))


def _shown(character: str) -> str:
    if character in SHOWN_AS:
        return SHOWN_AS[character]
    if unicodedata.category(character) not in HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def say(text: str, console: Console | None = None) -> None:
    """Print lines as they are: nothing in them is markup, an emoji's name or steers the terminal.

    In a terminal they end between words; a word that is longer than a line, such as a path, stays whole.
    """
    console = console or Console()
    lines = [plain(line) for line in text.splitlines()]
    if console.is_terminal:
        lines = [part for line in lines for part in _wrapped(line, console.width)]
    console.print("\n".join(lines), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _wrapped(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    options: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}  " if indent else "", **options) or [""]


def shorten(text: str, width: int) -> str:
    """The text made plain, its middle left out where it is longer than `width` characters."""
    text = plain(text)
    if len(text) <= width:
        return text
    head = max(1, (width - 1) * 2 // 3)
    tail = max(0, width - 1 - head)
    return f"{text[:head]}…{text[len(text) - tail :]}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose cells show texts as they are: nothing in them is Markdown or HTML."""
    lines = [_markdown_row(columns), "|" + "---|" * len(columns), *map(_markdown_row, rows)]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(_markdown_cell(cell) for cell in cells)} |"


def _markdown_cell(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    text = "" if cell is None else html.escape(plain(str(cell)), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|])", r"\\\1", text)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars between their least and largest; more values than `width` are drawn as means."""
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
    """Seconds as people say them: 8 s, 3:05 min, 2:10 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"

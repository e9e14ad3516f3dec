"""Small tables for the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from practicum.observe.text import plain


def score_table(title: str, rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> Table:
    """Scores by name and column; a score that was not measured is shown as a dash. "" is no title."""
    table = Table(title=Text(plain(title)) if title else None, title_justify="left", title_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(Text(plain(column)), justify="right")
    for name, scores in rows.items():
        shown = [f"{scores[c]:.3f}" if c in scores else "–" for c in columns]
        table.add_row(Text(plain(name)), *shown)
    return table


_LEDGER = {
    "prompts": ("prompts", "{:,.0f}"),
    "tokens": ("tokens", "{:,.0f}"),
    "loss_share": ("of loss", "{:.0%}"),
    "gradient_share": ("of gradient", "{:.1%}"),
    "loss": ("loss", "{:.3f}"),
    "kl": ("KL", "{:.3f}"),
    "overlap": ("overlap", "{:.2f}"),
    "reward": ("reward", "{:.3f}"),
    "entropy": ("entropy", "{:.2f}"),
    "seconds": ("seconds", "{:.1f}"),
    "wakes": ("wakes", "{:.0f}"),
}


def ledger_table(lines: Mapping[str, Mapping[str, float]]) -> Table:
    """What each teacher and domain had of a run (teachers/ledger.py `totals`); a dash: not measured."""
    table = Table(title="teachers and domains", title_justify="left", title_style="bold", min_width=100)
    table.add_column("", no_wrap=True)
    for title, _ in _LEDGER.values():
        table.add_column(title, justify="right", no_wrap=True)
    for name, line in lines.items():
        cells = []
        for what, (_, form) in _LEDGER.items():
            cell = form.format(line[what]) if what in line else "–"
            share = line.get(f"{what}_share")
            cells.append(
                f"{cell} {share:.0%}" if share is not None and what in ("prompts", "tokens") else cell
            )
        table.add_row(Text(plain(name)), *cells)
    return table

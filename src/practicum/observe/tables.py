"""Small tables for the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table


def score_table(title: str, rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> Table:
    """Scores by name and column; a score that was not measured is shown as a dash."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, scores in rows.items():
        shown = [f"{scores[c]:.3f}" if c in scores else "–" for c in columns]
        table.add_row(name, *shown)
    return table

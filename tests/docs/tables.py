"""Tables of the docs, written from the code they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.padding_table import padding_table

from benchmarks import report_engines
from practicum.dataplane.fields import FIELDS, Field
from practicum.dataplane.padding_rows import padding_batch
from practicum.dataplane.ragged import Ragged
from practicum.learning.update_metrics import METRICS as UPDATE_METRICS
from practicum.recipe.text.schema_reference import markdown
from practicum.tasks.builtin import describe_tasks
from practicum.tasks.scorers import RewardSample
from practicum.trainer.step_metrics import METRICS

_LETTERS = {"prompt": "P", "response": "R", "sequence": "P+R"}
_SHOWN = 32


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    body = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", *body])


def fields_table() -> str:
    """Every field of a row."""
    rows = ((f"`{f.name}`", f.dtype, _shape(f), f.writer, f.about) for f in FIELDS.values())
    return table(("field", "dtype", "shape", "written by", "what"), rows)


def _shape(field: Field) -> str:
    if field.extent == "object":
        return "any"
    axes = [_LETTERS[field.extent]] if field.extent != "scalar" else []
    return f"[{', '.join([*axes, *field.trailing])}]"


def padding_rules_table() -> str:
    """What a padding row holds in each field, by rule."""
    widths = {letter: 2 for field in FIELDS.values() for letter in field.trailing}
    _, columns = padding_batch("train", 1, list(FIELDS), end_id=0, widths=widths)
    rules: dict[str, list[str]] = {}
    for name, column in columns.items():
        field = FIELDS[name]
        axes = [str(len(column[0]))] if isinstance(column, Ragged) else []
        shape = f" [{', '.join([*axes, *field.trailing])}]" if field.extent != "object" else ""
        rules.setdefault(f"`{field.padding}`", []).append(f"`{name}`{shape}")
    return table(("rule", "fields of a padding row"), ((rule, ", ".join(f)) for rule, f in rules.items()))


def metrics_table() -> str:
    """Every name that may stand in metrics.jsonl."""
    return table(("name", "what"), ((f"`{name}`", about) for name, about in METRICS.items()))


def update_metrics_table() -> str:
    """What stands behind train/ and critic/."""
    return table(("name", "what"), ((f"`{name}`", about) for name, about in UPDATE_METRICS.items()))


def tasks_table() -> str:
    """The built-in tasks, as `practicum tasks` lists them."""
    rows = []
    for task in describe_tasks():
        answer = task.answer if len(task.answer) <= _SHOWN else f"{task.answer[:_SHOWN]}…"
        options = "; ".join(f"`{name}` = {about}" for name, about in task.options.items())
        rows.append((f"`{task.name}`", task.about, f"`{task.prompt}` → `{answer}`", options))
    return table(("kind", "what", "example", "options and their defaults"), rows)


def machines_table() -> str:
    """Keys of a recipe that runs on a cluster, as `practicum schema` has them."""
    lines = markdown().splitlines()
    starts = ("| `runtime.", "| `pools.", "| `rollout.replicas`", "| `teachers.<name>.placement.own.")
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(starts)]
    return table(("key", "takes", "default", "about"), rows)


def sample_fields() -> list[str]:
    """What a reward function is given."""
    return [field.name for field in dataclasses.fields(RewardSample)]


def _of_engines(part: Callable[[Mapping[str, Any]], str]) -> Callable[[], str]:
    """A table of the benchmark of engines, from its last run."""
    return lambda: part(report_engines.measured())


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "fields": ("dataplane.md", fields_table),
    "padding rules": ("padding.md", padding_rules_table),
    "padding": ("padding.md", padding_table),
    "metrics": ("runs.md", metrics_table),
    "update metrics": ("runs.md", update_metrics_table),
    "tasks": ("tasks.md", tasks_table),
    "machines": ("recipes.md", machines_table),
    "speeds of engines": ("engines.md", _of_engines(report_engines.speeds)),
    "weights of engines": ("engines.md", _of_engines(report_engines.weights)),
    "rests of engines": ("engines.md", _of_engines(report_engines.rests)),
    "neighbours of engines": ("engines.md", _of_engines(report_engines.neighbours)),
}
"""Each table's page and maker; there it stands between the comments <!-- table: name --> and <!-- end -->."""


def update_page(text: str, name: str) -> str:
    """The page with this table written anew."""
    begin = f"<!-- table: {name} -->\n"
    before, _, rest = text.partition(begin)
    _, closed, after = rest.partition("\n<!-- end -->")
    assert closed, f"the page lacks the comments around the table {name!r}"
    return before + begin + TABLES[name][1]() + closed + after


if __name__ == "__main__":  # writes the tables into docs/, from the root of the repository
    for name, (page, _) in TABLES.items():
        path = Path("docs") / page
        path.write_text(update_page(path.read_text(), name))

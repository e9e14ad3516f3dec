"""What docs/teachers.md says of divergences, of the ledger and of sizes is what the code does."""

from __future__ import annotations

import re
from typing import get_args

import torch

from practicum.dataplane.fields import FIELDS
from practicum.observe.tables import ledger_table
from practicum.places.remote_teacher import TOLERANCE
from practicum.recipe.checks.divergences import why_unfit
from practicum.recipe.schema.teacher_sections import Distill, Divergence, Route
from practicum.teachers.ledger import Ledger
from practicum.trainer.step_metrics import METRICS

from .pages import ROOT

PAGE = ROOT / "docs/teachers.md"
SIGNALS = ("sampled", "top_k", "full")


def rows_of(header: str) -> list[list[str]]:
    """The cells of the table whose header begins so."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header}"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def words(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_divergence_is_in_the_table_with_its_signals():
    shown = {words(row[0])[0]: words(row[1]) for row in rows_of("divergence")}
    fitting = {
        name: [signal for signal in SIGNALS if why_unfit(name, signal, "loss") is None]
        for name in get_args(Divergence)
    }
    assert shown == fitting


def test_the_defaults_are_those_of_the_page():
    usual = next(row[1] for row in rows_of("which when") if row[0] == "the usual case")
    assert words(usual) == [Distill().divergence, Distill().signal]
    assert f"the teacher's {Distill().top_k} best tokens" in PAGE.read_text()


def test_every_column_and_metric_of_the_ledger_is_in_the_table():
    rows = rows_of("column")
    assert [row[0] for row in rows] == [str(column.header) for column in ledger_table({}).columns][1:]
    measured = [name.removeprefix("teacher/<teacher>/") for name in METRICS if name.startswith("teacher/")]
    assert sorted(word for row in rows for word in words(row[1])) == sorted(measured)


def test_the_warning_is_what_the_page_shows():
    ledger = Ledger({"counter": {"gradient_share": 0.009, "prompts_share": 0.2}}, {})
    assert f"`{ledger.starved(None)}`" in PAGE.read_text()
    assert Route().measure_every > 0


def test_sizes_of_signals_are_those_of_the_fields():
    def size(*names: str) -> int:
        return sum(getattr(torch, FIELDS[name].dtype).itemsize for name in names)

    token, best, hidden = (
        size("teacher_logprobs"),
        size("teacher_topk_ids", "teacher_topk_logprobs"),
        size("teacher_hidden"),
    )
    shown = {words(row[0])[0]: row[1:3] for row in rows_of("signal")}
    assert shown["sampled"] == [f"{token} bytes", f"{token}"]
    assert shown["top_k"] == [f"{token} + {best} K", f"{token + 32 * best:,}"]
    assert shown["full"][0] == f"{token} + {hidden} H"
    assert shown["full"][1].startswith(f"{token + 4096 * hidden:,} ")


def test_limits_in_numbers_are_those_of_the_code():
    text = PAGE.read_text()
    rounding = f"{torch.finfo(torch.float32).eps:.1e}".replace("e-07", "e-7")
    assert f"known up to rounding alone ({rounding} in float32)" in text
    assert f"(within {TOLERANCE:.0e})".replace("e-03", "e-3") in text

"""The panel as a person sees it: drawn into a pseudo-terminal, read by a terminal emulator."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from practicum.observe.progress import ProgressView
from practicum.observe.text import duration, plain, say, shorten, sparkline

from .screens import terminal

STEP = {
    "time/step": 2.0,
    "time/rollout": 1.2,
    "time/update_student": 0.5,
    "time/reward": 0.2,
    "reward/mean": 0.5,
    "train/approx_kl": 0.01,
    "rollout/tokens_per_second": 3120.0,
}
SAMPLE = {
    "task": "copy",
    "prompt": "copy: a\x1b[2Jb [bold]",
    "response": "a\nb",
    "expected": "ab",
    "reward": 1.0,
}


def test_a_long_sentence_ends_its_lines_between_words():
    sentence, path = " ".join(["learning nothing"] * 12), "/" + "deep/" * 20
    with terminal(80) as seen:
        say(f"{sentence}\n{path}", Console(file=seen.file, force_terminal=True, width=80))
    assert " ".join(seen.lines[:3]) == sentence
    assert "".join(seen.lines[3:]) == path


def panel_at(columns: int, rows: int = 40, warnings: int = 1) -> list[str]:
    """The screen in the middle of a run of 80 steps, as it is when the panel was drawn last."""
    with terminal(columns, rows) as seen:
        console = Console(file=seen.file, force_terminal=True, width=columns, height=rows)
        view = ProgressView("my-run", 80, console=console)
        view.step(0, {"eval/greedy": 0.25})
        for number in range(1, 31):
            view.step(number, STEP | {"reward/mean": number / 40})
        view.stage("rollout")
        view.sample(SAMPLE)
        for _ in range(warnings):
            view.warn("all groups were flat: see rollout.temperature")
        console.print(view._panel(), end="")
    return seen.lines


def test_a_low_terminal_has_the_warnings_and_leaves_out_what_says_less():
    for rows, has_more in ((40, True), (12, False)):
        lines = panel_at(80, rows, warnings=3)
        assert lines[0].startswith("╭─ my-run")
        assert lines[-1].startswith("╰─")
        shown = "\n".join(lines)
        assert shown.count("! all groups were flat") == 3
        assert ("newest sample" in shown, "s/step" in shown) == (has_more, has_more)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_every_line_of_the_panel_is_inside_its_frame(columns: int):
    first, *rows, last = panel_at(columns)
    assert first.startswith("╭─ my-run ─")
    assert (first[-1], last[0], last[-1]) == ("╮", "╰", "╯")
    for row in (first, *rows, last):
        assert len(row) == columns
    for row in rows:
        assert (row[0], row[-1]) == ("│", "│")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_panel_says_each_thing_once_and_with_its_label(columns: int):
    rows = panel_at(columns)
    text = "\n".join(rows)
    assert "step 30/80 · rollout" in rows[1]
    assert "1:40 min left" in rows[1]
    assert set(rows[2].strip("│ ")) <= set("━╸╺"), "the bar has its line"
    for label in ("reward", "eval", "KL of update"):
        (row,) = [row for row in rows if row.startswith(f"│ {label} ")]
        assert any(bar in row for bar in "▁▂▃▄▅▆▇█")
    assert text.count("rollout 60%") == 1
    assert text.count("3,120 tokens/s") == 1
    assert "newest sample · copy · reward 1.000" in text
    assert r"? copy: a\x1b[2Jb [bold]" in text
    assert "> a↵b" in text
    assert "! all groups were flat: see rollout.temperature" in text


def test_the_live_panel_leaves_one_line_behind():
    with terminal(80) as seen:
        console = Console(file=seen.file, force_terminal=True, width=80, height=40)
        with ProgressView("my-run", 80, console=console) as view:
            view.step(1, STEP)
            view.say("a [line] that stays")
    assert b"\xe2\x95\xad" in seen.raw, "a panel was drawn"
    assert seen.lines[0] == "a [line] that stays"
    assert seen.lines[1].startswith("my-run · step 1/80 · reward 0.500")
    assert len(seen.lines) == 3, "that line is wrapped once"


def test_without_a_terminal_there_is_a_line_at_the_start_and_for_each_evaluation():
    out = io.StringIO()
    with ProgressView("my\x1b-run", 80, console=Console(file=out)) as view:
        view.starting("loading model small")
        view.step(0, {"eval/greedy": 0.25})
        for number in (1, 2, 3):
            view.step(number, STEP | ({"eval/greedy": 0.75} if number == 2 else {}))
        view.warn("flat [groups]")
    lines = out.getvalue().splitlines()
    assert lines[0] == r"my\x1b-run · starting · step 0/80"
    assert lines[1] == "loading model small …"
    assert [line.split(" · ")[1] for line in lines[2:4]] == ["step 0/80", "step 2/80"]
    assert "eval 0.750" in lines[3]
    assert lines[4] == "warning: flat [groups]"
    assert lines[5].split(" · ")[1] == "step 3/80"
    assert len(lines) == 6
    assert not [c for c in out.getvalue() if unicodedata.category(c) == "Cc" and c != "\n"]


@given(st.text())
def test_plain_text_steers_no_terminal(text: str):
    assert not [c for c in plain(text) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def test_small_texts():
    assert sparkline([0, 1, 2, 3], 10) == "▁▃▆█"
    assert sparkline([1.0, 1.0, float("nan")], 10) == "▁▁"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert shorten("abcdefghij", 7) == "abcd…ij"
    assert [duration(s) for s in (8, 185, 7800)] == ["8 s", "3:05 min", "2:10 h"]

"""What the viewer reads of a run folder, and what it makes of it, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.models.tokenizer import make_tokenizer
from practicum.observe.records.record_files import HEADER
from practicum.observe.text import BYTE_LETTERS
from practicum.observe.view.recorded_pages import TokenTexts
from practicum.observe.view.run_tables import thin
from practicum.observe.view.run_view import RunView
from practicum.observe.view.web_app import to_json
from practicum.trainer.run_folder import append_lines

from .served import live_start, sample, write_run, write_versions


def test_a_file_is_read_on_as_it_grows_and_again_after_it_was_cut(tmp_path: Path):
    run = write_run(tmp_path / "run", [{"step": step, "a": step} for step in (1, 2)])
    view = RunView(run, "run")
    with view.fresh("metrics"):
        assert view.metrics.steps == [1, 2]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "a": 3}\n{"step": 4, "a"')
    with view.fresh("metrics"):
        assert view.metrics.steps == [1, 2, 3]
    size = len('{"step": 1, "a": 1}\n')
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:size])
    append_lines(run / "metrics.jsonl", [{"step": step, "a": -step} for step in (2, 3, 4, 5)])
    with view.fresh("metrics"):
        assert view.metrics.column("a") == ([1, 2, 3, 4, 5], [1, -2, -3, -4, -5])


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        ({"outcome": "done", "last_step": 4}, "done"),
        ({"outcome": "interrupted", "last_step": 2}, "interrupted"),
        ({"outcome": "stopped by RewardError: no", "last_step": 2}, "died"),
        (live_start(), "live"),
        (live_start() | {"pid": 2**22 + 1}, "lost"),
    ],
)
def test_the_state_of_a_run_is_that_of_its_last_start(tmp_path: Path, start: dict[str, Any], kind: str):
    run = write_run(tmp_path / "run", start={"outcome": None})
    write_versions(run, start)
    assert RunView(run, "run").info()["state"]["kind"] == kind


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=400), st.integers(2, 50))
def test_thinned_curves_keep_the_mean_and_the_extremes(values: list[float], points: int):
    array = np.asarray(values)
    found = thin(np.arange(len(values)), array, points)
    assert len(found["steps"]) <= max(points, 1)
    low, high = found["low"] or found["values"], found["high"] or found["values"]
    assert (min(low), max(high)) == pytest.approx((array.min(), array.max()), rel=1e-5, abs=0)  # six digits
    assert found["steps"] == sorted(set(found["steps"]))


def test_numbers_that_are_not_finite_are_reported_and_not_drawn():
    found = thin(np.arange(3), np.asarray([1.0, np.nan, np.inf]), 10)
    assert json.loads(to_json(found))["values"] == [1.0, None, None]
    assert found["odd"] == [[1, "nan"], [2, "inf"]]


def test_the_page_shows_checks_that_fired_and_what_the_rules_find(tmp_path: Path):
    recipe = {
        "name": "r",
        "model": {"path": "m"},
        "tasks": {"sort": {"kind": "sort"}},
        "checks": {"level": "warn"},
    }
    rows = [{"step": step, "rollout/truncated": 0.9, "checks/finite": 1.0} for step in range(1, 9)]
    found = RunView(write_run(tmp_path / "run", rows, recipe=recipe), "run").info()["advisories"]
    assert [(one["level"], one["kind"]) for one in found] == [
        ("alarm", "check finite"),
        ("warning", "length"),
    ]
    assert "rollout.max_new_tokens" in found[1]["sentence"]


def test_texts_of_tokens_show_every_byte(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    make_tokenizer().backend_tokenizer.save(str(path))
    texts = TokenTexts(path)
    ids = make_tokenizer().encode("a b<eos>")
    assert [(one["text"], one["special"]) for one in texts(ids)] == [
        ("a", False),
        (" ", False),
        ("b", False),
        ("<eos>", True),
    ]
    assert texts([10**6])[0]["text"] == "<1000000>"
    assert sorted(BYTE_LETTERS.values()) == list(range(256))


def test_parts_of_a_character_are_shown_as_bytes(tmp_path: Path):
    from tokenizers import Tokenizer, decoders, models

    letters = {byte: letter for letter, byte in BYTE_LETTERS.items()}
    pieces = ["é".encode()[:1], "é".encode()[1:], "é".encode(), b" x"]
    vocabulary = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    core.decoder = decoders.ByteLevel()
    core.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(tmp_path / "tokenizer.json")([0, 1, 2, 3])
    assert [one["text"] for one in texts] == ["<0xC3>", "<0xA9>", "é", " x"]


def test_scores_of_teachers_are_those_of_their_evaluation(tmp_path: Path):
    rows = [{"step": 0, "eval/greedy/copy": 0.2}, {"step": 4, "eval/greedy/copy": 0.9}]
    run = write_run(tmp_path / "run", rows, recipe={"teachers": {"a": {}}})
    view = RunView(run, "run")
    assert view.teachers()["scores"] == {"before training": {"copy": 0.2}, "student": {"copy": 0.9}}
    exam = {"base": {"eval/greedy": 0.2, "eval/greedy/copy": 0.2}, "a": {"eval/greedy/copy": 1.0}}
    (run / "scores.json").write_text(json.dumps(exam))
    assert view.teachers()["scores"] == {"base": {"copy": 0.2}, "teacher a": {"copy": 1.0}}


def test_stages_of_other_steps_that_ran_meanwhile_are_beside_those_of_a_step(tmp_path: Path):
    run = write_run(tmp_path / "run", [{"step": step, "time/step": 1.0} for step in (1, 2, 3)])
    (run / "record").mkdir()
    spans = [("rollout", 1, 0.0), ("update", 1, 1.0), ("rollout", 2, 1.001), ("update", 2, 2.0)]
    spans += [("rollout", 3, 3.0)]
    lines = [
        {"step": step, "stage": stage, "part": "", "role": "local", "number": 0, "began": at, "seconds": 1.0}
        for stage, step, at in spans
    ]
    append_lines(run / "record" / "local-0.jsonl", [HEADER, *lines])
    found = RunView(run, "run").step(1)["spans"]
    assert [(span["stage"], span["step"]) for span in found] == [
        ("rollout", 1),
        ("update", 1),
        ("rollout", 2),
    ]
    found = RunView(run, "run").step(3)["spans"]
    assert [(span["stage"], span["step"]) for span in found] == [("rollout", 3)]


def test_answers_are_searched_in_all_their_turns_and_nowhere_else(tmp_path: Path):
    spans = [{"sampled": False, "text": 'the Tool said "ÿ"\n', "tokens": 2}]
    turns = [{"prompt": "go", "spans": spans, "finish": "stop"}]
    rows = [sample(1, 4, 0), sample(1, 4, 1, trajectories=turns), sample(1, 5, 0, failure="Broke")]
    view = RunView(write_run(tmp_path / "run", samples=rows), "run")
    assert view.search("samples", 'tool SAID "ÿ"\n') == [1]
    assert view.search("samples", "copy:4") == [0, 1]
    assert view.search("samples", "broke") == [2]
    for word in ("finish", "null", "nothing has this"):
        assert view.search("samples", word) == []
    assert view.search("eval", "copy") == []


ODD: tuple[Any, ...] = (None, [], {}, "x", 1.5, True, [1, "x"], {"a": [None]}, -1)
KEYS = ("step", "group", "session", "reward", "domain", "response", "checks", "teachers", "route", "expected")


@pytest.mark.parametrize("key", [*KEYS, "starts", "track", "train"])
def test_damaged_files_are_shown_as_far_as_they_can_be(tmp_path: Path, key: str):
    for number, value in enumerate(ODD):
        line, half = {key: value}, b'{"step": 1, "a\xff\x00'
        run = write_run(tmp_path / str(number), [line, {"step": 1, "a": 1.0}], [line, sample(1, 1, 1) | line])
        (run / "recipe.yaml").write_text(json.dumps(line))
        (run / "versions.json").write_text(json.dumps({"practicum": "0", **line}))
        (run / "scores.json").write_text(json.dumps(line))
        for name in ("log.txt", "samples.jsonl"):
            with (run / name).open("ab") as file:
                file.write(half)
        view = RunView(run, "run")
        assert view.info()["step"] == 1
        for page in (view.teachers, view.recipe_page, view.log, view.newest_group):
            to_json(page())
        with view.fresh("samples"):
            columns = view.sessions["samples"].columns
        assert len({len(column) for column in columns.values()}) == 1

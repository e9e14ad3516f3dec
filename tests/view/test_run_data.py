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
from practicum.recipe.shipped import list_recipes
from practicum.records.record_files import HEADER
from practicum.trainer.run_folder import append_lines
from practicum.view.advisories import Evidence, advisories, repeated_share
from practicum.view.expected_band import Band, expected_band
from practicum.view.metric_table import MetricTable, thin
from practicum.view.run_view import RunView
from practicum.view.serve_view import name_runs
from practicum.view.token_texts import TokenTexts, byte_table
from practicum.view.web_app import to_json

from .served import live_start, sample, write_run, write_versions


def table_of(**columns: list[float]) -> MetricTable:
    table = MetricTable()
    length = max(map(len, columns.values()))
    for at in range(length):
        row = {name.replace("__", "/"): values[at] for name, values in columns.items()}
        table.add({"step": at + 1, **row})
    return table


def fired(teachers: bool = False, /, **columns: list[float]) -> dict[str, str]:
    """Names and levels of what fires on these metrics."""
    found = advisories(Evidence(table_of(**columns), {"teachers": {"t": {}}} if teachers else {}))
    return {one.name: one.level for one in found}


def test_a_file_is_read_on_as_it_grows_and_again_after_it_was_cut(tmp_path: Path):
    run = write_run(tmp_path / "run", [{"step": step, "a": step} for step in (1, 2)])
    view = RunView(run, "run")
    view.refresh("metrics")
    assert view.metrics.steps == [1, 2]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "a": 3}\n{"step": 4, "a"')
    view.refresh("metrics")
    assert view.metrics.steps == [1, 2, 3]
    size = len('{"step": 1, "a": 1}\n')
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:size])
    append_lines(run / "metrics.jsonl", [{"step": step, "a": -step} for step in (2, 3, 4, 5)])
    view.refresh("metrics")
    assert view.metrics.column("a") == ([1, 2, 3, 4, 5], [1, -2, -3, -4, -5])


def test_broken_lines_are_told_and_left_out(tmp_path: Path):
    run = write_run(tmp_path / "run", [{"step": 1, "a": 1}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a\n{"step": 3, "a": 3}\n')
    view = RunView(run, "run")
    assert view.info()["problems"] == [
        "metrics.jsonl: 1 line is no JSON and left out: was the run killed while it wrote?"
    ]
    assert view.metrics.steps == [1, 3]


def test_a_run_of_another_version_is_told(tmp_path: Path):
    run = write_run(tmp_path / "run", [{"step": 1, "a": 1}])
    old = sample(1, 4, 0)
    old["prompt_uid"] = old.pop("group")
    append_lines(run / "samples.jsonl", [old])
    (run / "versions.json").write_text(json.dumps({"practicum": "0.0.1"}))
    info = RunView(run, "run").info()
    assert "written by practicum 0.0.1" in info["problems"][0]
    assert RunView(run, "run").rows("samples")["columns"]["prompt"] == [4]


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


def test_a_folder_that_no_run_has_used_yet_waits(tmp_path: Path):
    info = RunView(tmp_path / "none", "none").info()
    assert info["state"]["kind"] == "waiting"
    assert info["names"] == []


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=400), st.integers(2, 50))
def test_thinned_curves_keep_the_mean_and_the_extremes(values: list[float], points: int):
    array = np.asarray(values)
    found = thin(np.arange(len(values)), array, points)
    assert len(found["steps"]) <= max(points, 1)
    low, high = found["low"] or found["values"], found["high"] or found["values"]
    assert (min(low), max(high)) == pytest.approx((array.min(), array.max()), rel=1e-5, abs=0)  # six digits
    assert found["steps"] == sorted(set(found["steps"]))


def test_numbers_that_are_not_finite_are_told_and_not_drawn():
    found = thin(np.arange(3), np.asarray([1.0, np.nan, np.inf]), 10)
    assert found["values"] == [1.0, None, None]
    assert found["odd"] == [[1, "nan"], [2, "inf"]]


@pytest.mark.parametrize(
    ("text", "band"),
    [
        ("eval/greedy 0.3 to 0.8: sometimes", Band("eval/greedy", 0.3, 0.8)),
        ("eval/greedy below 0.1 (seed 1: 0.008)", Band("eval/greedy", None, 0.1)),
        ("at least 0.98 (seed 1)", Band(None, 0.98, None)),
        ("at least 0.1 above the base model, or 0.95", Band(None, 0.6, None)),
        ("eval/mean@4 from 0.51 to 0.6 or more", Band("eval/mean@4", 0.6, None)),
        ("0.9 after 20 to 60 steps (seed 1: 35)", Band(None, 0.9, None)),
        ("reverse learns nothing", None),
        (None, None),
    ],
)
def test_what_a_recipe_expects_is_a_band(text: str | None, band: Band | None):
    assert expected_band(text, {"eval/greedy": 0.5}) == band


def test_most_shipped_recipes_have_a_band_that_can_be_drawn():
    texts = [one.expected for group in list_recipes().values() for one in group]
    first = {"eval/greedy": 0.5, "eval/mean@4": 0.5}
    assert sum(expected_band(text, first) is not None for text in texts) > 0.7 * len(texts)


def test_rules_fire_on_what_they_are_about_and_on_nothing_else():
    steady = [0.5] * 10
    falling = [1.0] * 5 + [0.1] * 5
    assert fired(train__entropy=falling) == {"entropy collapse": "warning"}
    assert fired(train__entropy=steady) == {}
    assert fired(True, train__entropy=falling) == {}
    growing = [10.0] * 5 + [20.0] * 5
    assert fired(rollout__response_tokens=growing, rollout__truncated=steady) == {
        "length inflation": "warning"
    }
    assert fired(rollout__response_tokens=growing, rollout__truncated=[0.0] * 10) == {}
    assert fired(groups__flat=[0.9] * 10) == {"flat groups": "warning"}
    assert fired(train__gap_mean=[1e-4] * 5 + [0.02] * 5) == {"train/rollout gap": "warning"}
    assert fired(train__gap_mean=[1e-7] * 5 + [1e-6] * 5) == {}
    assert fired(train__loss=[1.0, float("nan")]) == {"not finite": "alarm"}
    assert fired(checks__finite=[0.0, 1.0]) == {"check finite": "alarm"}
    assert fired(checks__finite=[1.0, 0.0]) == {}
    assert fired(rollout__failed=[2.0], rollout__sessions=[8.0]) == {"failed sessions": "alarm"}


def test_a_teacher_far_from_its_target_is_named_with_its_numbers():
    columns = {"teacher__a__gradient_share": [0.97], "teacher__b__gradient_share": [0.03]}
    shares = {"teacher__a__prompts_share": [0.5], "teacher__b__prompts_share": [0.5]}
    found = advisories(Evidence(table_of(**columns, **shares), {}))
    assert [(one.name, one.sentence) for one in found] == [
        ("large share", "a: 97% of the gradient, target 50%"),
        ("starved teacher", "b: 3% of the gradient, target 50%"),
    ]
    assert found[1].link == "rollouts?teacher=b&step=1"
    set_shares = {"route": {"shares": {"a": 0.97, "b": 0.03}}}
    assert advisories(Evidence(table_of(**columns, **shares), set_shares)) == []


def test_alarms_come_first_and_hints_only_alone():
    slow: dict[str, list[float]] = {"time__step": [1.0] * 10, "time__rollout": [0.9] * 10}
    assert fired(**slow) == {"slow stage": "hint"}
    both = fired(**slow, groups__flat=[1.0] * 10, checks__finite=[0.0] * 9 + [1.0])
    assert list(both.values()) == ["alarm", "warning"]


def test_repeated_text_is_noticed():
    assert repeated_share("the same words again and " * 20) > 0.8
    assert repeated_share("short " * 4) == 0.0
    assert repeated_share("".join(chr(40 + 7 * i % 80) + str(i) for i in range(60))) < 0.2
    answers = [sample(3, 1, session, response="abcdefgh" * 20) for session in range(4)]
    found = advisories(Evidence(MetricTable(), {}, answers))
    assert [one.name for one in found] == ["repetition"]


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
    assert sorted(byte_table().values()) == list(range(256))


def test_parts_of_a_character_are_shown_as_bytes(tmp_path: Path):
    from tokenizers import Tokenizer, decoders, models

    letters = {byte: letter for letter, byte in byte_table().items()}
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


def test_scores_of_teachers_come_from_their_runs_if_these_are_open(tmp_path: Path):
    write_run(tmp_path / "a", [{"step": 9, "eval/greedy/copy": 0.8}])
    teachers = {"a": {"model": "a/export"}, "b": {"adapter": str(tmp_path / "elsewhere")}, "c": None}
    student = write_run(
        tmp_path / "student",
        [{"step": 4, "eval/greedy/copy": 0.9}],
        recipe={"teachers": teachers},
        start={"directory": str(tmp_path)},
    )
    page = name_runs([student, tmp_path / "a"])[0].teachers()
    assert page["scores"] == {"teacher a": {"copy": 0.8}, "student": {"copy": 0.9}}
    assert page["teachers"] == {"a": "model a/export", "b": f"adapter {tmp_path}/elsewhere", "c": ""}
    assert "teacher a" not in name_runs([student])[0].teachers()["scores"]


def test_stages_of_other_steps_that_ran_meanwhile_are_beside_those_of_a_step(tmp_path: Path):
    run = write_run(tmp_path / "run", [{"step": step, "time/step": 1.0} for step in (1, 2, 3)])
    (run / "record").mkdir()
    spans = [("rollout", 1, 0.0), ("update", 1, 1.0), ("rollout", 2, 1.001), ("update", 2, 2.0)]
    spans += [("rollout", 3, 3.0)]
    lines = [
        {"step": step, "stage": stage, "role": "local", "number": 0, "began": at, "clock": at, "seconds": 1.0}
        for stage, step, at in spans
    ]
    append_lines(run / "record" / "stages-local-0.jsonl", [HEADER, *lines])
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
        for page in (view.teachers, view.recipe_page, view.log, view.newest_group, view.forecast):
            to_json(page())
        view.refresh("samples")
        columns = view.sessions["samples"].columns
        assert len({len(column) for column in columns.values()}) == 1

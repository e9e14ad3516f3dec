"""Dataset files: random access, and a bad row is named with file, line and reason."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.errors import DataError, MissingExtraError, RecipeError
from practicum.tasks.messages import image_parts, picture_message
from practicum.tasks.rows import RowReader, RowSource
from practicum.tasks.tables import open_files


def source_of(*paths: Path | str, **reading: Any) -> RowSource:
    """The rows of files or patterns, for a task t."""
    names, needs_answer = [str(path) for path in paths], reading.pop("needs_answer", False)
    source = RowSource(open_files(names, "tasks.t.file"), ", ".join(names), RowReader("t", **reading))
    source.check(needs_answer)
    return source


def write(path: Path, *lines: str | dict) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


texts = st.text(min_size=1).filter(lambda t: t.strip())
rows = st.lists(st.fixed_dictionaries({"prompt": texts, "answer": texts, "n": st.integers()}), min_size=1)


@given(rows)
def test_jsonl_rows_come_back_as_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    # ensure_ascii=False: line separators other than \n inside strings must not cut a row
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    source = source_of(path, needs_answer=True)
    assert [source.row(i) for i in reversed(range(len(source)))] == rows[::-1]


def test_blank_lines_and_bom_do_not_count_and_lines_are_the_editors(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}')
    source = source_of(path)
    assert [source.row(i)["prompt"] for i in range(len(source))] == ["a", "b"]
    assert source.where(0) == f"{path}, line 1"
    assert source.where(1) == f"{path}, line 4"


GOOD = {"prompt": "p", "answer": "a"}
USER = {"role": "user", "content": "hi"}
PLACE = {"type": "image"}
LOOK = {"role": "user", "content": [PLACE, {"type": "text", "text": "what?"}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": ', "not JSON"),
        ('{"prompt": "\xff"}', "not JSON"),
        ("[1, 2]", "found [1, 2], expected an object with named columns"),
        ({"promt": "x"}, "no column 'prompt' for the prompt, only 'promt'; did you mean 'promt'?"),
        ({"prompt": 3}, "found 3, expected a string or a list of messages"),
        ({"prompt": None}, "found None, expected"),
        ({"prompt": "  \n"}, "the prompt is empty"),
        ({"prompt": []}, "column 'prompt': List should have"),
        ({"prompt": ["hi"]}, "column 'prompt': at 0: "),
        ({"prompt": [USER, {"role": "boss", "content": "x"}]}, "column 'prompt': at 1.role: "),
        ({"prompt": [{"role": "user"}]}, "column 'prompt': at 0.content: "),
        ({"prompt": [{"role": "user", "content": []}]}, "column 'prompt': at 0.content"),
        ({"prompt": [{"role": "user", "content": ["hi"]}]}, "column 'prompt': at 0.content.0: "),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "column 'prompt': at 0.content.0: "),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}, "at 0.content.0.image"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": " "}]}]},
            "every message is empty",
        ),
        ({"prompt": "p", "images": "a.png"}, "column 'images': "),
        ({"prompt": "p", "images": [3]}, "column 'images': at 0: "),
        ({"prompt": [USER], "images": ["a.png"]}, "column 'images': 1 images for 0 places"),
        ({"prompt": [LOOK]}, "column 'images': 0 images for 1 places"),
        ({"prompt": [LOOK], "images": ["a.png", "b.png"]}, "column 'images': 2 images for 1 places"),
        ({"prompt": [USER, {"role": "assistant", "content": "x"}]}, "expected a user or tool message"),
        ({"prompt": [{"role": "user", "content": " "}]}, "every message is empty"),
        ({"prompt": "p"}, "no column 'answer' for the answer, only 'prompt'"),
        ({"prompt": "p", "answer": None}, "column 'answer': found None, expected a string or a number"),
        ({"prompt": "p", "answer": True}, "column 'answer': "),
        ({"prompt": "p", "answer": ["a"]}, "column 'answer': "),
        ({"prompt": "p", "answer": ""}, "the answer is empty"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_reason(tmp_path, row, reason):
    path = tmp_path / "rows.jsonl"
    line = row if isinstance(row, str) else json.dumps(row)
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError) as caught:
        source_of(path, needs_answer=True)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert reason in str(caught.value)


def test_answers_are_only_asked_for_when_needed_and_columns_have_any_name(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"question": "q", "solution": 4})
    assert len(source_of(path, prompt="question")) == 1
    assert len(source_of(path, prompt="question", answer="solution", needs_answer=True)) == 1


def test_first_ten_bad_rows_are_shown_and_the_rest_counted(tmp_path):
    path = write(tmp_path / "rows.jsonl", *[{"prompt": n} for n in range(14)], GOOD)
    with pytest.raises(DataError) as caught:
        source_of(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[9].startswith(f"{path}, line 10: ")
    assert lines[10] == "… and 4 more bad rows"


def test_rows_with_the_same_fault_are_one_line(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD, *[{"prompt": ""}] * 14, {"prompt": 3}, {"prompt": 3})
    with pytest.raises(DataError) as caught:
        source_of(path)
    first, second = str(caught.value).splitlines()
    assert first == f"{path}, line 2: column 'prompt': the prompt is empty (and 13 more)"
    assert second.startswith(f"{path}, line 16: ")
    assert second.endswith("(and 1 more)")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_an_error(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match="no rows"):
        source_of(tmp_path / "rows.jsonl")


def test_missing_file_and_unknown_format_are_errors(tmp_path):
    (tmp_path / "rows.tsv").write_text("prompt\nx\n")
    for path in (tmp_path, tmp_path / "rows.jsonl", tmp_path / "rows.tsv"):
        with pytest.raises(RecipeError, match=r"tasks\.t\.file: found "):
            source_of(path)


def test_a_file_that_changes_under_us_is_noticed(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD, GOOD)
    source = source_of(path)
    path.write_text("")
    with pytest.raises(DataError, match="the file changed during the run"):
        source.row(1)


def test_pictures_stand_before_a_string(tmp_path):
    source = source_of(write(tmp_path / "a.jsonl", {"prompt": "what?", "images": ["x/1.png", "/2.png"]}))
    assert source.has_pictures
    assert not source.has_messages
    (message,) = source.content(0, source.row(0))
    assert message == picture_message([str(tmp_path / "x/1.png"), "/2.png"], "what?")


def test_pictures_fill_their_places_in_order_and_paths_start_from_the_file(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    own = {"type": "image", "image": "own.png"}
    chat = [{"role": "user", "content": [PLACE, own, PLACE]}, {"role": "assistant", "content": "a"}, LOOK]
    row = {"prompt": chat, "images": ["1.png", "2.png", "3.png"]}
    write(tmp_path / "data" / "a.jsonl", row)
    monkeypatch.chdir(tmp_path)
    source = source_of("data/a.jsonl")
    found = [part["image"] for part in image_parts(source.content(0, source.row(0)))]
    assert found == [str(tmp_path / "data" / name) for name in ("1.png", "own.png", "2.png", "3.png")]
    assert source.row(0) == row


@pytest.mark.parametrize("images", [{}, {"images": None}, {"images": []}])
def test_rows_without_pictures_stay_strings(tmp_path, images):
    source = source_of(write(tmp_path / "a.jsonl", {**GOOD, **images}))
    assert source.content(0, source.row(0)) == "p"
    assert not source.has_pictures


def test_digest_follows_the_content(tmp_path):
    one = source_of(write(tmp_path / "a.jsonl", GOOD)).digest
    assert source_of(write(tmp_path / "b.jsonl", GOOD)).digest == one
    assert source_of(write(tmp_path / "c.jsonl", {**GOOD, "x": 1})).digest != one


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "hf")


def parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_parquet_rows_with_messages(tmp_path):
    system = {"role": "system", "content": "be brief", "name": "boss"}
    rows = [{"prompt": [system, USER], "answer": str(n), "level": n} for n in range(5)]
    source = source_of(parquet(tmp_path / "rows.parquet", rows), needs_answer=True)
    # Arrow fills the user's missing name with null, which must not reach a chat template
    assert [source.row(i) for i in range(5)] == rows
    assert source.has_messages


def test_parquet_rows_with_parts_and_pictures(tmp_path):
    rows = [{"prompt": [LOOK, LOOK], "images": ["1.png", "2.png"]}, {"prompt": [LOOK], "images": ["3.png"]}]
    source = source_of(parquet(tmp_path / "rows.parquet", rows))
    # Arrow gives every part a text, which for a picture is null
    assert [source.row(i) for i in range(2)] == rows
    assert [part["image"] for part in image_parts(source.content(1, rows[1]))] == [str(tmp_path / "3.png")]


def test_bad_parquet_row_is_named(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": None}, {"prompt": "d"}]
    path = parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(DataError) as caught:
        source_of(path)
    assert str(caught.value).startswith(f"{path}, row 3: column 'prompt'")


def test_a_broken_parquet_file_is_an_error(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: not a Parquet file"):
        source_of(tmp_path / "rows.parquet")


def test_parquet_without_datasets_names_the_extra(tmp_path, monkeypatch):
    path = parquet(tmp_path / "rows.parquet", [{"prompt": "a"}])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"practicum\[datasets\]"):
        source_of(path)


@settings(max_examples=30)
@given(rows)
def test_json_and_csv_rows_come_back_as_written(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    source = source_of(folder / "rows.json", needs_answer=True)
    assert [source.row(i) for i in range(len(source))] == rows
    with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer", "n"])
        writer.writeheader()
        writer.writerows(rows)
    source = source_of(folder / "rows.csv", needs_answer=True)
    as_text = [{name: str(value) for name, value in row.items()} for row in rows]
    assert [source.row(i) for i in reversed(range(len(source)))] == as_text[::-1]


def test_csv_keeps_line_breaks_and_quotes(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"two\r\nlines",007\r\n\r\n"say ""hi""",2\r\n')
    source = source_of(path, needs_answer=True)
    assert [source.row(i)["prompt"] for i in range(2)] == ["two\r\nlines", 'say "hi"']
    assert source.row(0)["answer"] == "007"
    assert source.where(1) == f"{path}, row 2"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "prompt,answer\na,1\nb\n", ", row 2: 1 values for the 2 columns of the first line"),
        ("a.csv", "prompt,prompt\na,1\n", "the first line names the columns 'prompt', 'prompt'"),
        ("a.csv", "prompt,answer\na,1\n,2\n", ", row 2: column 'prompt': the prompt is empty"),
        ("a.csv", 'prompt,answer\na,1\n"b,2\n', ", row 2: not CSV: unexpected end of data"),
        ("a.csv", "prompt,answer\n", "has no rows"),
        ("a.json", '[\n {"prompt": "a"},\n {"prompt" "b"}\n]', "not JSON: .*: line 3 column 12"),
        (
            "a.json",
            '[\n {"prompt": "a"},\n\n {"prompt": 3}]',
            ", row 2: column 'prompt': found 3, expected a string",
        ),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}\n', "for one object per line, name the file .jsonl"),
        ("a.json", '{"prompt": "a"}', "found dict, expected an array of objects"),
        ("a.json", "[]", "has no rows"),
        ("a.jsonl", '{"prompt": "b"}\n{"prompt": "a", }', ", line 2: not JSON: .* column 1"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=reason):
        source_of(tmp_path / name)


def test_several_files_and_patterns_are_one_after_the_other(tmp_path):
    for folder, name, count in (("b", "x.jsonl", 2), ("a", "x.jsonl", 1), ("a", "y.jsonl", 3)):
        (tmp_path / folder).mkdir(exist_ok=True)
        texts = [{"prompt": f"{folder}{name[0]}{n}", "images": ["p.png"]} for n in range(count)]
        write(tmp_path / folder / name, *texts)
    (tmp_path / "more.csv").write_text("prompt\nlast\n")
    source = source_of(tmp_path / "*" / "*.jsonl", tmp_path / "more.csv", tmp_path / "a" / "x.jsonl")
    prompts = [source.row(i)["prompt"] for i in range(len(source))]
    assert prompts == ["ax0", "ay0", "ay1", "ay2", "bx0", "bx1", "last"]
    assert source.where(3) == f"{tmp_path}/a/y.jsonl, line 3"
    assert source.where(6) == f"{tmp_path}/more.csv, row 1"
    shown = [part["image"] for i in (0, 4) for part in image_parts(source.content(i, source.row(i)))]
    assert shown == [f"{tmp_path}/a/p.png", f"{tmp_path}/b/p.png"]
    assert source.digest != source_of(tmp_path / "*" / "*.jsonl").digest


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"question": "q", "answer": 1}, "; set tasks.t.prompt: question"),
        ({"problem": "q", "text": "x"}, "; set tasks.t.prompt: problem"),
        ({"prompt": "q", "solution": 1}, "; set tasks.t.answer: solution"),
        ({"prompts": "q", "level": "x"}, "; did you mean 'prompts'?"),
        ({"cells": "q"}, "only 'cells'"),
        ({"prompt;answer": "q;a"}, "; columns of a CSV file are separated by commas"),
    ],
)
def test_a_column_that_is_probably_meant_is_suggested(tmp_path, row, hint):
    with pytest.raises(DataError) as caught:
        source_of(write(tmp_path / "rows.jsonl", row), needs_answer=True)
    assert str(caught.value).endswith(hint)

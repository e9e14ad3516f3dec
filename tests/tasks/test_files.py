"""Dataset files: random access, and a bad row is named with file, line and reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.errors import DataError, MissingExtraError
from practicum.tasks.files import FileSource
from practicum.tasks.messages import image_parts, picture_message


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
    source = FileSource(path, needs_answer=True)
    assert [source.row(i) for i in reversed(range(len(source)))] == rows[::-1]


def test_blank_lines_and_bom_do_not_count_and_lines_are_the_editors(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}')
    source = FileSource(path)
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
        ("[1, 2]", "a row is an object with named columns, this is list [1, 2]"),
        ({"promt": "x"}, "no column 'prompt' for the prompt, only 'promt'; did you mean 'promt'?"),
        ({"prompt": 3}, "a prompt is a string or a list of messages, this is int 3"),
        ({"prompt": None}, "this is null"),
        ({"prompt": "  \n"}, "the prompt is empty"),
        ({"prompt": []}, "the prompt has no messages"),
        ({"prompt": ["hi"]}, "message 1 is str 'hi'"),
        ({"prompt": [USER, {"role": "boss", "content": "x"}]}, "message 2 has role 'boss'"),
        ({"prompt": [{"role": "user"}]}, "message 1 has content null, expected a string"),
        ({"prompt": [{"role": "user", "content": []}]}, "content list [], expected a string or a list"),
        ({"prompt": [{"role": "user", "content": ["hi"]}]}, "message 1 has part 1 str 'hi', expected {"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "message 1 has part 1 dict"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}, "message 1 has part 1"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": " "}]}]},
            "every message is empty",
        ),
        ({"prompt": "p", "images": "a.png"}, "column 'images': pictures are a list of paths, this is str"),
        ({"prompt": "p", "images": [3]}, "column 'images': pictures are a list of paths"),
        ({"prompt": [USER], "images": ["a.png"]}, "column 'images': 1 pictures for 0 places"),
        ({"prompt": [LOOK]}, "column 'images': 0 pictures for 1 places"),
        ({"prompt": [LOOK], "images": ["a.png", "b.png"]}, "column 'images': 2 pictures for 1 places"),
        ({"prompt": [USER, {"role": "assistant", "content": "x"}]}, "nothing is left to answer"),
        ({"prompt": [{"role": "user", "content": " "}]}, "every message is empty"),
        ({"prompt": "p"}, "no column 'answer' for the answer, only 'prompt'"),
        ({"prompt": "p", "answer": None}, "column 'answer': an answer is a string or a number"),
        ({"prompt": "p", "answer": True}, "this is bool True"),
        ({"prompt": "p", "answer": ["a"]}, "this is list ['a']"),
        ({"prompt": "p", "answer": ""}, "the answer is empty"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_reason(tmp_path, row, reason):
    path = tmp_path / "rows.jsonl"
    line = row if isinstance(row, str) else json.dumps(row)
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError) as caught:
        FileSource(path, needs_answer=True)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert reason in str(caught.value)


def test_answers_are_only_asked_for_when_needed(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"prompt": "p"})
    assert len(FileSource(path, needs_answer=False)) == 1


def test_other_column_names(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"question": "q", "solution": 4})
    assert len(FileSource(path, "question", "solution", needs_answer=True)) == 1


def test_first_ten_bad_rows_are_shown_and_the_rest_counted(tmp_path):
    path = write(tmp_path / "rows.jsonl", *[{"prompt": ""}] * 14, GOOD)
    with pytest.raises(DataError) as caught:
        FileSource(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[9].startswith(f"{path}, line 10: ")
    assert lines[10] == "… and 4 more bad rows"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_an_error(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match="no rows"):
        FileSource(tmp_path / "rows.jsonl")


def test_missing_file_and_unknown_format_are_errors(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        FileSource(tmp_path / "rows.jsonl")
    (tmp_path / "rows.csv").write_text("prompt\nx\n")
    with pytest.raises(DataError, match=r"ends in \.jsonl or \.parquet"):
        FileSource(tmp_path / "rows.csv")


def test_a_file_that_changes_under_us_is_noticed(tmp_path):
    path = write(tmp_path / "rows.jsonl", GOOD, GOOD)
    source = FileSource(path)
    path.write_text("")
    with pytest.raises(DataError, match="changed while it was in use"):
        source.row(1)


def test_has_messages(tmp_path):
    assert not FileSource(write(tmp_path / "a.jsonl", GOOD)).has_messages
    assert FileSource(write(tmp_path / "b.jsonl", GOOD, {"prompt": [USER]})).has_messages


def test_pictures_stand_before_a_string(tmp_path):
    source = FileSource(write(tmp_path / "a.jsonl", {"prompt": "what?", "images": ["x/1.png", "/2.png"]}))
    assert source.has_pictures
    assert not source.has_messages
    (message,) = source.content(source.row(0))
    assert message == picture_message([str(tmp_path / "x/1.png"), "/2.png"], "what?")


def test_pictures_fill_their_places_in_order_and_paths_start_from_the_file(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    own = {"type": "image", "image": "own.png"}
    chat = [{"role": "user", "content": [PLACE, own, PLACE]}, {"role": "assistant", "content": "a"}, LOOK]
    row = {"prompt": chat, "shots": ["1.png", "2.png", "3.png"]}
    write(tmp_path / "data" / "a.jsonl", row)
    monkeypatch.chdir(tmp_path)
    source = FileSource("data/a.jsonl", images_column="shots")
    found = [part["image"] for part in image_parts(source.content(source.row(0)))]
    assert found == [str(tmp_path / "data" / name) for name in ("1.png", "own.png", "2.png", "3.png")]
    assert source.row(0) == row


@pytest.mark.parametrize("images", [{}, {"images": None}, {"images": []}])
def test_rows_without_pictures_stay_strings(tmp_path, images):
    source = FileSource(write(tmp_path / "a.jsonl", {**GOOD, **images}))
    assert source.content(source.row(0)) == "p"
    assert not source.has_pictures


def test_digest_follows_the_content(tmp_path):
    one = FileSource(write(tmp_path / "a.jsonl", GOOD)).digest
    assert FileSource(write(tmp_path / "b.jsonl", GOOD)).digest == one
    assert FileSource(write(tmp_path / "c.jsonl", {**GOOD, "x": 1})).digest != one


def parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_parquet_rows_with_messages(tmp_path):
    system = {"role": "system", "content": "be brief", "name": "boss"}
    rows = [{"prompt": [system, USER], "answer": str(n), "level": n} for n in range(5)]
    source = FileSource(parquet(tmp_path / "rows.parquet", rows), needs_answer=True)
    # Arrow fills the user's missing name with null, which must not reach a chat template
    assert [source.row(i) for i in range(5)] == rows
    assert source.has_messages


def test_parquet_rows_with_parts_and_pictures(tmp_path):
    rows = [{"prompt": [LOOK, LOOK], "images": ["1.png", "2.png"]}, {"prompt": [LOOK], "images": ["3.png"]}]
    source = FileSource(parquet(tmp_path / "rows.parquet", rows))
    # Arrow gives every part a text, which for a picture is null
    assert [source.row(i) for i in range(2)] == rows
    assert [part["image"] for part in image_parts(source.content(rows[1]))] == [str(tmp_path / "3.png")]


def test_bad_parquet_row_is_named(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": None}, {"prompt": "d"}]
    path = parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(DataError) as caught:
        FileSource(path)
    assert str(caught.value).startswith(f"{path}, row 3: column 'prompt'")


def test_a_broken_parquet_file_is_an_error(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: not a Parquet file"):
        FileSource(tmp_path / "rows.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = parquet(tmp_path / "rows.parquet", [{"prompt": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"practicum\[parquet\]"):
        FileSource(path)

"""`check_data` finds every mistake in tasks, rewards and rows before any work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.sessions.sessions import byte_tokenizer

from practicum.errors import DataError, MissingExtraError, RecipeErrors
from practicum.models.processor import make_vision_tokenizer
from practicum.recipe.schema.recipe import MakeModel, Model, Recipe
from practicum.trainer.check_data import check_data, hidden_tools


def recipe(tasks: dict[str, Any], **sections: Any) -> Recipe:
    given = {"name": "r", "model": Model(random_init=MakeModel()), "tasks": tasks, "train": {"prompts": 1}}
    return Recipe.model_validate({**given, "eval": {"every": 0}, **sections})


def rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def findings(recipe: Recipe) -> list[str]:
    sees = recipe.model.random_init is not None and recipe.model.random_init.family == "qwen2_5_vl"
    return check_data(recipe, make_vision_tokenizer() if sees else byte_tokenizer("chatml"), 1000).findings


def problems(recipe: Recipe) -> dict[str, str]:
    with pytest.raises(RecipeErrors) as caught:
        findings(recipe)
    return {error.path: str(error) for error in caught.value.errors}


def test_good_tasks_are_described(tmp_path):
    file = rows(tmp_path / "a.jsonl", {"prompt": "p", "answer": "a"})
    assert findings(recipe({"sort": {"kind": "sort"}, "file": {"file": file}}))[:3] == [
        "tasks.sort: built-in sort, 128 evaluation prompts",
        f"tasks.file: {file} has 1 rows",
        "tasks.file: not evaluated, as eval_file is not set",
    ]


def test_tools_that_the_chat_template_does_not_show_are_a_warning():
    with_tools = recipe({"sort": {"kind": "sort"}}, agent={"loop": "tool_use", "tools": ["calculator"]})
    (warning,) = hidden_tools(with_tools, byte_tokenizer("llama3"))
    assert "calculator" in warning
    assert list(hidden_tools(with_tools, byte_tokenizer("chatml"))) == []
    assert list(hidden_tools(recipe({"sort": {"kind": "sort"}}), byte_tokenizer("llama3"))) == []


def test_small_evaluation_sets_are_mentioned():
    tasks = {"c": {"kind": "compare", "options": {"digits": 1}}}
    assert "of 128 asked for" in findings(recipe(tasks))[0]


def test_all_mistakes_are_shown_together(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    found = problems(
        recipe(
            {
                "a": {"kind": "srot"},
                "b": {"kind": "sort", "options": {"lenght": 3}},
                "c": {"file": str(tmp_path / "row.jsonl")},
                "e": {"file": str(tmp_path)},
                "f": {"kind": "sort", "system": "be kind"},
                "g": {"kind": "copy", "options": {"length": 1, "letters": 1}},
            },
            reward={"functions": [{"use": "nowhere:f"}]},
        )
    )
    assert set(found) == {
        "tasks.a.kind",
        "tasks.b.options.lenght",
        "tasks.c.file",
        "tasks.e.file",
        "tasks.f.system",
        "tasks.g.options",
        "reward.functions[0].use",
    }
    assert "did you mean sort?" in found["tasks.a.kind"]
    assert f"did you mean {tmp_path / 'rows.jsonl'}?" in found["tasks.c.file"]


def test_bad_rows_of_several_files_are_shown_together(tmp_path):
    one = rows(tmp_path / "one.jsonl", {"prompt": "p"})
    two = rows(tmp_path / "two.jsonl", {"prompt": "p", "answer": "a"}, {"answer": "a"})
    with pytest.raises(DataError) as caught:
        findings(recipe({"one": {"file": one}, "two": {"file": two}}))
    assert f"{one}, line 1: no column 'answer'" in str(caught.value)
    assert f"{two}, line 2: no column 'prompt'" in str(caught.value)


def test_eval_files_are_checked_too(tmp_path):
    good = rows(tmp_path / "good.jsonl", {"prompt": "p", "answer": "a"})
    bad = rows(tmp_path / "bad.jsonl", {"prompt": "p", "anwser": "a"})
    with pytest.raises(DataError, match=r"bad\.jsonl, line 1: .*did you mean 'anwser'"):
        findings(recipe({"t": {"file": good, "eval_file": bad}}))


def test_answers_are_needed_by_comparing_rewards_and_loops_and_by_demonstrations(tmp_path):
    file = rows(tmp_path / "a.jsonl", {"prompt": "p"})
    free = {"functions": [{"use": "math:sqrt"}]}
    assert findings(recipe({"t": {"file": file}}, reward=free))
    supervised = {"loss": "supervised", "advantage": "none"}
    supervised = recipe({"t": {"file": file}}, reward=free, algorithm=supervised)
    assert supervised.tasks_needing_answer == {"t"}
    with pytest.raises(DataError, match="no column 'answer'"):
        findings(supervised)
    own = recipe({"t": {"file": file, "rewards": [{"use": "contains"}]}}, reward=free)
    retries = recipe({"t": {"file": file}}, reward=free, agent={"loop": "retry"})
    assert own.tasks_needing_answer == retries.tasks_needing_answer == {"t"}


def test_a_system_message_needs_chat_prompts(tmp_path):
    plain = rows(tmp_path / "a.jsonl", {"prompt": "p", "answer": "a"})
    chat = [{"role": "user", "content": "p"}]
    messages = rows(tmp_path / "b.jsonl", {"prompt": chat, "answer": "a"})
    assert "tasks.t.system" in problems(recipe({"t": {"file": plain, "system": "be kind"}}))
    assert findings(recipe({"t": {"file": plain, "system": "be kind", "chat": True}}))
    assert findings(recipe({"t": {"file": messages, "system": "be kind"}}))


def seeing(tasks: dict[str, Any]) -> Recipe:
    return recipe(tasks, model={"random_init": {"family": "qwen2_5_vl"}})


def test_missing_and_unreadable_pictures_name_file_and_row(tmp_path):
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    (tmp_path / "bad.png").write_text("not a picture")
    for name, reason in (("gone.png", "does not exist"), ("bad.png", "can't be read")):
        good, bad = ({"prompt": "colour=", "answer": "red", "images": [image]} for image in ("red.png", name))
        file = rows(tmp_path / "a.jsonl", good, bad)
        with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*the image {tmp_path / name} {reason}"):
            findings(seeing({"t": {"file": file}}))


def test_built_in_tasks_on_pictures_are_chats_that_need_pillow(monkeypatch):
    see = seeing({"see": {"kind": "colour", "system": "look closely"}})
    assert "built-in colour, 128 evaluation prompts" in findings(see)[0]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"practicum\[vision\]"):
        findings(see)

"""`check_tasks` finds every mistake in tasks and rewards before any work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from practicum.errors import DataError, MissingExtraError, RecipeErrors
from practicum.recipe.schema.recipe import MakeModel, Model, Recipe
from practicum.tasks.check_tasks import check_tasks, tasks_needing_answer


def recipe(tasks: dict[str, Any], **sections: Any) -> Recipe:
    model = Model(make=MakeModel())
    return Recipe.model_validate({"name": "r", "model": model, "tasks": tasks, **sections})


def rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def problems(recipe: Recipe) -> dict[str, str]:
    with pytest.raises(RecipeErrors) as caught:
        check_tasks(recipe)
    return {error.path: str(error) for error in caught.value.errors}


def test_good_tasks_are_described(tmp_path):
    file = rows(tmp_path / "a.jsonl", {"prompt": "p", "answer": "a"})
    findings = check_tasks(recipe({"sort": {"kind": "sort"}, "file": {"file": file}}))
    assert findings == [
        "tasks.sort: built-in sort, 128 evaluation prompts held out",
        f"tasks.file: {file} has 1 rows",
        "tasks.file: no eval_file, so it is trained on and not evaluated",
    ]


def test_small_evaluation_sets_are_mentioned():
    tasks = {"c": {"kind": "compare", "options": {"digits": 1}}}
    assert "distinct evaluation prompts of the 128 asked for" in check_tasks(recipe(tasks))[1]


def test_all_mistakes_are_shown_at_once(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    found = problems(
        recipe(
            {
                "a": {"kind": "srot"},
                "b": {"kind": "sort", "options": {"lenght": 3}},
                "c": {"file": str(tmp_path / "row.jsonl")},
                "d": {"kind": "sort", "eval_file": "x.jsonl"},
                "e": {"file": str(tmp_path), "options": {"length": 3}},
                "f": {"kind": "sort", "system": "be kind"},
                "h": {},
            },
            reward={"functions": [{"use": "nowhere:f"}]},
        )
    )
    assert set(found) == {
        "tasks.a.kind",
        "tasks.b.options.lenght",
        "tasks.c.file",
        "tasks.d.eval_file",
        "tasks.e.file",
        "tasks.e.options",
        "tasks.f.system",
        "tasks.h",
        "reward.functions[0].use",
    }
    assert "did you mean sort?" in found["tasks.a.kind"]
    assert f"did you mean {tmp_path / 'rows.jsonl'}?" in found["tasks.c.file"]


def test_options_that_leave_no_examples():
    assert "tasks.t.options" in problems(
        recipe({"t": {"kind": "copy", "options": {"length": 1, "letters": 1}}})
    )


def test_bad_rows_of_several_files_are_shown_together(tmp_path):
    one = rows(tmp_path / "one.jsonl", {"prompt": "p"})
    two = rows(tmp_path / "two.jsonl", {"prompt": "p", "answer": "a"}, {"answer": "a"})
    with pytest.raises(DataError) as caught:
        check_tasks(recipe({"one": {"file": one}, "two": {"file": two}}))
    assert f"{one}, line 1: no column 'answer'" in str(caught.value)
    assert f"{two}, line 2: no column 'prompt'" in str(caught.value)


def test_eval_files_are_checked_too(tmp_path):
    good = rows(tmp_path / "good.jsonl", {"prompt": "p", "answer": "a"})
    bad = rows(tmp_path / "bad.jsonl", {"prompt": "p", "anwser": "a"})
    with pytest.raises(DataError, match=r"bad\.jsonl, line 1: .*did you mean 'anwser'"):
        check_tasks(recipe({"t": {"file": good, "eval_file": bad}}))


def test_answers_are_needed_by_comparing_rewards_and_loops_and_by_demonstrations(tmp_path):
    file = rows(tmp_path / "a.jsonl", {"prompt": "p"})
    free = {"functions": [{"use": "math:sqrt"}]}
    assert check_tasks(recipe({"t": {"file": file}}, reward=free))
    supervised = recipe(
        {"t": {"file": file}},
        reward=free,
        algorithm={"loss": "supervised", "advantage": "none"},
    )
    assert tasks_needing_answer(supervised) == {"t"}
    with pytest.raises(DataError, match="no column 'answer'"):
        check_tasks(supervised)
    own = recipe({"t": {"file": file, "rewards": [{"use": "contains"}]}}, reward=free)
    assert tasks_needing_answer(own) == {"t"}
    retries = recipe({"t": {"file": file}}, reward=free, agent={"loop": "retry"})
    assert tasks_needing_answer(retries) == {"t"}


def test_a_system_message_needs_chat_prompts(tmp_path):
    plain = rows(tmp_path / "a.jsonl", {"prompt": "p", "answer": "a"})
    chat = [{"role": "user", "content": "p"}]
    messages = rows(tmp_path / "b.jsonl", {"prompt": chat, "answer": "a"})
    assert "tasks.t.system" in problems(recipe({"t": {"file": plain, "system": "be kind"}}))
    assert check_tasks(recipe({"t": {"file": plain, "system": "be kind", "chat": True}}))
    assert check_tasks(recipe({"t": {"file": messages, "system": "be kind"}}))


def picture(path: Path) -> str:
    Image.new("RGB", (16, 16), "red").save(path)
    return path.name


def test_pictures_of_the_first_rows_are_opened(tmp_path):
    shown = picture(tmp_path / "red.png")
    good = {"prompt": "colour?", "answer": "red", "images": [shown, shown]}
    file = rows(tmp_path / "a.jsonl", good, {"prompt": "p", "answer": "a"})
    findings = check_tasks(recipe({"t": {"file": file, "system": "look closely"}}))
    assert "tasks.t: 2 pictures of the first 2 rows can be read" in findings


def test_missing_and_unreadable_pictures_name_file_and_row(tmp_path):
    shown = picture(tmp_path / "red.png")
    (tmp_path / "bad.png").write_text("not a picture")
    for name, reason in (("gone.png", "does not exist"), ("bad.png", "can't be read")):
        good, bad = ({"prompt": "colour?", "answer": "red", "looks": [image]} for image in (shown, name))
        file = rows(tmp_path / "a.jsonl", good, bad)
        with pytest.raises(DataError, match=rf"a\.jsonl, line 2: the picture {tmp_path / name} {reason}"):
            check_tasks(recipe({"t": {"file": file, "images": "looks"}}))


def test_built_in_tasks_on_pictures_are_chats_that_need_pillow(monkeypatch):
    see = recipe({"see": {"kind": "colour", "system": "look closely"}})
    assert "built-in colour, 128 evaluation prompts" in check_tasks(see)[0]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"practicum\[vision\]"):
        check_tasks(see)


def gym_entries(path: Path, dataset: str) -> str:
    import reasoning_gym

    entries = reasoning_gym.create_dataset(dataset, size=3, seed=1)
    return rows(path, *entries)


def test_reasoning_gym_rows_are_checked(tmp_path):
    reward = {"functions": [{"use": "reasoning_gym"}]}
    legs = gym_entries(tmp_path / "legs.jsonl", "leg_counting")
    task = {"file": legs, "prompt": "question"}
    assert not any("less than 1" in f for f in check_tasks(recipe({"t": task}, reward=reward)))
    # its grids are tuples, which JSON gives back as lists: right answers would be called wrong
    arc = gym_entries(tmp_path / "arc.jsonl", "arc_agi")
    task = {"file": arc, "prompt": "question"}
    found = check_tasks(recipe({"t": task}, reward=reward))
    assert "tasks.t: reasoning_gym gives 3 of 3 rows' own answers less than 1" in found
    bare = rows(tmp_path / "bare.jsonl", {"prompt": "p", "answer": "a"})
    with pytest.raises(DataError, match=r"bare\.jsonl, line 1: .*metadata"):
        check_tasks(recipe({"t": {"file": bare}}, reward=reward))
    assert "tasks.t" in problems(recipe({"t": {"kind": "sort"}}, reward=reward))


def test_checking_imports_no_torch():
    code = """
import sys
from practicum.recipe.schema.recipe import Recipe
from practicum.tasks.check_tasks import check_tasks
import practicum.tasks.prompts
task = {"kind": "sort"}
print(check_tasks(Recipe.model_validate({"name": "r", "model": {}, "tasks": {"t": task}})))
print([m for m in ("torch", "transformers", "numpy", "sympy", "PIL") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"

import json
import re
from pathlib import Path

import pytest

from practicum.errors import PracticumError, RecipeError, RecipeErrors
from practicum.models.load_model import load_tokenizer
from practicum.sessions.chat import make_encoder
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.trainer.preflight import check_without_models, preflight
from practicum.trainer.run import train_loaded

from .recipes import tiny


def rows(folder: Path, *prompts: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return str(path)


def test_a_sound_recipe_is_described(tmp_path: Path):
    found = preflight(tiny(tmp_path))
    text = "\n".join(found.findings)
    assert found.sizes[0] == "model: Qwen3ForCausalLM, 0.03M parameters, on cpu"
    assert found.sizes[1] == "tokens: up to 16 × (16 of prompt + 6 of response) = 352 per step"
    assert found.sizes[2].startswith("memory: about 0.0")
    assert "end <eos>" in text
    assert "a chat template" in text
    assert "≤ 64" in text


ONE_ROW = "tasks={t: {file: rows.jsonl}}"
REFUSED = {
    "tasks.t": ([ONE_ROW], "a" * 60, r"line 1: a prompt of 60 tokens \+ 6 of response = 66"),
    "tasks.t (characters)": ([ONE_ROW], "größe?", "line 1: a row with unknown characters"),
    "tasks.t.too_long": ([ONE_ROW, "tasks.t.too_long=skip"], "a" * 60, "all rows of"),
    "rollout.context": (["rollout.context=65"], "", "the model's context of 64"),
    "rollout.stop": (["rollout.stop=['end']"], "", "3 tokens"),
    "model.path": (["model.random_init=null", "model.path=no/where"], "", ""),
    "agent.loop": (["agent.loop=singleturn"], "", ""),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_recipe_that_can_not_run_is_refused_at_its_key(tmp_path: Path, key: str):
    changes, prompt, said = REFUSED[key]
    rows(tmp_path, prompt)
    with pytest.raises((RecipeError, RecipeErrors), match=rf"{re.escape(key.split()[0])}: .*{said}"):
        preflight(tiny(tmp_path, *changes))


def test_every_row_is_measured_and_the_long_ones_are_named_by_file_and_line(tmp_path: Path):
    short = ["1+1="] * 2_500
    tasks = {"long": {"file": rows(tmp_path, *short, "a" * 80, "b" * 70)}}
    with pytest.raises(RecipeErrors) as raised:
        preflight(tiny(tmp_path, tasks=tasks))
    text = str(raised.value)
    assert "rows.jsonl, line 2501: a prompt of 80 tokens + 6 of response = 86" in text
    assert "rows.jsonl, line 2502: a prompt of 70 tokens" in text
    assert "tasks.long.too_long to skip or cut" in text


def test_evaluation_prompts_that_are_trained_on_are_counted(tmp_path: Path):
    (tmp_path / "held_out").mkdir()
    train, held_out = rows(tmp_path, "a=", "b=", "c=", "d="), rows(tmp_path / "held_out", "b=", "e=", "b=")
    found = preflight(tiny(tmp_path, tasks={"mine": {"file": train, "eval_file": held_out}})).findings
    told = "tasks.mine: 1 of 2 distinct evaluation prompts are also training prompts"
    assert [text for text in found if text.startswith(told)]
    found = preflight(tiny(tmp_path, tasks={"mine": {"file": train}})).findings
    assert not [text for text in found if "also training prompts" in text]


def test_rows_that_are_too_long_are_skipped_and_counted(tmp_path: Path):
    file = rows(tmp_path, "1+1=", "a" * 80, "2+2=", "b" * 70)
    task = {"file": file, "eval_file": file, "too_long": "skip"}
    loaded = tiny(tmp_path, "train.prompts=2", tasks={"t": task})
    found = check_without_models(loaded.recipe)
    assert any(f"too long: 2 rows of {file} are left out" in line for line in found.findings)
    assert found.left_out == {file: frozenset({1, 3})}
    tasks, seed = loaded.recipe.tasks, loaded.recipe.seed
    drawn = make_stream(tasks, seed, left_out=found.left_out).take(40)
    assert {str(p.content) for p in drawn} == {"1+1=", "2+2="}
    assert [p.content for p in eval_prompts(tasks, 2, seed, found.left_out)] == ["1+1=", "2+2="]
    train_loaded(loaded, tmp_path / "run")


def test_a_prompt_that_is_cut_keeps_its_end(tmp_path: Path):
    task = {"file": rows(tmp_path, "a" * 80 + "12="), "too_long": "cut"}
    loaded = tiny(tmp_path, "train.prompts=1", tasks={"t": task})
    recipe = loaded.recipe
    assert any("1 prompts are cut at the start" in line for line in preflight(loaded).findings)
    tokenizer = load_tokenizer(recipe.model)
    (prompt,) = make_stream(recipe.tasks, recipe.seed).take(1)
    ids = make_encoder(recipe, tokenizer)(prompt).ids
    assert len(ids) == 64 - recipe.rollout.max_new_tokens
    assert str(tokenizer.decode(ids)).endswith("a12=")


def test_a_session_without_room_for_an_answer_says_so(tmp_path: Path):
    loaded = tiny(tmp_path, agent={"loop": "tests.trainer.loops:crowded"})
    with pytest.raises(PracticumError, match=r"prompt \(100 tokens\) leaves no room"):
        train_loaded(loaded, tmp_path / "run")


def test_chat_prompts_go_through_the_chat_template(tmp_path: Path):
    tasks = {"chat": {"file": rows(tmp_path, [{"role": "user", "content": "hi"}])}}
    assert any(
        "longest" in line for line in preflight(tiny(tmp_path, "train.prompts=1", tasks=tasks)).findings
    )


def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": 3, "answer": "b"}\n')
    with pytest.raises(PracticumError, match=r"rows\.jsonl, line 2"):
        preflight(tiny(tmp_path, tasks={"bad": {"file": str(path)}}))

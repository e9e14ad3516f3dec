import json
from pathlib import Path

import pytest

from practicum.errors import PracticumError, RecipeError, RecipeErrors
from practicum.trainer.preflight import preflight

from .recipes import tiny


def rows(folder: Path, *prompts: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return str(path)


def test_a_sound_recipe_is_described(tmp_path: Path):
    text = "\n".join(preflight(tiny(tmp_path)))
    assert "Qwen3ForCausalLM" in text
    assert "end <eos>" in text
    assert "a chat template" in text
    assert "≤ 64" in text


def test_a_prompt_that_does_not_fit_the_context_is_refused(tmp_path: Path):
    tasks = {"long": {"file": rows(tmp_path, "a" * 60)}}
    with pytest.raises(RecipeErrors, match=r"a prompt of 60 tokens \+ 6 of answer = 66"):
        preflight(tiny(tmp_path, tasks=tasks))


def test_a_context_beyond_the_models_is_refused(tmp_path: Path):
    with pytest.raises(RecipeErrors, match="at most the model's context of 64"):
        preflight(tiny(tmp_path, "rollout.context=65"))


def test_characters_that_the_tokenizer_lacks_are_named(tmp_path: Path):
    tasks = {"odd": {"file": rows(tmp_path, "größe?")}}
    with pytest.raises(RecipeErrors, match="unknown characters: 'größe"):
        preflight(tiny(tmp_path, tasks=tasks))


def test_a_stop_string_of_several_tokens_is_refused(tmp_path: Path):
    preflight(tiny(tmp_path, "rollout.stop=['=']"))
    with pytest.raises(RecipeError, match=r"rollout\.stop: found 'end', 3 tokens"):
        preflight(tiny(tmp_path, "rollout.stop=['end']"))


def test_a_missing_model_folder_says_what_to_do(tmp_path: Path):
    with pytest.raises(RecipeError, match="train the recipe that makes it first"):
        preflight(tiny(tmp_path, "model.make=null", f"model.path={tmp_path}/nowhere"))


def test_an_unknown_loop_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"agent\.loop: found 'singleturn'"):
        preflight(tiny(tmp_path, "agent.loop=singleturn"))


def test_chat_prompts_go_through_the_chat_template(tmp_path: Path):
    tasks = {"chat": {"file": rows(tmp_path, [{"role": "user", "content": "hi"}])}}
    assert any("longest" in line for line in preflight(tiny(tmp_path, tasks=tasks)))


def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": 3, "answer": "b"}\n')
    with pytest.raises(PracticumError, match=r"rows\.jsonl, line 2"):
        preflight(tiny(tmp_path, tasks={"bad": {"file": str(path)}}))

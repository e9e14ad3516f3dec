"""What is found about teachers and routes before any weights are loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from practicum.errors import RecipeErrors
from practicum.models.model_files import read_config, read_tokenizer
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.teachers.check_routes import check_routes
from practicum.teachers.teacher_checks import (
    check_context,
    check_teachers,
    load_teacher_tokenizer,
    longest_prompts,
)
from practicum.teachers.vocabulary import compare_vocabularies

SORT = {"sort": {"kind": "sort"}}


def recipe(tasks: dict[str, Any], teachers: dict[str, Any], **sections: Any) -> Recipe:
    data = {"name": "r", "model": {"random_init": {}}, "tasks": tasks, "teachers": teachers, "distill": {}}
    return Recipe.model_validate(data | sections)


def rows(path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    path.write_text("\n".join(json.dumps({"prompt": "1+1=", "answer": "2"} | row) for row in rows))
    return {"file": str(path)}


def problems(call: Any) -> dict[str, str]:
    with pytest.raises(RecipeErrors) as caught:
        call()
    return {error.path: str(error) for error in caught.value.errors}


def tokenizer_of(words: str, eos: str = "<eos>", **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of `words`."""
    vocabulary = {token: i for i, token in enumerate(("<eos>", "<end>", "<unk>", *words))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, unk_token="<unk>", **options)


def save_model(folder: Path, tokenizer: Any = None, **config: Any) -> str:
    """A folder with a config and a tokenizer, and no weights."""
    tokenizer = tokenizer or make_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    Qwen3Config(**(sizes | config), architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    return str(folder)


def check(spec: Recipe, longest_prompt: int = 20, **changes: Any) -> list[str]:
    student, given = make_tokenizer(), {"longest_answer": 10, "uses_chat": False}
    longest = longest_prompts(spec, student, longest_prompt)
    return check_teachers(spec, student, longest=longest, **(given | changes))


def test_rows_go_where_their_column_says(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"level": 1}, {"level": 2}, {"level": 2})
    teachers = {"easy": {"model": "a"}, "hard": {"model": "b"}}
    route = {"by": "level", "map": {"1": "easy", "2": {"easy": 1.0, "hard": 3.0}}}
    assert check_routes(recipe({"a": file}, teachers, route=route)) == [
        "route: level '1' → easy",
        "route: level '2' → easy 25%, hard 75%",
    ]


def test_one_teacher_takes_all() -> None:
    assert check_routes(recipe(SORT, {"t": {"model": "a"}})) == ["route: every prompt goes to t"]


def test_rows_bring_their_own_domain(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"domain": "x"}, {})
    teachers = {"x": {"model": "a"}, "a": {"model": "b"}, "sort": {"model": "c"}}
    found = check_routes(recipe({"a": file} | SORT, teachers))
    assert found == ["route: domain 'x' → x", "route: domain 'a' → a", "route: domain 'sort' → sort"]


def test_values_without_a_teacher_are_told_with_their_rows(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"s": "math"}, *[{"s": "maths"}] * 5, {"s": "code"})
    teachers = {"math": {"model": "a"}, "chat": {"model": "b"}}
    with pytest.raises(RecipeErrors) as caught:
        check_routes(recipe({"a": file}, teachers, route={"by": "s", "map": {"poems": "math"}}))
    lost, code, chat, poems = caught.value.errors
    assert lost.path == code.path == "route.map"
    assert "no teacher for the s 'maths' of" in lost.found
    assert lost.found.endswith("a.jsonl, line 4 and 2 more")
    assert "did you mean math?" in lost.suggestion
    assert code.found.endswith("a.jsonl, line 7")
    assert (chat.path, poems.path) == ("teachers.chat", "route.map.poems")
    assert "without prompts (by s: math, maths, code)" in chat.found


def test_many_values_without_a_teacher_are_counted(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", *({"s": f"v{i}"} for i in range(50)))
    teachers = {"v0": {"model": "a"}, "v1": {"model": "b"}}
    with pytest.raises(RecipeErrors, match="45 more values of s"):
        check_routes(recipe({"a": file}, teachers, route={"by": "s"}))


def test_rows_without_the_column_are_told(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"s": "x"}, {"s": "y"}, {}, {"s": None})
    teachers = {"x": {"model": "a"}, "y": {"model": "b"}}
    found = problems(lambda: check_routes(recipe({"a": file}, teachers, route={"by": "s"})))
    assert set(found) == {"route.by"}
    place = tmp_path / "a.jsonl"
    assert found["route.by"].splitlines()[0] == (
        f"route.by: found no column 's' (only 'prompt', 'answer') in 2 rows: {place}, line 3; "
        f"{place}, line 4, expected text or a number in each row."
    )


def test_what_a_teacher_reads_before_must_be_in_its_rows(tmp_path: Path) -> None:
    file = rows(tmp_path / "a.jsonl", {"hint": "h"}, {})
    teachers = {
        "a": {"model": "a", "prompt_prefix": "{hint}"},
        "sort": {"model": "b", "prompt_prefix": "{answer}"},
    }
    found = problems(lambda: check_routes(recipe({"a": file} | SORT, teachers)))
    assert set(found) == {"teachers.a.prompt_prefix"}
    assert "line 2" in found["teachers.a.prompt_prefix"]
    teachers = {"a": {"model": "a"}, "sort": {"model": "b", "prompt_prefix": "{hint}"}}
    found = problems(lambda: check_routes(recipe({"a": file} | SORT, teachers)))
    assert "task sort" in found["teachers.sort.prompt_prefix"]


def test_the_same_vocabulary_is_the_same() -> None:
    assert compare_vocabularies(make_tokenizer(), make_tokenizer(), "t") == []
    padded = tokenizer_of("abc", pad_token="<end>")
    assert compare_vocabularies(tokenizer_of("abc"), padded, "t") == []


def test_vocabularies_of_one_size_with_other_content_differ() -> None:
    (found,) = compare_vocabularies(tokenizer_of("abc"), tokenizer_of("abd"), "t")
    assert found.path == "teachers.t.model"
    assert "1 of the student's tokens are missing ('c')" in found.found
    assert "1 are not the student's ('d')" in found.found
    (found,) = compare_vocabularies(tokenizer_of("abc"), tokenizer_of("acb"), "t", key="tokenizer")
    assert found.path == "teachers.t.tokenizer"
    assert "2 have other ids ('b' is 4 here, 5 there" in found.found


def test_more_tokens_than_the_students_are_a_difference() -> None:
    (found,) = compare_vocabularies(tokenizer_of("abc"), tokenizer_of("abcdefgh"), "t")
    assert "5 are not the student's ('d', 'e', 'f', …)" in found.found


def test_another_end_token_is_told() -> None:
    (found,) = compare_vocabularies(tokenizer_of("ab"), tokenizer_of("ab", eos="<end>"), "t")
    assert "the EOS token '<end>', where the student has '<eos>'" in found.found
    assert "model.tokenizer" in found.suggestion


def test_another_begin_token_is_told() -> None:
    (found,) = compare_vocabularies(tokenizer_of("ab"), tokenizer_of("ab", bos_token="<end>"), "t")
    assert "the BOS token '<end>', where the student has none" in found.found


def test_other_special_tokens_are_told() -> None:
    teacher = tokenizer_of("ab", additional_special_tokens=["a"])
    (found,) = compare_vocabularies(tokenizer_of("ab"), teacher, "t")
    assert "'a' only of the teacher" in found.found


def test_another_chat_template_matters_if_prompts_are_chats() -> None:
    teacher = make_tokenizer()
    teacher.chat_template = "{{ messages }}"
    (found,) = compare_vocabularies(make_tokenizer(), teacher, "t", chat=True)
    assert "a chat template that differs from the student's" in found.found
    teacher.chat_template = None
    (found,) = compare_vocabularies(make_tokenizer(), teacher, "t", chat=True)
    assert "no chat template of the teacher" in found.found
    assert compare_vocabularies(make_tokenizer(), teacher, "t", chat=False) == []


@pytest.mark.parametrize(
    ("context", "asked", "extra", "words"),
    [
        (30, None, 0, None),
        (None, None, 0, None),
        (64, 30, 0, None),
        (29, None, 0, "a prompt of 20 tokens + 10 of response = 30, expected at most 29"),
        (30, None, 1, "answer + 1 = 31, expected at most 30"),
        (64, 29, 0, "expected at most 29"),
        (None, 29, 0, "expected at most 29"),
        (64, 65, 0, "found 65, expected at most the model's context of 64"),
    ],
)
def test_a_context_must_hold_prompt_answer_and_what_the_engine_adds(
    context: int | None, asked: int | None, extra: int, words: str | None
) -> None:
    found = check_context("t", context, 20, 10, extra, asked)
    assert (found is None) if words is None else (found is not None and words in str(found))


def test_teachers_are_described(tmp_path: Path) -> None:
    tokens = len(make_tokenizer())
    folder = save_model(tmp_path / "m")
    url = {"url": "http://x/v1", "model": "big"}
    teachers = {"a": {"model": folder}, "b": {"student": {}}, "c": url, "d": url | {"tokenizer": folder}}
    route = {"map": {"sort": dict.fromkeys("abcd", 1.0)}}
    assert check(recipe(SORT, teachers, route=route)) == [
        f"teacher a: Qwen3ForCausalLM, context 64, same vocabulary ({tokens} tokens)",
        "teacher b: a copy of the student, with its initial weights",
        "teacher c: big at http://x/v1, a vocabulary that is not compared",
        f"teacher d: big at http://x/v1, same vocabulary ({tokens} tokens)",
    ]


def test_all_problems_of_all_teachers_come_together(tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", tokenizer_of("abc"))
    short = save_model(tmp_path / "short", max_position_embeddings=16)
    wide = save_model(tmp_path / "wide", vocab_size=4096)
    models = {"other": other, "short": short, "wide": wide, "gone": str(tmp_path / "gone")}
    teachers = {name: {"model": folder} for name, folder in models.items()}
    spec = recipe(
        SORT, teachers, route={"map": {"sort": dict.fromkeys(models, 1.0)}}, distill={"signal": "full"}
    )
    found = problems(lambda: check(spec, student_vocab=len(make_tokenizer())))
    assert set(found) == {
        "teachers.other.model",
        "teachers.short.context",
        "teachers.wide.model",
        "teachers.gone.model",
    }
    assert "4,096 outputs" in found["teachers.wide.model"]
    assert "config.json" in found["teachers.gone.model"]


def test_what_a_teacher_reads_before_counts_against_its_context(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    file = rows(tmp_path / "a.jsonl", {"hint": "x" * 60}, {"hint": ""})
    teacher = {"model": folder, "prompt_prefix": "{hint}"}
    found = problems(lambda: check(recipe({"a": file}, {"t": teacher})))
    assert "a prompt of 64 tokens + 10 of response = 74" in found["teachers.t.context"]


def test_a_teachers_context_is_held_against_its_own_prompts_only(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    tasks = {
        "short": rows(tmp_path / "a.jsonl", {}),
        "long": rows(tmp_path / "b.jsonl", {"prompt": "x" * 500}),
    }
    teachers = {"short": {"model": folder}, "long": {"student": {}}}
    assert len(check(recipe(tasks, teachers), longest_prompt=500)) == 2
    swapped = {"map": {"short": "long", "long": "short"}}
    found = problems(lambda: check(recipe(tasks, teachers, route=swapped), longest_prompt=500))
    assert set(found) == {"teachers.short.context"}


def test_a_copy_of_the_student_has_the_students_context() -> None:
    spec = recipe(SORT, {"t": {"student": {"every": 2}}})
    assert check(spec, student_context=30) == ["teacher t: a copy of the student, updated every 2 steps"]
    assert set(problems(lambda: check(spec, student_context=29))) == {"teachers.t.context"}


def test_a_top_k_above_the_vocabulary_is_refused() -> None:
    spec = recipe(SORT, {"t": {"student": {}}}, distill={"top_k": 1000})
    assert "at most the" in problems(lambda: check(spec))["distill.top_k"]


def test_tokenizers_are_loaded_once(tmp_path: Path) -> None:
    teacher = Teacher(model=save_model(tmp_path / "m"))
    first = load_teacher_tokenizer(teacher, "teachers.t")
    assert first is not None
    assert load_teacher_tokenizer(teacher.model_copy(update={"dtype": "float64"}), "teachers.u") is first


def test_tokenizers_and_configs_are_read_once_and_again_when_the_folder_changes(tmp_path: Path):
    save_model(tmp_path)
    first = read_tokenizer(str(tmp_path))
    assert read_tokenizer(str(tmp_path)) is first
    assert read_config(str(tmp_path)) is read_config(str(tmp_path))
    stamp = (tmp_path / "tokenizer.json").stat().st_mtime_ns + 1_000_000
    os.utime(tmp_path / "tokenizer.json", ns=(stamp, stamp))
    assert read_tokenizer(str(tmp_path)) is not first

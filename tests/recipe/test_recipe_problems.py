from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from practicum.errors import RecipeError, RecipeErrors
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.other_trainers import OTHER_KEYS, OTHER_VALUES
from practicum.recipe.text import yamlfile
from practicum.recipe.text.type_text import all_keys

Write = Callable[..., Path]


def problem(path: Path, *overrides: str) -> RecipeError:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(path, overrides)
    assert len(caught.value.errors) == 1, str(caught.value)
    return caught.value.errors[0]


@pytest.mark.parametrize(
    ("override", "path", "meant"),
    [
        ("train.lrr=1", "train.lrr", "train.lr?"),
        ("lr=1e-5", "lr", "train.lr or critic.lr?"),
        ("train.samples=4", "train.samples", "rollout.samples or eval.samples?"),
        ("max_tokens=5", "max_tokens", "rollout.max_new_tokens?"),
        ("tarin.lr=1", "tarin", "train?"),
        ("model.random_init.hiden=8", "model.random_init.hiden", "model.random_init.hidden?"),
        ("tasks.sort.weigth=2", "tasks.sort.weigth", "tasks.sort.weight?"),
        ("algorithm.reference=x", "algorithm.reference", "algorithm.kl.reference?"),
        ("reward.functions=[{usee: x}]", "reward.functions[0].usee", "reward.functions[0].use?"),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(
    write: Write, override: str, path: str, meant: str
) -> None:
    found = problem(write(), override)
    assert found.path == path
    assert "unknown key (--set)" in found.found
    assert found.suggestion == f"did you mean {meant}"


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("train.learning_rate=1", "use train.lr"),
        ("num_generations=4", "use rollout.samples"),
        ("algorithm.beta=0.04", "use algorithm.kl: {place: loss, coefficient: 0.04}"),
        ("loss_type=grpo", f"use {OTHER_VALUES['algorithm.loss']['grpo']}"),
        ("algorithm.loss=dapo", f"use {OTHER_VALUES['algorithm.loss']['dapo']}"),
        ("algorithm.loss_agg_mode=token-mean", "use algorithm: {aggregation: token_mean}"),
        ("rollout.n=8", "use rollout.samples"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n: use rollout.samples"),
        ("model.name=Qwen/Qwen3-0.6B", "use model.path"),
        ("critic.optim.lr=1e-5", "critic.optim.lr: use critic.lr"),
        ("gradient_checkpointing=true", "did you mean train.gradient_checkpointing?"),
        ("tools=[calculator]", "did you mean agent.tools?"),
        ("distill.betta=1", "did you mean distill.beta?"),
        ("model=Qwen/Qwen3-0.6B", "write model: {path: Qwen/Qwen3-0.6B}"),
        ("teachers.math=Qwen/Qwen3-8B", "write teachers.math: {model: Qwen/Qwen3-8B}"),
        ("tasks.sort=sort", "write tasks.sort: {kind: sort}"),
    ],
)
def test_a_term_of_another_trainer_gets_the_equivalent(write: Write, override: str, advice: str) -> None:
    assert problem(write(), override).suggestion == advice


def test_a_section_of_another_trainer_has_the_equivalent_of_each_key(write: Write) -> None:
    found = problem(write("args: {num_generations: 8, temperature: 0.9, unheard_of: 1}"))
    assert "args.num_generations: use rollout.samples" in found.suggestion
    (line,) = [line for line in found.suggestion.splitlines() if "args.temperature" in line]
    assert "rollout.temperature" in line
    assert "unheard_of" not in found.suggestion


def test_equivalents_of_other_trainers_terms_exist(write: Write) -> None:
    keys = {key for key, _ in all_keys()}
    sections = {key.partition(".")[0] for key in keys}
    for text in OTHER_KEYS.values():
        for named in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+|^[a-z_]+", text):
            assert named in keys or named == "a" or named.partition(".")[0] not in sections, text
    assert {key.rpartition(".")[2] for key in keys} & set(OTHER_KEYS) == {"beta"}
    for texts in OTHER_VALUES.values():
        for text in texts.values():
            fragment = yamlfile.parse(text.partition(";")[0], "a fragment").data
            critic = {"critic": {}} if "critic" in text else {}
            base = {"name": "x", "model": {"random_init": {}}, "tasks": {"sort": {"kind": "sort"}}}
            load_recipe(base | fragment | critic)


def test_a_key_with_another_name_now_says_it(write: Write) -> None:
    found = problem(write(), "track.trajectories=8")
    assert "track.record" in found.suggestion


def test_an_unknown_key_like_no_other_gets_the_list(write: Write) -> None:
    found = problem(write(), "checkpoint.zzz=1")
    assert found.expected == "a key of checkpoint: every, keep_last"
    assert "practicum schema" in found.suggestion


@pytest.mark.parametrize(
    ("override", "found", "expected", "advice"),
    [
        ("train.steps=-3", "-3", "an integer, at least 0", ""),
        ("train.steps=1.5", "1.5", "an integer, at least 0", ""),
        ("train.steps='7'", "'7'", "an integer, at least 0", "remove the quotes"),
        ("train.steps=true", "true", "an integer, at least 0", ""),
        ("train.steps=null", "null", "an integer, at least 0", ""),
        ("train.lr=fast", "'fast'", "a number, greater than 0", ""),
        ("train.lr=.inf", "inf", "a number, greater than 0", ""),
        ("train.lr=.nan", "nan", "a number, greater than 0", ""),
        ("train.max_grad_norm=0", "0", "a number, greater than 0, or null", ""),
        ("rollout.top_p=2", "2", "a number, greater than 0 and at most 1", ""),
        ("algorithm.lam=2", "2", "a number, at least 0 and at most 1", ""),
        ("rollout.stop=x", "'x'", "a list of strings", ""),
        ("rollout.stop=[3]", "3", "a string", "put it in quotes"),
        ("train.gradient_checkpointing=on", "'on'", "true or false", "write true"),
        ("train.gradient_checkpointing=1", "1", "true or false", ""),
        (
            "train.schedule=cosin",
            "'cosin'",
            "one of constant, linear, cosine, or package.module:name",
            "did you mean cosine?",
        ),
        ("runtime.kind=rey", "'rey'", "one of local, ray", "did you mean ray?"),
        ("train.betas=[0.9, 1.5]", "1.5", "a number, at least 0 and less than 1", ""),
        ("train.betas=[0.9]", "[0.9]", "a list of 2 numbers, each at least 0 and less than 1", ""),
        ("train.betas=[]", "[]", "a list of 2 numbers, each at least 0 and less than 1", ""),
        (
            "train.betas=[0.9, 0.9, 0.9]",
            "[0.9, 0.9, 0.9]",
            "a list of 2 numbers, each at least 0 and less than 1",
            "",
        ),
        ("train.betas=0.9", "0.9", "a list of 2 numbers, each at least 0 and less than 1", ""),
        ("tasks={}", "{}", "a mapping of names to tasks, with at least 1 of them", ""),
    ],
)
def test_a_wrong_value_names_what_was_found_and_expected(
    write: Write, override: str, found: str, expected: str, advice: str
) -> None:
    # An empty mapping would merge into the file's tasks, so this recipe has none.
    path = write() if "tasks" not in override else write("name: x\nmodel: {random_init: {}}", minimal=False)
    error = problem(path, override)
    assert error.path.partition("[")[0] == override.partition("=")[0]
    assert error.found == f"{found} (--set)"
    assert error.expected == expected
    assert error.suggestion == advice


def test_a_mapping_of_a_file_and_set_shows_the_merged_value_and_both_origins(write: Write) -> None:
    teachers = "teachers: {a: {model: m}, b: {model: n}}\ndistill: {}\nreward: {weight: 0.0}\n"
    path = write(f"{teachers}route: {{map: {{sort: {{a: 0.5, b: 0.5}}}}, shares: {{a: 0.5, b: 0.5}}}}")
    found = problem(path, "route.shares.b=0.75").found
    for words in ("a: 0.5, b: 0.75", "file:", "--set"):
        assert words in found


def test_one_kind_of_loop_takes_the_place_of_another(write: Write) -> None:
    path = write("agent: {loop: {command: [echo]}}")
    assert str(load_recipe(path, ["agent.loop.function=mine:loop"]).recipe.agent.loop) == "mine:loop"


def test_a_section_left_empty_says_how_to_get_the_defaults(write: Write) -> None:
    error = problem(write("eval:\n  # every: 5\n"))
    assert error.found == "null (file:5)"
    assert "remove eval to take the defaults" in error.suggestion


REWARDS = "reward:\n  functions: [{use: exact}, {use: contains, weight: 0.5}]\n"


def test_a_wrong_value_in_a_list_has_the_line_of_the_list(write: Write) -> None:
    error = problem(write(REWARDS.replace("0.5", "much")))
    assert (error.path, error.found) == ("reward.functions[1].weight", "'much' (file:6)")


def test_set_of_a_list_item_asks_for_the_whole_list(write: Write) -> None:
    error = problem(write(REWARDS), "reward.functions.0.weight=2")
    assert error.path == "reward.functions"
    assert "whole list" in error.suggestion


def test_a_long_value_is_cut(write: Write) -> None:
    error = problem(write(), "train.lr=" + "x" * 1000)
    assert len(error.found) < 80


def test_all_mistakes_come_at_once_with_their_lines(write: Write) -> None:
    path = write("train:\n  lr: 0\n  stepz: 3\neval: {rows: many}\n")
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(path, ["seed=-1"])
    text = str(caught.value)
    assert text.startswith(f"{path}: 4 problems")
    for words in ("0 (file:6)", "unknown key (file:7)", "'many' (file:8)", "-1 (--set)"):
        assert words in text


PLACED = "teachers: {math: {model: x, placement: {own: {replicas: 2}}}}\n"
FORMS = "one of colocated, own, or {own: …}"


@pytest.mark.parametrize(
    ("override", "path", "expected", "advice"),
    [
        ("teachers.math.placement=ow", "teachers.math.placement", FORMS, "did you mean own?"),
        ("teachers.math.placement=3", "teachers.math.placement", FORMS, ""),
        ("teachers.math.placement=null", "teachers.math.placement", FORMS, ""),
        (
            "teachers.math.placement.own.replica=3",
            "teachers.math.placement.own.replica",
            "a key of teachers.math.placement.own",
            "did you mean teachers.math.placement.own.replicas?",
        ),
        (
            "teachers.math.placement.onw=1",
            "teachers.math.placement.onw",
            "a key of teachers.math.placement",
            "did you mean teachers.math.placement.own?",
        ),
        (
            "teachers.math.placement.own.replicas=0",
            "teachers.math.placement.own.replicas",
            "an integer, at least 1",
            "",
        ),
        (
            "teachers.math.placement.own=null",
            "teachers.math.placement.own",
            "a mapping",
            "write {} to take the defaults; its keys are replicas, threads",
        ),
        ("route.map.sort=3", "route.map.sort", "a string, or a mapping of names to numbers", ""),
        ("route.map.sort={a: b}", "route.map.sort.a", "a number", ""),
        ("route.map=a", "route.map", "a mapping of names to strings or mappings", ""),
        (
            "teachers.math.modell=x",
            "teachers.math.modell",
            "a key of teachers.math",
            "did you mean teachers.math.model?",
        ),
    ],
)
def test_a_value_of_several_forms_has_one_problem(
    write: Write, override: str, path: str, expected: str, advice: str
) -> None:
    error = problem(write(PLACED), override)
    assert (error.path, error.expected, error.suggestion) == (path, expected, advice)


def test_a_problem_in_a_form_does_not_hide_that_of_another_value(write: Write) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(write(PLACED), ["teachers.math.placement.own.threads=x", "teachers.b.placement=c"])
    assert [e.path for e in caught.value.errors] == [
        "teachers.math.placement.own.threads",
        "teachers.b.placement",
    ]

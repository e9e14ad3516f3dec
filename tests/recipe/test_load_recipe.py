from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from practicum.errors import RecipeErrors
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.teacher_sections import OwnPlacement
from practicum.recipe.text.origins import leaves

Write = Callable[..., Path]


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_a_minimal_recipe_gets_every_default(write: Write) -> None:
    loaded = load_recipe(write())
    assert loaded.recipe.train.lr == 1e-4
    assert loaded.recipe.algorithm.kl.place == "off"
    assert loaded.source.name == "run.yaml"


def test_every_leaf_has_an_origin(write: Write) -> None:
    write("train: {lr: 3e-4, betas: [0.8, 0.9]}", "bases/base.yaml", minimal=False)
    path = write("extends: bases/base.yaml\nrollout:\n  samples: 4\ntrain:\n  steps: 7\n")
    loaded = load_recipe(path, ["train.prompts=16"])
    shown = {key: str(origin) for key, origin in loaded.origins.items()}
    assert set(shown) == {key for key, _ in leaves(loaded.recipe.model_dump())}
    assert shown["train.lr"] == "base bases/base.yaml:1"
    assert shown["train.betas"] == "base bases/base.yaml:1"
    assert shown["rollout.samples"] == "file:7"
    assert shown["train.steps"] == "file:9"
    assert shown["train.prompts"] == "--set"
    assert shown["train.autocast"] == "default"
    assert loaded.recipe.train.betas == (0.8, 0.9)
    assert loaded.recipe.train.lr == 3e-4


def test_the_nearer_layer_wins_and_its_origin_is_told(write: Write) -> None:
    write("train: {lr: 1, steps: 1, prompts: 1, minibatches: 1}", "a.yaml", minimal=False)
    write("extends: a.yaml\ntrain: {lr: 2, steps: 2, prompts: 2}", "b.yaml", minimal=False)
    path = write("extends: b.yaml\ntrain: {lr: 3, steps: 3}")
    loaded = load_recipe(path, ["train.lr=4", "train.lr=5"])
    train = loaded.recipe.train
    assert (train.lr, train.steps, train.prompts, train.minibatches) == (5.0, 3, 2, 1)
    origins = [str(loaded.origins[f"train.{k}"]) for k in ("lr", "steps", "prompts", "minibatches")]
    assert origins == ["--set", "file:6", "base b.yaml:2", "base a.yaml:1"]


def test_bases_are_relative_to_the_file_that_names_them(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("seed: 5", "deep/one/base.yaml", minimal=False)
    write("extends: one/base.yaml", "deep/middle.yaml", minimal=False)
    write("extends: ../deep/middle.yaml", "recipes/run.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/run.yaml").recipe.seed == 5


def test_lists_replace_and_mappings_merge(write: Write) -> None:
    write("rollout: {stop: [a, b], samples: 3, top_k: 9}", "base.yaml", minimal=False)
    rollout = load_recipe(write("extends: base.yaml\nrollout: {stop: [c], samples: 4}")).recipe.rollout
    assert (rollout.stop, rollout.samples, rollout.top_k) == (["c"], 4, 9)


def test_a_base_need_not_be_complete_but_the_whole_must_be(write: Write) -> None:
    text = refused(write("seed: 1", minimal=False))
    assert "name: found nothing" in text
    assert "tasks: found nothing" in text
    assert "3 problems" in text


def test_a_cycle_of_bases_is_an_error(write: Write) -> None:
    write("extends: run.yaml", "b.yaml")
    text = refused(write("extends: b.yaml"))
    assert "run.yaml → b.yaml → run.yaml" in text
    assert "line 5" in text


def test_a_recipe_that_extends_itself_is_an_error(write: Write) -> None:
    assert "run.yaml → run.yaml" in refused(write("extends: run.yaml"))


@pytest.mark.parametrize("base", [r"\0", r"\ud800"])
def test_a_base_that_no_file_can_be_called_is_told(write: Write, base: str) -> None:
    assert "expected the path of one recipe file" in refused(write(f'extends: "{base}"'))


def test_a_missing_base_names_the_line_and_a_near_file(write: Write) -> None:
    write("seed: 1", "tiny-model.yaml", minimal=False)
    text = refused(write("extends: tiny_model.yaml"))
    assert "extends (line 5 of" in text
    assert "no such file" in text
    assert "tiny-model.yaml?" in text


def test_a_missing_recipe_names_a_near_file(write: Write) -> None:
    path = write(name="sorting.yaml")
    assert f"did you mean {path}?" in refused(path.parent / "sort.yaml")
    assert "does not exist" in refused(path.parent / "nowhere" / "sort.yaml")


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    told = refused(tmp_path)
    assert told.splitlines()[1].startswith("• recipe: found")
    assert str(tmp_path) in told
    assert f"did you mean {tmp_path / 'recipe.yaml'}?" in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"# only a comment\n", "an empty file"),
        (b"- a\n", "expected a mapping"),
        (b"name: \xff\n", "not UTF-8"),
        (b"extends: [a, b]\n", "the path of one recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert words in refused(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path, write: Write) -> None:
    path = write()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().lstrip())
    assert load_recipe(path).recipe.name == "run"


def test_set_adds_to_mappings_takes_yaml_and_null(write: Write) -> None:
    path = write("critic: {lr: 1e-3}\nalgorithm: {advantage: gae}")
    recipe = load_recipe(
        path,
        [
            "tasks.more.kind=add",
            "tasks.more.options={digits: [1, 1]}",
            "rollout.stop=['=', '#']",
            "critic=null",
            "algorithm.advantage=grpo",
            "train.max_grad_norm=null",
            "train.lr=1e-5",
            "out=a = b",
        ],
    ).recipe
    assert recipe.tasks["more"].options == {"digits": [1, 1]}
    assert recipe.rollout.stop == ["=", "#"]
    assert recipe.critic is None
    assert recipe.train.max_grad_norm is None
    assert recipe.train.lr == 1e-5
    assert recipe.out == "a = b"


def test_set_may_fill_a_section_that_was_null(write: Write) -> None:
    recipe = load_recipe(write(), ["critic.lr=0.5", "algorithm.advantage=gae"]).recipe
    assert recipe.critic is not None
    assert recipe.critic.lr == 0.5


def test_every_wrong_set_is_told_at_once(write: Write) -> None:
    text = refused(write(), "lr", "a..b=1", "=3", "x=[1", "extends=other.yaml")
    assert "5 problems" in text
    assert "key=value" in text
    assert "--set x" in text


def test_a_name_that_is_a_number_may_be_set(write: Write) -> None:
    assert load_recipe(write(), ["tasks.7.kind=sort"]).recipe.tasks["7"].kind == "sort"


@pytest.mark.parametrize(
    "short", ["mine:score", "[mine:score]", "{functions: mine:score}", "{functions: ['mine:score']}"]
)
def test_a_reward_may_be_written_as_its_function(write: Write, short: str) -> None:
    path = write(f"reward: {short}\n")
    (path.parent / "mine.py").write_text("def score(sample): return 1.0\n")
    found = load_recipe(path)
    assert [function.use for function in found.recipe.reward.functions] == [f"{path.parent}/mine:score"]
    assert str(found.origins["reward.functions"]) == "file:5"
    own = load_recipe(path, ["tasks.sort.rewards=exact", "reward.weight=2", "reward=contains"]).recipe
    assert [function.use for function in own.tasks["sort"].rewards or []] == ["exact"]
    assert (own.reward.functions[0].use, own.reward.weight) == ("contains", 2.0)


def test_make_replaces_a_path_of_a_base_and_the_other_way_round(write: Write) -> None:
    write("model: {path: some/model, tokenizer: its/own, dtype: bfloat16}", "p.yaml", minimal=False)
    model = load_recipe(write("extends: p.yaml")).recipe.model
    assert (model.path, model.tokenizer, model.dtype) == (None, None, "bfloat16")
    model = load_recipe(write(), ["model.path=some/model"]).recipe.model
    assert (model.path, model.random_init) == ("some/model", None)


def test_both_alternatives_in_one_layer_are_a_mistake(write: Write) -> None:
    assert "both path and random_init" in refused(write(), "model.path=x", "model.random_init.hidden=8")


def test_a_tasks_file_replaces_its_kind_and_options(write: Write) -> None:
    write("tasks: {sort: {options: {length: [2, 3]}, weight: 2}}", "base.yaml", minimal=False)
    path = write("extends: base.yaml")
    assert load_recipe(path).recipe.tasks["sort"].options == {"length": [2, 3]}
    task = load_recipe(path, ["tasks.sort.file=rows.jsonl"]).recipe.tasks["sort"]
    assert (task.kind, task.file, task.options, task.weight) == (None, "rows.jsonl", {}, 2.0)


def test_null_drops_a_task_of_a_base(write: Write) -> None:
    write("tasks: {copy: {kind: copy}}", "base.yaml", minimal=False)
    path = write("extends: base.yaml")
    assert set(load_recipe(path).recipe.tasks) == {"copy", "sort"}
    assert set(load_recipe(path, ["tasks.copy=null"]).recipe.tasks) == {"sort"}
    assert "at least 1" in refused(path, "tasks.copy=null", "tasks.sort=null")


def test_origins_of_what_was_replaced_are_forgotten(write: Write) -> None:
    path = write("algorithm: {advantage: gae}\ncritic:\n  lr: 1e-3\n")
    loaded = load_recipe(path, ["critic=null", "algorithm.advantage=grpo"])
    assert str(loaded.origins["critic"]) == "--set"
    assert "critic.lr" not in loaded.origins


TEACHERS = """
teachers:
  a: {model: x, placement: {own: {replicas: 2, threads: 3}}}
  b: {url: "http://host/v1", model: y, concurrency: 5}
route: {by: task, map: {sort: {a: 0.5, b: 0.5}}}
distill: {}
"""


def test_a_placement_is_replaced_by_a_word_and_a_word_by_a_placement(write: Write) -> None:
    path = write(TEACHERS)
    assert load_recipe(path, ["teachers.a.placement=own"]).recipe.teachers["a"].placement == "own"
    loaded = load_recipe(path, ["teachers.a.placement.own.replicas=4"])
    placement = loaded.recipe.teachers["a"].placement
    assert isinstance(placement, OwnPlacement)
    assert (placement.own.replicas, placement.own.threads) == (4, 3)
    assert str(loaded.origins["teachers.a.placement.own.threads"]) == "file:7"


def test_a_student_takes_the_place_of_a_model_and_the_other_way_round(write: Write) -> None:
    path = write(TEACHERS)
    teacher = load_recipe(path, ["teachers.b.student.every=3"]).recipe.teachers["b"]
    assert (teacher.model, teacher.url, teacher.concurrency) == (None, None, 16)
    write(TEACHERS.replace("model: x", "student: {}"), "base.yaml", minimal=False)
    path = write("extends: base.yaml")
    teacher = load_recipe(path, ["teachers.a.model=x"]).recipe.teachers["a"]
    assert (teacher.model, teacher.student) == ("x", None)


def test_weights_of_teachers_are_replaced_as_a_whole(write: Write) -> None:
    overrides = ["route.map.sort={a: 1}", "tasks.add.kind=add", "route.map.add=b"]
    assert load_recipe(write(TEACHERS), overrides).recipe.route.map == {"sort": {"a": 1.0}, "add": "b"}


def test_null_drops_a_teacher_and_an_entry_of_a_route(write: Write) -> None:
    overrides = ["teachers.b=null", "route.map.sort=null", "route.by=domain"]
    recipe = load_recipe(write(TEACHERS), overrides).recipe
    assert (set(recipe.teachers), recipe.route.map) == ({"a"}, {})

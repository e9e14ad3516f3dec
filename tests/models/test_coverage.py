"""docs/models.md lists what works; what does not is refused in the same way everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import practicum as pr
from practicum.commands.recipe_commands import plan
from practicum.engines.vllm.make_vllm import VllmKind
from practicum.errors import EngineError, RecipeError, RecipeErrors
from practicum.models.tokenizer import make_tokenizer
from practicum.serving.serve import ServeOptions, resolve
from tests.models.coverage import EVERY, PAGE, README, RECIPE, row, save
from tests.models.families import DENSE, FAMILIES, tiny_config


def listed() -> dict[str, list[str]]:
    lines = PAGE.read_text().partition("<!-- begin -->")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {cells[0]: cells for cells in rows[1:]}


def test_the_page_lists_every_family_and_most_of_them_work():
    assert list(listed()) == EVERY
    assert len(EVERY) >= 40
    good = [name for name, cells in listed().items() if all(cell == "yes" for cell in cells[2:-1])]
    assert len(good) >= 36
    claim = f"{len(good)} of {len(EVERY)} families"
    assert all(claim in page.read_text() for page in (PAGE, README))


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
def test_the_page_says_what_a_family_does(name: str):
    assert row(name)[:-1] == listed()[name][:-1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    names = ("bloom", "llama", "phimoe", "lfm2", "llama4_text", "gemma4_text")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    for name, folder in folders.items():
        save(name, folder)
    return {name: str(folder) for name, folder in folders.items()}


def recipe(student: str, teacher: str | None = None) -> dict[str, Any]:
    taught = {"teachers": {"t": {"model": teacher}}, "distill": {}} if teacher else {}
    return RECIPE | {"name": "try", "model": {"path": student}} | taught


@pytest.mark.parametrize(
    ("name", "layer"),
    [("bloom", "BloomAttention"), ("llama4_text", "Llama4TextAttention"), ("gemma4_text", "2 × 8 and")],
)
def test_check_and_train_refuse_the_same_students_and_teachers(
    folders: dict[str, str], tmp_path: Path, name: str, layer: str
):
    for run in (pr.check, lambda asked: pr.train(asked, out=tmp_path / "run", quiet=True)):
        with pytest.raises((RecipeError, RecipeErrors), match=layer) as student:
            run(recipe(folders[name]))
        with pytest.raises((RecipeError, RecipeErrors), match=layer) as teacher:
            run(recipe(folders["llama"], folders[name]))
        assert "model.path" in str(student.value)
        assert "teachers.t.model" in str(teacher.value)


def test_check_refuses_a_model_that_the_engine_can_not_run(tmp_path: Path):
    """It attends twice in a layer: the learner can run that, the engine's cache of keys and values can't."""
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model("diffllama", **DENSE | {"vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = recipe(str(tmp_path / "model"))
    for run in (pr.check, lambda asked: pr.train(asked, out=tmp_path / "run", quiet=True)):
        with pytest.raises(EngineError, match="DiffLlamaForCausalLM"):
            run(asked)


def test_check_and_train_refuse_vllm_for_layers_that_carry_a_state(folders: dict[str, str], tmp_path: Path):
    made = {"model": {"random_init": {"family": "qwen3_5", "hidden": 32, "layers": 2, "heads": 2}}}
    vllm = {"rollout": RECIPE["rollout"] | {"engine": "vllm"}}
    student, teacher = recipe(folders["lfm2"]), recipe(folders["llama"], folders["lfm2"])
    teacher["teachers"]["t"]["engine"] = "vllm"
    copy = student | {"teachers": {"t": {"student": {"every": 1}, "engine": "vllm"}}, "distill": {}}
    asked = [(student | vllm, "rollout"), (student | vllm | made, "rollout")]
    asked += [(teacher, "teachers.t"), (copy, "teachers.t")]
    for run in (pr.check, lambda asked: pr.train(asked, out=tmp_path / "run", quiet=True)):
        for sections, key in asked:
            with pytest.raises(RecipeError, match="recurrent layers") as error:
                run(sections)
            assert error.value.path == f"{key}.engine"


@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("mamba2", {"n_groups": 2}),
        ("granitemoehybrid", {"mamba_n_groups": 2}),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe"]}),
        ("falcon_h1", None),
    ],
)
def test_vllm_takes_some_hybrids(family: str, other: dict[str, Any] | None):
    same = {"n_groups": 1, "mamba_n_groups": 1, "layers_block_type": ["mamba", "attention"]}
    known = {key: value for key, value in same.items() if key in FAMILIES[family]}
    assert VllmKind().runs_recurrent(tiny_config(family, **known))
    assert other is None or not VllmKind().runs_recurrent(tiny_config(family, **known | other))


@pytest.mark.parametrize(
    ("student", "teacher", "engine", "key"),
    [
        ("bloom", None, "torch", "model.path"),
        ("llama", "gemma4_text", "torch", "teachers.t.model"),
        ("lfm2", None, "vllm", "rollout.engine"),
        ("llama", "lfm2", "vllm", "teachers.t.engine"),
    ],
)
def test_plan_refuses_the_layers_that_train_does(
    folders: dict[str, str], tmp_path: Path, student: str, teacher: str | None, engine: str, key: str
):
    asked = recipe(folders[student], None if teacher is None else folders[teacher])
    if teacher is None:
        asked["rollout"] = asked["rollout"] | {"engine": engine}
    else:
        asked["teachers"]["t"]["engine"] = engine
    (file := tmp_path / "recipe.yaml").write_text(yaml.safe_dump(asked))
    with pytest.raises(RecipeError) as error:
        plan(file)
    assert error.value.path == key


def test_other_vision_models_are_refused_by_their_type(tmp_path: Path):
    folder = str(tmp_path / "model")
    AutoConfig.for_model("qwen3_vl").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (file := tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder)))
    for run in (lambda: pr.check(recipe(folder)), lambda: plan(file), lambda: resolve(ServeOptions(folder))):
        with pytest.raises(RecipeError, match="qwen3_vl is"):
            run()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"hidden_size": "abc"}, "hidden_size"),
        ({"layer_types": ["conv"]}, "layer_types"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"conv_L_cache": 0}, "shapes"),
        ({"num_hidden_layers": 5, "layer_types": ["conv"] * 4 + ["full_attention"]}, "lack"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    folders: dict[str, str], tmp_path: Path, wrong: dict[str, Any], why: str
):
    folder = tmp_path / "model"
    shutil.copytree(folders["lfm2"], folder)
    config = json.loads((file := folder / "config.json").read_text())
    file.write_text(json.dumps(config | wrong))
    for run in (pr.check, lambda asked: pr.train(asked, out=tmp_path / "run", quiet=True)):
        for asked in (recipe(str(folder)), recipe(folders["llama"], str(folder))):
            with pytest.raises((RecipeError, RecipeErrors), match=why):
                run(asked)


def test_serve_refuses_what_train_does(folders: dict[str, str]):
    with pytest.raises(RecipeError, match="BloomAttention"):
        resolve(ServeOptions(folders["bloom"]))
    assert resolve(ServeOptions(folders["lfm2"])).context == 256


def test_a_router_that_is_left_alone_is_a_warning(folders: dict[str, str]):
    assert any("routers" in warning for warning in pr.check(recipe(folders["phimoe"])).warnings)
    assert not any("routers" in warning for warning in pr.check(recipe(folders["lfm2"])).warnings)

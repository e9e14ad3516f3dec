"""Whole runs with an adapter: reference and critic on one base, checkpoints, exports, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from practicum.errors import PracticumError, RecipeError, RecipeErrors
from practicum.forecast.forecast import forecast, this_machine
from practicum.learning.learner_checkpoint import read_weights
from practicum.models.load_model import load_model
from practicum.models.lora import is_adapter
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Model
from practicum.roles import learner_rank
from practicum.runtime import local
from practicum.trainer import preflight
from practicum.trainer.run import train_loaded
from practicum.trainer.run_models import resolve_models

from ..teachers.tiny_teachers import save_teacher
from .recipes import TINY, tiny
from .test_experts_and_pictures import EYES, MOE, PICTURES, UNEVEN
from .test_run import metrics_of, weights_of, without_times
from .test_run_models import succeed

TRAIN = {"steps": 3, "prompts": 4, "lr": 1e-2}
REWARD = {"functions": [{"use": "tests.trainer.rewards:by_letters"}]}
KL = {"algorithm": {"kl": {"place": "loss", "coefficient": 0.1}}}
COMMON: dict[str, Any] = {"train": TRAIN, "reward": REWARD, "eval": {"rows": 4}}
IDS = torch.arange(20).unsqueeze(0)


def lora(model: dict[str, Any] = TINY["model"], **keys: Any) -> dict[str, Any]:
    return model | {"lora": {"rank": 4} | keys}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in a folder, to put adapters on."""
    return save_teacher(tmp_path_factory.mktemp("base") / "base", seed=0, hidden=32)


def recipe(folder: Path, base: str, *overrides: str, **sections: Any) -> LoadedRecipe:
    folder.mkdir(exist_ok=True)
    return tiny(folder, *overrides, **(COMMON | {"model": lora({"path": base})} | sections))


@pytest.fixture(scope="module")
def whole(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GRPO with a KL penalty, in which each model that was loaded is counted."""
    folder = tmp_path_factory.mktemp("whole")
    loaded: list[str] = []
    with pytest.MonkeyPatch.context() as patch:

        def counted(spec: Model, seed: int, **options: Any) -> Any:
            loaded.append(str(spec.path))
            return load_model(spec, seed, **options)

        for module in (local, learner_rank):
            patch.setattr(module, "load_model", counted)
        train_loaded(recipe(folder, base, **KL), folder / "run")
    assert loaded == [base], "the reference is the student's own base"
    return folder / "run"


def test_the_penalty_is_of_the_distance_from_the_base(whole: Path):
    rows = metrics_of(whole)[1:]
    assert rows[0]["train/kl"] == 0.0, "before the first update, student and base are the same to the bit"
    assert rows[-1]["train/kl"] > 1e-6


def test_a_resumed_run_is_the_whole_one_to_the_bit(tmp_path: Path, base: str, whole: Path):
    train_loaded(recipe(tmp_path, base, "train.steps=2", **KL), tmp_path / "run")
    saved = read_weights(tmp_path / "run" / "checkpoints" / "step-000002" / "student")
    assert all(map(is_adapter, saved))
    train_loaded(recipe(tmp_path, base, **KL), tmp_path / "run", resume=True)
    same_result(tmp_path / "run", whole)


def same_result(a: Path, b: Path) -> None:
    """The last step and the weights; runs that ended and were continued have evaluations in between."""
    mine, theirs = (without_times(metrics_of(run))[-1] for run in (a, b))
    assert mine == theirs
    one, other = weights_of(a), weights_of(b)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_export_is_a_merged_model_and_the_adapter(whole: Path, base: str, tmp_path: Path):
    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=IDS).logits

    merged = AutoModelForCausalLM.from_pretrained(whole / "export")
    plain = AutoModelForCausalLM.from_pretrained(base)
    start = logits(plain)
    adapted = PeftModel.from_pretrained(plain, str(whole / "export" / "adapter"))
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=0, atol=1e-4)
    assert not torch.allclose(start, logits(merged), atol=1e-3)
    config = json.loads((whole / "export" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base
    assert config["target_modules"] == sorted(TINY_LAYERS)
    succeed("export", whole, "--to", tmp_path / "copy")
    again = load_file(tmp_path / "copy" / "model.safetensors")
    assert all(torch.equal(again[name], x) for name, x in weights_of(whole).items())
    file = Path("adapter") / "adapter_model.safetensors"
    assert (tmp_path / "copy" / file).read_bytes() == (whole / "export" / file).read_bytes()


TINY_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_a_run_with_an_adapter_is_a_model_for_others(whole: Path, tmp_path: Path, base: str):
    """As the base of a next adapter, as a teacher, and to evaluate; by its folder and by its checkpoint."""
    checkpoint = whole / "checkpoints" / "step-000003"
    teachers = {"t": {"model": str(checkpoint)}}
    next_one = recipe(tmp_path, str(whole), "train.steps=1", teachers=teachers, distill={})
    train_loaded(next_one, tmp_path / "run")
    (_, row) = metrics_of(tmp_path / "run")
    assert row["train/teacher_kl"] == pytest.approx(0.0, abs=1e-5), "it is its own teacher"
    with pytest.raises(RecipeError, match=r"(?s)export/adapter, an adapter.*folder of the run"):
        preflight.preflight(recipe(tmp_path, str(whole / "export" / "adapter")))
    scores = tmp_path / "scores"
    succeed("eval", tmp_path / "recipe.yaml", "--model", whole, "--answers", scores)
    assert scores.is_file()


def test_a_run_is_a_teacher_by_its_adapter_and_stays_it_when_resumed(whole: Path, tmp_path: Path, base: str):
    checkpoint, teacher = whole / "checkpoints" / "step-000003", {}
    for named, taken in ((whole, whole / "export"), (checkpoint, whole / "exports" / checkpoint.name)):
        teacher = {"teachers": {"t": {"adapter": str(named)}}, "distill": {}}
        resolved, told = resolve_models(recipe(tmp_path, base, **teacher))
        assert resolved.recipe.teachers["t"].adapter == str(taken / "adapter")
        assert any(line.startswith("teachers.t.adapter: ") for line in told)
    for steps in (1, 2):
        loaded = recipe(tmp_path, base, f"train.steps={steps}", **teacher)
        train_loaded(loaded, tmp_path / "run", resume=steps > 1)
    assert metrics_of(tmp_path / "run")[-1]["train/teacher_kl"] > 0
    shutil.copytree(whole, tmp_path / "plain")
    shutil.rmtree(tmp_path / "plain" / "export" / "adapter")
    with pytest.raises(RecipeError, match=r"(?s)teachers\.t\.adapter: .*has no adapter.*set model to it"):
        resolve_models(
            recipe(tmp_path, base, teachers={"t": {"adapter": str(tmp_path / "plain")}}, distill={})
        )


def test_another_base_or_a_damaged_adapter_is_refused_on_resume(tmp_path: Path, base: str):
    own = shutil.copytree(base, tmp_path / "base")
    one_step = recipe(tmp_path, str(own), "train.steps=1")
    train_loaded(one_step, tmp_path / "run")
    two_steps = recipe(tmp_path, str(own))
    weights = load_file(own / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] += 1.0
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PracticumError, match="trained on another base"):
        train_loaded(two_steps, tmp_path / "run", resume=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    shutil.rmtree(tmp_path / "run" / "export")
    with pytest.raises(AssertionError, match="trained on another base"):
        succeed("export", checkpoint, "--to", tmp_path / "model")
    other = recipe(tmp_path, str(own), "model.lora.rank=2")
    with pytest.raises(PracticumError, match=r"model\.lora\.rank: 4 → 2\s+the checkpoint holds an adapter"):
        train_loaded(other, tmp_path / "run", resume=True)
    (shard,) = (checkpoint / "student").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-100])
    shutil.copy(Path(base) / "model.safetensors", own)
    with pytest.raises(PracticumError, match="step-000001"):
        train_loaded(two_steps, tmp_path / "run", resume=True)


def resumed(folder: Path, base: str, *steps: int, **sections: Any) -> Path:
    """A run of so many steps, each time continued."""
    for number, count in enumerate(steps):
        loaded = recipe(folder, base, f"train.steps={count}", **sections)
        train_loaded(loaded, folder / "run", resume=number > 0)
    return folder / "run"


@pytest.mark.long
def test_a_critic_with_its_own_adapter_learns_and_resumes_to_the_bit(tmp_path: Path, base: str):
    ppo = {"algorithm": {"advantage": "gae", "kl": {"place": "reward"}}, "critic": {"lr": 1e-2}}
    one = resumed(tmp_path / "a", base, 2, **ppo)
    same_result(one, resumed(tmp_path / "b", base, 1, 2, **ppo))
    student, critic = (one / "checkpoints" / "step-000002" / part for part in ("student", "critic"))
    names = {name.removeprefix("base.") for name in read_weights(critic)} - {"head.weight", "head.bias"}
    assert names == {name.removeprefix("model.") for name in read_weights(student)}


@pytest.mark.parametrize(
    "sections",
    [
        {"model": lora(MOE), **UNEVEN, **KL, "train": TRAIN | {"gradient_checkpointing": True}},
        {"model": lora(EYES), "tasks": PICTURES, "train": TRAIN | {"autocast": "bfloat16"}},
        {"teachers": {"t": {"student": {"every": 1}}}, "distill": {"signal": "full"}},
        {"agent": {"loop": "tests.museum.loops:two_contexts"}, **KL},
    ],
    ids=["experts", "pictures", "copies", "agents"],
)
@pytest.mark.long
def test_adapters_learn_in_other_kinds_of_runs_too(tmp_path: Path, sections: dict[str, Any], base: str):
    run = resumed(tmp_path, base, 1, 2, **sections)
    assert metrics_of(run)[-1]["train/grad_norm"] > 0
    adapter = load_file(run / "export" / "adapter" / "adapter_model.safetensors")
    assert any(bool(x.any()) for name, x in adapter.items() if "lora_B" in name), "nothing was learnt"


def test_check_tells_of_the_adapter_and_of_a_rate_for_whole_models(tmp_path: Path, base: str):
    found = preflight.preflight(recipe(tmp_path, base, "train.lr=1e-4"))
    assert any(line.startswith("adapter: 0.0") and "are trained" in line for line in found.findings)
    (warning,) = [line for line in found.warnings if "train.lr" in line]
    assert "0.0001" in warning
    assert "ten times" in warning
    assert not preflight.preflight(recipe(tmp_path, base)).warnings


def test_the_forecast_counts_gradients_and_moments_of_the_adapter_alone(tmp_path: Path, base: str):
    def parts(**sections: Any) -> dict[str, float]:
        loaded = recipe(tmp_path, base, **sections)
        (memory,) = forecast(loaded.recipe, this_machine(), 8.0).memory
        return dict(memory.parts)

    adapted, full = parts(**KL), parts(model={"path": base}, **KL)
    model = load_model(recipe(tmp_path, base).recipe.model, 0)
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapted["gradients"] == trained
    assert adapted["Adam's moments"] == 2 * trained
    assert full["gradients"] > 2 * adapted["gradients"]
    assert "reference" in full
    assert "reference" not in adapted


def test_recipes_that_can_not_be_are_refused(tmp_path: Path, base: str):
    def refused(key: str, value: Any, words: str) -> None:
        with pytest.raises((RecipeError, RecipeErrors), match=words):
            recipe(tmp_path, base, f"model.lora.{key}={value}")

    refused("rank", 0, r"model\.lora\.rank")
    refused("alpha", 0, r"model\.lora\.alpha")
    refused("targets", "[]", r"model\.lora\.targets")
    with pytest.raises(RecipeError, match=r"(?s)model\.lora\.targets.*did you mean q_proj"):
        preflight.preflight(recipe(tmp_path, base, "model.lora.targets=[q_prj]"))

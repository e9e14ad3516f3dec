"""Reward models at work: their scores join the rule rewards, during the rollout or after it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.teachers.tiny_reward_models import local, run, save_classifier, save_judge
from tests.trainer.recipes import tiny

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Ragged
from practicum.errors import RecipeErrors, RewardError, TeacherError
from practicum.processes.host import running_hosts
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.rewards.judge import JudgeInput
from practicum.rewards.reward_scorer import RewardScorer
from practicum.roles.reward import RewardRole
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import evaluation_plan, make_plan
from practicum.runtime.local import LocalRoles, LocalWorkers, start_local
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.trainer.evaluate import evaluate
from practicum.trainer.preflight import check_without_models
from practicum.trainer.run import train_loaded
from practicum.trainer.sample_step import training_attempts

FUNCTIONS = [{"use": "tests.trainer.rewards:even_length", "weight": 2.0}]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("classifier")
    save_classifier(folder)
    return str(folder)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A judge that says 7s."""
    folder = tmp_path_factory.mktemp("seven")
    save_judge(folder, says="7")
    return str(folder)


@pytest.fixture(scope="module")
def speechless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A judge that says no number."""
    folder = tmp_path_factory.mktemp("speechless")
    save_judge(folder, says="a")
    return str(folder)


def asked(folder: str, **more: Any) -> dict[str, Any]:
    """A judge of the recipe: its question is short, for a tiny context."""
    return {"kind": "judge", "model": folder, "prompt": "{prompt}{response}?", "max_new_tokens": 1, **more}


def recipe_of(folder: Path, reward: dict[str, Any], **sections: Any) -> LoadedRecipe:
    return tiny(folder, reward=reward, **sections)


@contextmanager
def roles_of(loaded: LoadedRecipe, *, evaluating: bool = False) -> Iterator[LocalRoles]:
    recipe = loaded.recipe
    plan = evaluation_plan() if evaluating else make_plan(recipe)
    roles = start_local(recipe, plan, Watch(recipe.checks, print))
    try:
        yield roles
    finally:
        roles.close()


def roll_out(loaded: LoadedRecipe, roles: LocalRoles) -> BatchRef:
    recipe = loaded.recipe
    prompts = make_stream(recipe.tasks, recipe.seed).take(recipe.train.prompts)
    attempts = training_attempts(recipe, prompts, roles.stop)
    return roles.rollout.rollout(attempts, "train", seed=recipe.seed)


def rewards(loaded: LoadedRecipe, roles: LocalRoles) -> tuple[BatchRef, dict[str, list[float]]]:
    """The batch with its rewards, and what each part of them said of each session that has one."""
    batch = roll_out(loaded, roles)
    roles.rollout.reward(batch)
    batch, parts = roles.store.batch("train", batch.keys), {}
    for tags in batch.tags:
        for name, value in (tags.reward_parts or {}).items() if tags.reward is not None else ():
            parts.setdefault(name, []).append(value)
    return batch, parts


def answers(roles: LocalRoles, batch: BatchRef) -> list[str]:
    column = roles.store.get(batch, ["response_ids"])["response_ids"]
    assert isinstance(column, Ragged)
    return [str(roles.rank.tokenizer.decode(ids, skip_special_tokens=True)) for ids in column.rows]


def role_of(role: RolloutRole) -> RewardRole:
    assert isinstance(role.workers, LocalWorkers)
    return role.workers.rewards


def rm_of(roles: LocalRoles, name: str = "rm") -> RewardScorer:
    return roles.frozen.reward_models[name]


def assert_mixed(loaded: LoadedRecipe, roles: LocalRoles, *, model_weight: float) -> None:
    """The rewards of a rollout are those of the function and of the classifier, added by weight."""
    batch, parts = rewards(loaded, roles)
    spec = loaded.recipe.reward.models["rm"]
    scores, even = [], []
    with local(spec) as model:
        for i, answer in enumerate(answers(roles, batch)):
            prompt = roles.rollout.prompts[batch.keys[i]]
            scores.append(run(model.judge(JudgeInput("", str(prompt.content), answer, None))))
            even.append(float(len(answer) % 2 == 0))
            expected = 2.0 * even[i] + model_weight * scores[i]
            assert batch.tags[i].reward == pytest.approx(expected, rel=0, abs=1e-5)
    assert sorted(parts["rm"]) == pytest.approx(sorted(scores), rel=0, abs=1e-5)
    assert sorted(parts["even_length"]) == sorted(even)
    assert len({tags.reward for tags in batch.tags}) > 2


def test_a_colocated_model_is_mixed_with_rule_rewards_by_weight(tmp_path: Path, classifier: str):
    reward = {"functions": FUNCTIONS, "models": {"rm": {"model": classifier, "label": 2, "weight": -0.5}}}
    loaded = recipe_of(tmp_path, reward)
    with roles_of(loaded) as roles:
        with pytest.raises(TeacherError, match="sleeps"):
            run(rm_of(roles).judge(JudgeInput("", "1", "2", None)))
        assert_mixed(loaded, roles, model_weight=-0.5)
        with pytest.raises(TeacherError, match="sleeps"):
            run(rm_of(roles).judge(JudgeInput("", "1", "2", None)))


@pytest.mark.long
def test_a_model_of_its_own_judges_during_the_rollout_and_a_hung_one_is_named(
    tmp_path: Path, classifier: str
):
    model = {"model": classifier, "label": 2, "placement": "own", "deadline_s": 5.0}
    loaded = recipe_of(tmp_path, {"functions": FUNCTIONS, "models": {"rm": model}})
    with roles_of(loaded) as roles:
        batch = roll_out(loaded, roles)
        assert all(tags.reward is not None for tags in batch.tags), "scored during the rollout"
        assert roles.rollout.hidden.take() is not None
        roles.rollout.forget(batch.keys)
        roles.store.clear("train")
        assert_mixed(loaded, roles, model_weight=1.0)
        roles.store.clear("train")
        os.kill(running_hosts()["reward model rm"], signal.SIGSTOP)
        with pytest.raises(
            TeacherError, match=r"reward model rm did not answer for prompt \d+/.* within 5 s"
        ):
            roll_out(loaded, roles)


def test_a_whole_run_learns_from_models_alone_and_evaluates_by_them(
    tmp_path: Path, classifier: str, seven: str
):
    models = {"rm": {"model": classifier, "label": 1}, "asked": asked(seven, weight=10.0)}
    loaded = recipe_of(
        tmp_path,
        {"functions": [], "models": models},
        train={"steps": 2, "prompts": 2, "lr": 1e-3},
        eval={"rows": 2},
    )
    outcome = train_loaded(loaded, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = lines[1]
    assert step["reward/part/asked"] == pytest.approx(0.7)
    assert step["reward/mean"] == pytest.approx(step["reward/part/rm"] + 7.0)
    assert step["reward/std"] > 0
    assert "eval/greedy" in outcome.first_eval


def test_an_evaluation_counts_the_models_and_sleeps_after(tmp_path: Path, seven: str):
    loaded = recipe_of(tmp_path, {"functions": [], "models": {"asked": asked(seven, weight=10.0)}})
    recipe = loaded.recipe
    with roles_of(loaded, evaluating=True) as roles:
        prompts = eval_prompts(recipe.tasks, 3, recipe.seed)
        assert evaluate(recipe, roles, prompts, print).scores["eval/greedy"] == pytest.approx(7.0)
        with pytest.raises(TeacherError, match="sleeps"):
            run(rm_of(roles, "asked").judge(JudgeInput("", "1", "2", None)))


def test_an_evaluation_of_supervised_training_asks_the_models_too(tmp_path: Path, seven: str):
    loaded = recipe_of(
        tmp_path,
        {"functions": [], "models": {"asked": asked(seven)}},
        algorithm={"loss": "supervised", "advantage": "none"},
    )
    with roles_of(loaded) as roles:
        assert not role_of(roles.rollout).models
        assert role_of(roles.eval_rollouts[0]).models


def test_a_judge_without_a_number_stops_the_run_with_its_name_and_the_sample(tmp_path: Path, speechless: str):
    loaded = recipe_of(tmp_path, {"functions": [], "models": {"asked": asked(speechless)}})
    with roles_of(loaded) as roles:
        expected = r"(?s)reward model asked replied 'a', which has no number.*sample: +prompt 0/session 0"
        with pytest.raises(RewardError, match=expected):
            rewards(loaded, roles)


def test_a_judge_without_a_number_leaves_samples_out_if_the_recipe_says_skip(tmp_path: Path, speechless: str):
    reward = {"functions": FUNCTIONS, "models": {"asked": asked(speechless)}, "on_error": "skip"}
    loaded = recipe_of(tmp_path, reward)
    with roles_of(loaded) as roles:
        batch, parts = rewards(loaded, roles)
    assert parts == {}
    assert {tags.status for tags in batch.tags} == {"failed"}
    assert {tags.failure for tags in batch.tags} == {"reward model asked replied 'a', which has no number"}


@pytest.mark.parametrize("kind", ["classifier", "judge"])
def test_model_sleeps_and_engine_wakes_when_judging_fails(
    tmp_path: Path, classifier: str, seven: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    model = {"model": classifier} if kind == "classifier" else asked(seven)
    loaded = recipe_of(tmp_path, {"functions": [], "models": {"rm": model | {"deadline_s": 0.05}}})

    async def never(self: object, case: JudgeInput) -> float:
        await asyncio.Event().wait()
        raise AssertionError

    with roles_of(loaded) as roles:
        late = pytest.raises(TeacherError, match=r"reward model rm did not answer for .* within 0.05 s")
        with monkeypatch.context() as patch, late:
            patch.setattr(type(rm_of(roles).judges[0]), "judge", never)
            rewards(loaded, roles)
        with pytest.raises(TeacherError, match="sleeps"):
            run(rm_of(roles).judge(JudgeInput("", "1", "2", None)))
        roles.store.clear("train")
        assert len(roll_out(loaded, roles)) == 16, "the student's engine is awake"


def test_teachers_and_reward_models_share_one_budget(tmp_path: Path, classifier: str):
    models = {"t": {"model": classifier}}  # a reward model may be called like a teacher
    sections: dict[str, Any] = {"teachers": {"t": {"student": {}}}, "distill": {}}
    loaded = recipe_of(
        tmp_path, {"models": models}, runtime={"threads": 1, "teachers_gb": 1.2e-4}, **sections
    )
    with roles_of(loaded) as roles:
        assert roles.rank.teachers is not None
        residency = roles.rank.teachers.loaded.residency
        assert residency is not None
        sizes = list(residency._sizes.values())
        assert len(sizes) == 2
        assert max(sizes) <= 1.2e-4 * 2**30 < sum(sizes), "a budget for one of them"
        batch, _ = rewards(loaded, roles)
        assert (residency.level("t"), residency.level("reward.models.t")) == ("disk", "device")
        roles.stages["teachers"](StepInfo(batch, prompts=roles.rollout.prompts))
        assert (residency.level("t"), residency.level("reward.models.t")) == ("device", "disk")
        assert residency.wakes == {"t": 1, "reward.models.t": 1}


def test_chat_prompts_are_shown_as_conversations(tmp_path: Path, seven: str):
    tasks = {"copy": {"kind": "copy", "chat": True, "system": "be brief"}, "sort": {"kind": "sort"}}
    loaded = recipe_of(tmp_path, {"functions": [], "models": {"asked": asked(seven)}}, tasks=tasks)
    with roles_of(loaded) as roles:
        role = role_of(roles.eval_rollouts[0])
        talk = [{"role": "user", "content": "hi"}]
        for content, task, roles_told in (
            ("hi", "copy", ["system", "user", "assistant"]),
            (talk, "sort", ["user", "assistant"]),
            ("hi", "sort", None),
        ):
            prompt = Prompt(0, task, task, content, 5, {}, 0, 0)
            case = role._judge_input(Key(0), prompt, "yo")
            told = None if case.messages is None else [message["role"] for message in case.messages]
            assert told == roles_told
            assert case.answer == "5"
            assert case.messages is None or case.messages[-1]["content"] == "yo"


def test_the_check_describes_reward_models_before_weights_are_loaded(tmp_path: Path, classifier: str):
    found = check_without_models(
        recipe_of(tmp_path, {"models": {"rm": {"model": classifier}}}).recipe
    ).findings
    assert "reward model rm: Qwen3ForSequenceClassification, output 0 of 3" in found


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"reward": {"models": {"checker": {"model": "m"}}}}, r"reward\.models\.checker: .*named like"),
        (
            {"reward": {"functions": FUNCTIONS, "models": {"even_length": {"model": "m"}}}},
            r"reward\.models\.even_length: .*metric reward/part/even_length",
        ),
        (
            {
                "reward": {"models": {"rm": {"model": "m"}}},
                "algorithm": {"loss": "supervised", "advantage": "none"},
                "eval": {"rows": 0},
            },
            r"reward\.models: found .* while no reward is computed",
        ),
    ],
    ids=["checker", "function", "unasked"],
)
def test_models_that_collide_or_that_nobody_asks_are_refused(
    tmp_path: Path, sections: dict[str, Any], words: str
):
    with pytest.raises(RecipeErrors, match=f"(?s){words}"):
        tiny(tmp_path, **sections)

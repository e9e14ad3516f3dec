from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from practicum.errors import RecipeErrors
from practicum.recipe.load_recipe import load_recipe

Write = Callable[..., Path]
SUPERVISED = "algorithm.loss=supervised algorithm.advantage=none"
PPO = "algorithm.advantage=gae critic={}"

REFUSED = [
    ("name=../up", "name"),
    ("name=.hidden", "name"),
    ("name=a/b", "name"),
    ("name=''", "name"),
    ("model.random_init=null", "model"),
    ("model.device=gpu", "model.device"),
    ("model.dtype=float64 train.autocast=bfloat16", "train.autocast"),
    ("model.random_init.hidden=132", "model.random_init.hidden"),
    ("model.random_init.family=gpt2 model.random_init.hidden=130", "model.random_init.hidden"),
    ("rollout.max_new_tokens=512", "rollout.max_new_tokens"),
    ("tasks.b.weight=2", "tasks.b"),
    ("tasks.b.kind=add tasks.b.file=x.jsonl", "tasks.b"),
    ("tasks.b.kind=add tasks.b.eval_file=x.jsonl", "tasks.b.eval_file"),
    ("tasks.b.kind=add tasks.b.prompt=question", "tasks.b.prompt"),
    ("tasks.b.kind=add tasks.b.system=hello", "tasks.b.system"),
    ("tasks.b.file=x.jsonl tasks.b.options={a:1}", "tasks.b.options"),
    ("tasks={'a/b':{kind:add}}", "tasks"),
    ("reward.functions=[{weight:0}]", "reward.functions"),
    ("reward.functions=[]", "reward.functions"),
    ("tasks.sort.rewards=[]", "tasks.sort.rewards"),
    ("algorithm.advantage=none", "algorithm.advantage"),
    ("algorithm.loss=supervised", "algorithm.advantage"),
    ("algorithm.lam=0.9", "algorithm.lam"),
    ("algorithm.lam=0.9", "algorithm.lam"),
    (f"{SUPERVISED} algorithm.entropy=0.1", "algorithm.entropy"),
    (f"{SUPERVISED} algorithm.kl.place=loss", "algorithm.kl.place"),
    ("algorithm.kl.target=0.1", "algorithm.kl.target"),
    ("algorithm.kl.target=0.1 algorithm.kl.place=loss", "algorithm.kl.target"),
    (
        "algorithm.kl.target=0.1 algorithm.kl.place=reward algorithm.kl.coefficient=0",
        "algorithm.kl.coefficient",
    ),
    ("algorithm.kl.reference=x", "algorithm.kl.reference"),
    ("algorithm.kl.place=loss algorithm.kl.estimator=k1", "algorithm.kl.estimator"),
    ("algorithm.mismatch_cap=3", "algorithm.mismatch_cap"),
    (f"{SUPERVISED} algorithm.mismatch=token", "algorithm.mismatch"),
    ("algorithm.mismatch=token algorithm.old_logprobs=rollout", "algorithm.mismatch"),
    ("algorithm.mismatch=sequence rollout.top_p=0.9", "algorithm.mismatch"),
    ("algorithm.advantage=gae", "critic"),
    ("critic={}", "critic"),
    (f"{PPO} critic.warmup_steps=100", "critic.warmup_steps"),
    ("rollout.samples=1", "rollout.samples"),
    ("rollout.samples=1 algorithm.advantage=dr_grpo", "rollout.samples"),
    ("rollout.samples=1 algorithm.advantage=rloo", "rollout.samples"),
    ("rollout.samples=1 algorithm.advantage=reinforce_pp_baseline", "rollout.samples"),
    (f"{PPO} refills=4", "refills"),
    (f"{SUPERVISED} refills=4", "refills"),
    (f"{SUPERVISED} critic={{}}", "critic"),
    ("algorithm.advantage=remax refills=4", "refills"),
    ("train.minibatches=257", "train.minibatches"),
    ("train.minibatches=2 train.minibatch_size=16", "train.minibatch_size"),
    ("train.minibatch_size=257", "train.minibatch_size"),
    (f"{PPO} critic.minibatch_size=257", "critic.minibatch_size"),
    ("algorithm.clip_low=1", "algorithm.clip_low"),
    ("algorithm.clip_low=1.5 algorithm.loss=gspo", "algorithm.clip_low"),
    ("agent.tools=[calculator]", "agent.tools"),
    ("agent.turns=3", "agent.turns"),
    ("agent.loop=tool_use", "agent.tools"),
    ("agent.loop=retry agent.compress_at=64", "agent.compress_at"),
    ("agent.loop=tool_use agent.tools=[calculator] agent.message=no", "agent.message"),
    ("agent.loop={command:[x]} agent.tools=[calculator]", "agent.tools"),
    ("agent.loop={command:[x]} agent.message=no", "agent.message"),
    ("agent.loop=tool_use agent.tools=[{mcp:{command:[]}}]", "agent.tools[0].mcp.command"),
    ("algorithm.gamma=0.9", "algorithm.gamma"),
    ("agent.deadline_s=601", "agent.deadline_s"),
    ("model.random_init.experts=4", "model.random_init.experts"),
    ("train.warmup_steps=101", "train.warmup_steps"),
    ("train.final_lr=1 train.schedule=linear", "train.final_lr"),
    ("train.final_lr=1e-5", "train.final_lr"),
    ("eval.every=5 eval.rows=0", "eval.every"),
]

ALLOWED = [
    "",
    SUPERVISED,
    f"{SUPERVISED} train.minibatches=4 train.epochs=2 rollout.samples=1",
    f"{PPO} rollout.samples=1 algorithm.gamma=0.9 algorithm.lam=0.9 critic.warmup_steps=5",
    "algorithm.advantage=remax rollout.samples=1",
    "algorithm.advantage=reinforce_pp rollout.samples=1",
    "algorithm.loss=gspo algorithm.aggregation=token_mean",
    "algorithm.loss=cispo algorithm.clip_low=1",
    "algorithm.loss=reinforce algorithm.entropy=0.01",
    "algorithm.kl.place=reward algorithm.kl.target=0.1",
    "algorithm.kl.place=loss algorithm.kl.reference=some/model",
    "algorithm.old_logprobs=rollout train.epochs=3 train.minibatches=5",
    "algorithm.mismatch=sequence algorithm.mismatch_cap=4 algorithm.loss=reinforce rollout.temperature=0.7",
    "algorithm.mismatch=token algorithm.mismatch_cap=5",
    "train.minibatch_size=48",
    "train.minibatch_size=300 agent.loop=retry",
    "agent.loop=compress agent.tools=[calculator,python] agent.compress_at=64 agent.turns=3",
    "agent.loop=mine:loop agent.tools=[calculator] agent.message=no agent.on_failure=retry",
    "rollout.deadline_s=30",
    "agent.on_failure=drop_group model.random_init.family=qwen3_moe model.random_init.experts=4",
    "refills=4",
    "train.steps=0 train.warmup_steps=10",
    "train.schedule=cosine train.final_lr=1e-5",
    "eval.rows=0",
    "model.random_init.family=gpt2 model.random_init.heads=3 model.random_init.hidden=96",
    "model.device=cuda:1",
    "tasks.b.file=x.jsonl tasks.b.prompt=question tasks.b.system=hello",
    "tasks.b.kind=add tasks.b.chat=true tasks.b.system=hello",
    "reward.functions=[{use:exact,weight:-1}]",
]


@pytest.mark.parametrize(("overrides", "path"), REFUSED)
def test_an_impossible_combination_is_refused(write: Write, overrides: str, path: str) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(write(), [text.replace(":", ": ") for text in overrides.split()])
    assert [error.path for error in caught.value.errors] == [path], str(caught.value)


def test_an_option_that_the_loop_does_not_read_names_the_loops_that_do(write: Write) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(write(), ["agent.tools=[calculator]"])
    said = str(caught.value)
    assert caught.value.errors[0].path == "agent.tools"
    assert "tool_use, compress" in said


@pytest.mark.parametrize("overrides", ALLOWED)
def test_a_possible_combination_is_allowed(write: Write, overrides: str) -> None:
    sets = [t.replace(":", ": ") if "{" in t else t for t in overrides.split()]
    load_recipe(write(), sets)


def test_all_combinations_are_reported_at_once(write: Write) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(write("critic: {}\n"), ["rollout.samples=1", "train.minibatches=500"])
    found = {error.path: error.found for error in caught.value.errors}
    assert set(found) == {"critic", "rollout.samples", "train.minibatches"}
    assert found["critic"].endswith("(file:5)")
    assert found["rollout.samples"].endswith("(--set)")
    assert "rollout.samples" in str(caught.value)

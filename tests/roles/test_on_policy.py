"""The engine and the learner see one distribution: the first importance ratio is 1."""

from pathlib import Path

import pytest
import torch

from practicum.checks.watch import Watch
from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import Sampling
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.runtime.local import start_local
from practicum.sessions.attempts import Attempt
from practicum.tasks.stream import make_stream

TOLERANCE = {"float32": 2e-5, "float64": 1e-6}
"""Largest |difference| in nats. Engine logprobs are float32 whatever the model is, so 1e-6 is theirs."""


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_old_logprobs_equal_the_engines(family: str, dtype: str, temperature: float, tmp_path: Path):
    recipe = Recipe.model_validate(
        {
            "name": "t",
            "model": {"random_init": {"family": family, "hidden": 32, "layers": 2}, "dtype": dtype},
            "tasks": {"sort": {"kind": "sort"}},
            "rollout": {"samples": 4, "max_new_tokens": 12, "temperature": temperature, "max_num_seqs": 8},
            "algorithm": {"old_logprobs": "recompute"},
            "runtime": {"threads": 1},
        }
    )
    plan = make_plan(recipe)
    roles = start_local(recipe, plan, Watch(recipe.checks, print))
    try:
        prompts = make_stream(recipe.tasks, recipe.seed).take(4)
        drawn = Sampling(max_new_tokens=12, stop=roles.stop, temperature=temperature)
        attempts = [Attempt(p, i, drawn) for p in prompts for i in range(4)]
        batch = roles.rollout.rollout(attempts, "train", seed=0)
        roles.rank.student.old_logprobs(StepInfo(batch))
        columns = roles.store.get(batch, ["old_logprobs", "rollout_logprobs", "plain_logprobs"])
    finally:
        roles.close()
    values = {name: c.values for name, c in columns.items() if isinstance(c, Ragged)}
    gap = (values["old_logprobs"].double() - values["rollout_logprobs"].double()).abs().max()
    assert gap < TOLERANCE[dtype]
    same = torch.equal(values["rollout_logprobs"], values["plain_logprobs"])
    assert same == (temperature == 1.0)

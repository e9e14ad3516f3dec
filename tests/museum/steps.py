"""Steps of tiny recipes, with and without a bug of another trainer put back into this one."""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from practicum.checks.watch import Watch
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import make_plan
from practicum.runtime.local import start_local
from practicum.tasks.stream import make_stream
from practicum.trainer.step import StepRunner
from practicum.trainer.window import make_sampling

from ..teachers.tiny_teachers import save_teacher

_FOLDER = TemporaryDirectory(prefix="museum-")
BASE: dict[str, Any] = {
    "name": "museum",
    "seed": 3,
    "tasks": {"copy": {"kind": "copy", "options": {"length": [1, 2]}}},
    "reward": {"functions": [{"use": "tests.trainer.rewards:by_letters"}]},
    "rollout": {"samples": 4, "max_new_tokens": 6, "max_num_seqs": 8, "stop": list(string.digits)},
    "train": {"steps": 2, "prompts": 2, "lr": 1e-2},
    "runtime": {"threads": 1},
}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"rollout": BASE["rollout"] | {"temperature": 0.5}},
    "cut": {"rollout": BASE["rollout"] | {"top_p": 0.7, "temperature": 0.9}},
    "agent": {"agent": {"loop": "tests.museum.loops:two_contexts"}},
    "cached": {"agent": {"loop": "tests.museum.loops:a_word_and_an_answer"}},
    "thinned": {"agent": {"loop": "tests.museum.loops:one_is_left"}},
    "small": {"train": BASE["train"] | {"microbatch_tokens": 24}},
    "old": {"algorithm": {"old_logprobs": "recompute"}},
    "kl": {"algorithm": {"kl": {"place": "loss"}}},
    "adapter": {"model": {"lora": {"rank": 4}}},
    "half": {"model": {"lora": {"rank": 4}, "dtype": "bfloat16"}},
    "ahead": {"rollout": BASE["rollout"] | {"lag": 1}, "train": BASE["train"] | {"steps": 3}},
    "padded": {"train": BASE["train"] | {"minibatch_size": 3}},
    "gpt2": {
        "model": {"random_init": {"family": "gpt2", "hidden": 32, "layers": 2, "heads": 2, "context": 64}}
    },
    "late": {"rollout": BASE["rollout"] | {"deadline_s": 1.0}},
    "taught": {"distill": {"divergence": "reverse_kl", "signal": "top_k", "top_k": 8}},
}


@cache
def model(seed: int) -> str:
    """A tiny model on disk that is sure of its next tokens."""
    return save_teacher(Path(_FOLDER.name) / str(seed), seed=seed, scale=10.0)


def recipe_of(name: str) -> Recipe:
    """One of `RECIPES`; its student is sure of its next tokens unless it is made."""
    sections = BASE | {"model": {"path": model(1)}} | RECIPES[name]
    if "lora" in sections.get("model", {}):
        sections["model"] = sections["model"] | {"path": model(1)}
    if "distill" in sections:
        sections["teachers"] = {"t": {"model": model(2)}}
    return Recipe.model_validate(sections)


@contextmanager
def started(name: str) -> Iterator[StepRunner]:
    """The steps of one of `RECIPES`, in this process."""
    recipe = recipe_of(name)
    plan, watch = make_plan(recipe), Watch(recipe.checks, print)
    stream = make_stream(recipe.tasks, recipe.seed)
    with (
        closing(start_local(recipe, plan, watch)) as roles,
        closing(make_sampling(recipe, plan, roles, stream)) as sampling,
    ):
        yield StepRunner(recipe, plan, roles, sampling, watch)


def take_steps(name: str, count: int = 2) -> list[dict[str, float]]:
    """The metrics of the first steps; a check that fires ends them."""
    with started(name) as runner:
        return [runner.step(number) for number in range(1, count + 1)]


@cache
def passes(name: str) -> bool:
    """Whether the steps are taken, and something is learnt, while no bug is there; once for each recipe."""
    return all(metrics["train/grad_norm"] > 0 for metrics in take_steps(name))

"""Two things that a lag can do to learning, shown on the demo's base model, which learns to reverse letters.

Dropping: groups of long prompts take longer. A schedule that throws away what is late trains on fewer of them
than it samples; ours takes every group in its turn. Late is decided by numbers here (a group of a long prompt
is late in so many of ten cases), so that both schedules are exact. Such a schedule is in this file only.

Weights: REINFORCE without importance weights at lag 4, which a recipe refuses, beside the same lag with
weights, and beside no lag, at two learning rates. `checks.sample_size` speaks before the reward falls.

`python -m benchmarks.async_evidence [NAME …]` trains these, or all; results of others are kept.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.model import demo_folder
from benchmarks.stepping import Steps
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.tasks.prompts import Prompt
from practicum.trainer.run import train_loaded
from practicum.trainer.sample_step import SampledStep, StepSampler

SHORT, LONG = 3, 5
"""Letters to reverse."""
LATE = {"short": 0.05, "long": 0.6}
"""Share of the groups that are too late for a schedule that drops."""
STEPS, PROMPTS, SAMPLES, LR = 60, 32, 8, 2e-4
FAST_LRS, LAG, COLLAPSE_STEPS = (5e-4, 1e-3), 4, 30
ADAM = {"warmup_steps": 5, "betas": [0.9, 0.95]}
COLLAPSED = 0.5
"""A reward below this share of its best so far counts as collapsed."""


def written(name: str, **sections: Any) -> dict[str, Any]:
    """GRPO on short and long words."""
    tasks = {"short": SHORT, "long": LONG}
    return {
        "name": f"evidence-{name}",
        "model": {"path": str(demo_folder())},
        "tasks": {
            n: {"kind": "reverse", "options": {"length": [size, size], "letters": 5}}
            for n, size in tasks.items()
        },
        "algorithm": {"entropy": 0.01},
        "rollout": {"samples": SAMPLES, "max_new_tokens": 8},
        "train": {"prompts": PROMPTS, "lr": LR, "steps": STEPS, **ADAM},
        "eval": {"rows": 256},
        "track": {"record": "none"},
        "runtime": {"threads": 1},
        "async": {"lag": 1},
        **sections,
    }


def is_late(prompt: Prompt) -> bool:
    """Whether a schedule that drops would throw this prompt's group away."""
    return random.Random(f"late {prompt.uid}").random() < LATE[prompt.task]


def train(drops: bool) -> dict[str, float]:
    """Greedy scores by task before and after training, and the share of long prompts that were trained on."""
    trained: dict[str, int] = {}
    whole = StepSampler._take

    def take(self: StepSampler, step: SampledStep, count: int) -> list[Prompt]:
        """The next prompts; those whose groups are late are passed over by a schedule that drops."""
        kept: list[Prompt] = []
        while len(kept) < count:
            kept += [prompt for prompt in whole(self, step, 1) if not (drops and is_late(prompt))]
        for prompt in kept:
            trained[prompt.task] = trained.get(prompt.task, 0) + 1
        return kept

    StepSampler._take = take
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcome = train_loaded(load_recipe(written("drop")), Path(folder) / "run", quiet=True)
    finally:
        StepSampler._take = whole
    after = {name.removeprefix("eval/"): score for name, score in outcome.last_eval.items()}
    before = {f"first {name.removeprefix('eval/')}": score for name, score in outcome.first_eval.items()}
    return before | after | {"long trained": trained.get("long", 0) / sum(trained.values())}


WAYS: dict[str, dict[str, Any]] = {
    "no lag": {"async": {"lag": 0}, "algorithm": {"loss": "reinforce"}},
    "lag 4, unweighted": {"async": {"lag": LAG}, "algorithm": {"loss": "reinforce"}},
    "lag 4, weighted": {
        "async": {"lag": LAG},
        "algorithm": {"loss": "reinforce", "mismatch": {"weights": "token"}},
    },
    "lag 4, dppo": {"async": {"lag": LAG}, "algorithm": {"loss": "dppo"}},
}


def collapse(way: str, lr: float) -> dict[str, Any]:
    """Rewards and sample sizes by step, when the check first spoke, and when the reward collapsed."""
    sections = WAYS[way] | {"train": {"prompts": PROMPTS, "lr": lr, "steps": COLLAPSE_STEPS, **ADAM}}
    recipe = Recipe.model_validate(written("collapse", **sections))  # which does not refuse what is wrong
    rewards, sizes, warned = list[float](), list[float | None](), None
    with Steps(recipe) as run:
        for number in range(1, COLLAPSE_STEPS + 1):
            metrics = run.run.runner.step(number)
            rewards.append(metrics["reward/mean"])
            sizes.append(metrics.get("train/sample_size"))
            if warned is None and metrics.get("checks/sample_size"):
                warned = number
    return {"rewards": rewards, "sizes": sizes, "warned": warned, "collapsed": collapsed_at(rewards)}


def collapsed_at(rewards: list[float]) -> int | None:
    """The first step from which on the reward stays below a share of the best before, for 5 steps or more."""
    for step in range(1, len(rewards) - 4):
        best = max(rewards[:step])
        if best > 0 and all(reward < COLLAPSED * best for reward in rewards[step:]):
            return step + 1
    return None


SCHEDULES = {"in order": False, "dropping": True}


def main(names: Sequence[str]) -> None:
    """Train with these schedules and ways of weighing, or all, and add to the results."""
    path = harness.RESULTS / "async_evidence.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    dropping, weights = found.get("dropping", {}), found.get("weights", {})
    for name in names or [*SCHEDULES, *WAYS]:
        if name in SCHEDULES:
            dropping[name] = train(SCHEDULES[name])
            print(f"{name}: {dropping[name]}", flush=True)
        else:
            for lr in FAST_LRS:
                run = weights[f"{name}, {lr:g}"] = {"way": name, "lr": lr, **collapse(name, lr)}
                told = {key: run[key] for key in ("warned", "collapsed")}
                print(f"{name}, {lr:g}: {told}, rewards {run['rewards'][::5]}", flush=True)
        settings = {"steps": STEPS, "prompts": PROMPTS, "samples": SAMPLES, "late": LATE}
        settings |= {"lrs": FAST_LRS, "lag": LAG, "collapse_steps": COLLAPSE_STEPS}
        content = {"settings": settings, "dropping": dropping, "weights": weights}
        harness.write_results("async_evidence", content)


if __name__ == "__main__":
    main(sys.argv[1:])

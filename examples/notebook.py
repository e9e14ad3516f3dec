"""Train from Python, cell by cell: a tiny model from nothing, GRPO from there, and its curves.

Run it as a script, or open it in an editor that knows `# %%` cells (VS Code, PyCharm, Spyder, or Jupyter with
jupytext). It needs no GPU and no network, only matplotlib: pip install 'practicum[plot]'.
Its folder is runs/notebook.
"""

# %% A recipe may be a dict: the keys are those of a file
import os
from typing import Any

import matplotlib.pyplot as plt

import practicum as pr

STEPS = int(os.environ.get("STEPS", "20"))
sort: dict[str, Any] = {
    "seed": 1,
    "tasks": {"sort": {"kind": "sort", "options": {"length": [2, 3]}}},
    "rollout": {"samples": 8, "max_new_tokens": 5},
    "eval": {"rows": 32, "samples": 4, "every": 5},
}

# %% A tiny model from random weights, supervised for few steps: it is often wrong
start = pr.train(
    sort
    | {
        "name": "start",
        "model": {"random_init": {"hidden": 64, "layers": 2, "heads": 4, "context": 64}},
        "algorithm": {"loss": "supervised", "advantage": "none"},
        "rollout": {"max_new_tokens": 5},
        "train": {"steps": 2 * STEPS + 10, "prompts": 64, "lr": 3e-3, "warmup_steps": 10},
    },
    out="runs/notebook/start",
    fresh=True,
)

# %% GRPO from there. on_step gets the metrics of each step as soon as they are known
grpo = pr.load_recipe(
    sort
    | {
        "name": "grpo",
        "model": {"path": start.model},
        "train": {"steps": STEPS, "prompts": 32, "lr": 1e-3, "betas": [0.9, 0.95]},
    }
)


def show(row: dict[str, Any]) -> None:
    """One line per step, where there is a reward."""
    if "reward/mean" in row:
        print(f"step {row['step']:3d}  reward {row['reward/mean']:.3f}")


run = pr.train(grpo, on_step=show, out="runs/notebook/grpo", fresh=True, quiet=True)

# %% What it learnt
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot(*run.curve("reward/mean"))
left.set(title="reward of the rollouts", xlabel="step")
for name in ("eval/greedy", "eval/mean@4", "eval/pass@4"):
    right.plot(*run.curve(name), marker="o", label=name)
right.set(title="held-out prompts", xlabel="step")
right.legend()
figure.savefig(run.folder / "curves.png", dpi=150)
print(run, "curves:", run.folder / "curves.png")

# %% What it says
for sample in run.samples[-5:]:
    print(sample)

# %% Any model can be scored by a recipe: a folder, a run, a checkpoint
print("start", pr.evaluate(grpo, model=start.model))
print("grpo ", pr.evaluate(run))

"""`practicum demo`: a tiny model from nothing, then GRPO on a verifiable task, and what it gained."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

import practicum
from practicum.errors import PracticumError
from practicum.observe.tables import score_table
from practicum.recipe.load import load_recipe
from practicum.trainer.run import train_loaded

RECIPES = ("base.yaml", "grpo.yaml")


def shipped_recipes() -> Path:
    """The recipes that come with practicum: inside the installed package, or in the repository."""
    package = Path(practicum.__file__).parent
    for folder in (package / "_recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return folder
    raise PracticumError("the recipes that come with practicum are not there: reinstall it")


def run_demo(out: Path = Path("runs/demo")) -> None:
    """Train the demo's recipes into `out`, replacing an earlier demo, and show base against result."""
    console, began = Console(), time.monotonic()
    folder = shipped_recipes() / "demo"
    base_out, grpo_out = out / "base", out / "grpo"
    console.print("[bold]1/2[/bold] a tiny model from nothing, supervised on three tasks")
    base = train_loaded(load_recipe(folder / RECIPES[0]), base_out, fresh=True)
    if base.interrupted:
        return
    console.print("[bold]2/2[/bold] GRPO on one of them: rewards only")
    over = [f"model.path={base_out / 'export'}"]
    grpo = train_loaded(load_recipe(folder / RECIPES[1], over), grpo_out, fresh=True)
    if grpo.interrupted:
        return
    rows = {"base model": _named(grpo.first_eval), "after GRPO": _named(grpo.last_eval)}
    columns = list(rows["after GRPO"])
    console.print(score_table("share of held-out prompts answered right", rows, columns))
    console.print(f"{time.monotonic() - began:.0f} s · run folder: {grpo.folder}", highlight=False)


def _named(scores: dict[str, float]) -> dict[str, float]:
    """Evaluation metrics under the names a reader needs."""
    names = {name: name.removeprefix("eval/") for name in scores if name.startswith("eval/")}
    return {short: scores[name] for name, short in names.items() if "/" not in short}

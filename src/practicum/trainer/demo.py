"""`practicum demo`: a tiny model from nothing, a specialist for each domain by GRPO, one student of all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from practicum.observe.tables import score_table
from practicum.recipe.load import LoadedRecipe, load_recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.trainer.run import Outcome, evaluate_model, show_ledger, train_loaded

BASE, STUDENT = "base", "student"
Scores = Mapping[str, float]


def run_demo(out: Path = Path("runs/mopd")) -> dict[str, dict[str, float]]:
    """Run the recipes of recipes/mopd into `out`, replacing an earlier demo, and show who can do what.

    Returns the final table (`demo_rows`); nothing if it was stopped.
    """
    console, began = Console(), time.monotonic()
    recipes = demo_recipes(out)
    student: Outcome | None = None
    for number, (name, loaded) in enumerate(recipes.items(), start=1):
        console.print(f"[bold]{number}/{len(recipes)}[/bold] {name}: {_purpose(name)}")
        student = train_loaded(loaded, out / name, fresh=True)
        if student.interrupted:
            return {}
    assert student is not None
    show_ledger(student.folder)
    exam = {name: evaluate_model(recipes[STUDENT].recipe, out / name / "export") for name in recipes}
    rows = demo_rows(exam)
    console.print(score_table("share of held-out prompts answered right", rows, list(rows[BASE])))
    console.print(f"{time.monotonic() - began:.0f} s · run folder: {student.folder}", highlight=False)
    return rows


def demo_recipes(out: Path) -> dict[str, LoadedRecipe]:
    """The recipes in order, base first and student last, with their models in `out`."""
    folder = shipped_recipes() / "mopd"
    specialists = sorted(p.stem for p in folder.glob("*.yaml") if p.stem not in (BASE, STUDENT))
    start = [f"model.path={out / BASE / 'export'}"]
    taught = [*start, *(f"teachers.{name}.model={out / name / 'export'}" for name in specialists)]
    over = {BASE: [], **dict.fromkeys(specialists, start), STUDENT: taught}
    return {name: load_recipe(folder / f"{name}.yaml", changes) for name, changes in over.items()}


def demo_rows(exam: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """The final table: each model's score by domain and their mean, and how far the student came.

    The last row is the student's part of the way from the base model to each domain's specialist.
    """
    domains = [name for name in exam if name not in (BASE, STUDENT)]
    rows = {name: {d: scores[f"eval/greedy/{d}"] for d in domains} for name, scores in exam.items()}
    way = {
        d: (rows[STUDENT][d] - rows[BASE][d]) / (rows[d][d] - rows[BASE][d])
        for d in domains
        if rows[d][d] != rows[BASE][d]
    }
    for row in rows.values():
        row["mean"] = sum(row.values()) / len(domains)
    named = {
        BASE: rows[BASE],
        **{f"specialist {d}": rows[d] for d in domains},
        STUDENT: rows[STUDENT],
    }
    return {**named, "student, of the way": way}


def _purpose(name: str) -> str:
    if name == BASE:
        return "a tiny model from nothing, supervised on all domains, stopped early"
    if name == STUDENT:
        return "the base model again, corrected token by token by the specialist of each prompt"
    return "the base model becomes a specialist by GRPO, from rewards alone"

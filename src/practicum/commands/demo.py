"""`practicum demo`: train a tiny base model, a GRPO specialist per domain, and one student of all three."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from practicum.observe.text import say, score_table
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.trainer.evaluate import evaluate_model
from practicum.trainer.run import Stopped, show_ledger, train_loaded
from practicum.trainer.run_folder import write_atomic
from practicum.trainer.run_models import Run

BASE, STUDENT, WAY, SAMPLED = "base", "student", "student, of the way", ", sampled"
Scores = Mapping[str, float]
Rows = Mapping[str, Scores]

PURPOSES = {
    BASE: "a tiny model from scratch, SFT on all domains, stopped early",
    STUDENT: "the base model, distilled on-policy from the specialist of each prompt",
}
SPECIALIST = "the base model, trained by GRPO into a specialist"
BASE_MOST = 0.75
"""Maximum expected mean of the base model's sampled scores."""
RISE, CEILING = 0.3, 0.85
"""Expected gain of a specialist over the base model on its domain by sampled scores, up to the ceiling."""
OF_THE_WAY = 0.9
"""Minimum expected part of the way from the base model to each specialist, by sampled scores."""
GOOD = 0.9
"""Minimum expected mean of the student's scores, greedy and sampled."""


def run_demo(out: Path = Path("runs/mopd"), seed: int | None = None) -> dict[str, dict[str, float]]:
    """Run the recipes of recipes/mopd into `out`, with another seed if given, and return the table."""
    console, began = Console(), time.monotonic()
    recipes = demo_recipes(out, seed)
    student: Run | None = None
    for number, (name, loaded) in enumerate(recipes.items(), start=1):
        console.print(f"[bold]{number}/{len(recipes)}[/bold] {name}: {PURPOSES.get(name, SPECIALIST)}")
        student = train_loaded(loaded, out / name, fresh=True)
        if student.signal is not None:
            raise Stopped(student.signal)
    assert student is not None
    show_ledger(student)
    recipe = recipes[STUDENT].recipe
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"samples": 1})})
    exam = {name: evaluate_model(recipe, out / name / "export").scores for name in recipes}
    rows = demo_rows(exam)
    title = "share of held-out prompts answered right: greedily, and sampled at temperature 1"
    console.print(score_table(title, rows, list(rows[BASE])))
    for sentence in shortfalls(rows):
        console.print(f"[yellow]outside the expected range[/yellow]: {sentence}", highlight=False)
    write_atomic(student.folder / "scores.json", json.dumps(exam, indent=1))
    console.print(f"{time.monotonic() - began:.0f} s · run folder: {student.folder}", highlight=False)
    say(f"practicum view {shlex.quote(str(out))}   opens it in a browser")
    return rows


def demo_recipes(out: Path, seed: int | None = None) -> dict[str, LoadedRecipe]:
    """Return the recipes in order, base first and student last, with their models in `out`."""
    folder = shipped_recipes() / "mopd"
    specialists = sorted(p.stem for p in folder.glob("*.yaml") if p.stem not in (BASE, STUDENT))
    seeded = [] if seed is None else [f"seed={seed}"]
    start = [*seeded, f"model.path={out / BASE / 'export'}"]
    taught = [*start, *(f"teachers.{name}.model={out / name / 'export'}" for name in specialists)]
    over = {BASE: seeded, **dict.fromkeys(specialists, start), STUDENT: taught}
    return {name: load_recipe(folder / f"{name}.yaml", changes) for name, changes in over.items()}


def demo_rows(exam: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """Return the final table: each model's scores by domain, their mean, and the student's progress.

    Greedy scores are followed by sampled ones. The last row is the student's part of the way from the base
    model to each domain's specialist, by sampled scores.
    """
    domains, rows = [name for name in exam if name not in (BASE, STUDENT)], dict[str, dict[str, float]]()
    for name in (BASE, *domains, STUDENT):
        label = f"specialist {name}" if name in domains else name
        for row, metric in ((label, "eval/greedy"), (f"{label}{SAMPLED}", "eval/mean@1")):
            rows[row] = {d: exam[name][f"{metric}/{d}"] for d in domains}
            rows[row]["mean"] = sum(rows[row].values()) / len(domains)
    base, student = rows[f"{BASE}{SAMPLED}"], rows[f"{STUDENT}{SAMPLED}"]
    own = {d: rows[f"specialist {d}{SAMPLED}"][d] for d in domains}
    moved = [d for d in domains if own[d] != base[d]]
    return {**rows, WAY: {d: (student[d] - base[d]) / (own[d] - base[d]) for d in moved}}


def shortfalls(rows: Rows) -> list[str]:
    """Return a message for each expectation of recipes/mopd/README.md that the table does not meet."""
    base, student, way = rows[f"{BASE}{SAMPLED}"], rows[f"{STUDENT}{SAMPLED}"], rows[WAY]
    sentences = []
    if base["mean"] > BASE_MOST:
        sentences.append(f"the base model's sampled mean is {base['mean']:.2f}, above {BASE_MOST}")
    specialists = {domain: rows[f"specialist {domain}{SAMPLED}"] for domain in base if domain != "mean"}
    for domain, row in specialists.items():
        if row[domain] < (goal := min(base[domain] + RISE, CEILING)):
            sentences.append(f"the specialist of {domain} reaches {row[domain]:.2f}, not {goal:.2f}")
        if way.get(domain, 1.0) < OF_THE_WAY:
            sentences.append(f"the student comes {way[domain]:.2f} of the way on {domain}, not {OF_THE_WAY}")
    if student["mean"] <= max(row["mean"] for row in specialists.values()):
        sentences.append("the student's sampled mean is not above that of each specialist")
    for name in (STUDENT, f"{STUDENT}{SAMPLED}"):
        if rows[name]["mean"] < GOOD:
            sentences.append(f"the mean of {name} is {rows[name]['mean']:.2f}, not {GOOD}")
    return sentences

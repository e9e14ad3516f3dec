"""What the Teachers pane shows beside the metrics: what each teacher is, its target, and who can do what."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from practicum.records.json_files import look_up, mapping, read_mapping
from practicum.view.advisories import gradient_shares
from practicum.view.metric_table import MetricTable


def teacher_page(
    run: Path, recipe: Mapping[str, Any], metrics: MetricTable, trained: Mapping[str, MetricTable]
) -> dict[str, Any]:
    """Targets and scores of a run's teachers; `trained` are the metrics of the runs that trained them."""
    teachers = mapping(recipe.get("teachers"))
    shares = gradient_shares(metrics, recipe)
    return {
        "teachers": {name: _source(one) for name, one in teachers.items()},
        "targets": {name: target for name, (_, target, _) in shares.items()},
        "set": bool(look_up(recipe, "route.shares")),
        "scores": _scores(run, teachers, metrics, trained),
    }


def trained_in(recipe: Mapping[str, Any], directory: Path, runs: Collection[Path]) -> dict[str, Path]:
    """Which of these runs trained which teacher; relative paths of the recipe begin at `directory`."""
    found = {}
    for name, teacher in mapping(recipe.get("teachers")).items():
        named = mapping(teacher).get("adapter") or mapping(teacher).get("model")
        place = Path(os.path.normpath(directory / str(named)))
        inside = next((one for one in (place, *place.parents) if one in runs), None)
        if inside is not None:
            found[str(name)] = inside
    return found


def _scores(
    run: Path, teachers: Collection[str], metrics: MetricTable, trained: Mapping[str, MetricTable]
) -> dict[str, dict[str, float]]:
    """Greedy scores by domain: of all models that scores.json has, else of the student and known teachers."""
    exam = read_mapping(run / "scores.json")
    known = {str(name): _by_domain(row) for name, row in exam.items() if isinstance(row, dict)}
    found = {f"teacher {name}" if name in teachers else name: row for name, row in known.items()}
    if not found:
        found = {f"teacher {name}": _by_domain(table.last) for name, table in trained.items()}
        found |= {"before training": _by_domain(metrics.at(0)), "student": _by_domain(metrics.last)}
    return {name: scores for name, scores in found.items() if scores}


def _by_domain(row: Mapping[str, float]) -> dict[str, float]:
    prefix = "eval/greedy/"
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def _source(teacher: Any) -> str:
    """What a teacher is: the model, adapter or address that the recipe names, and where it lives."""
    named = mapping(teacher)
    found = [f"{key} {named[key]}" for key in ("model", "adapter", "url") if named.get(key)]
    if isinstance(named.get("student"), dict):
        found.append("a copy of the student")
    where = named.get("placement")
    if where == "own" or isinstance(where, dict):
        found.append("its own processes")
    return ", ".join(found)

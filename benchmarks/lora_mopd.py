"""recipes/lora_mopd beside recipes/mopd: scores, seconds and memory of both, put into the recipe's README.

`python -m benchmarks.lora_mopd [SEED ...]` trains the base once, then specialists and student twice: all of
their weights, and adapters on the base. Each run is a process of its own, whose largest memory is taken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, RESULTS
from benchmarks.tables import table
from practicum.forecast.cluster_spec import this_machine
from practicum.forecast.forecast import forecast
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.trainer.demo import BASE, STUDENT, WAY, demo_rows

RECIPES = HERE.parent / "recipes"
README = RECIPES / "lora_mopd" / "README.md"
STORED = RESULTS / "lora_mopd.json"
BEGIN, END = "<!-- table: written by `python -m benchmarks.lora_mopd` -->", "<!-- end of table -->"
WAYS = {"full": "mopd", "LoRA": "lora_mopd"}
DOMAINS = ("copy", "reverse", "rotate")
MODELS = ("weights", "gradients", "Adam's moments", "adapter", "teachers")
"""Parts of the memory that `practicum plan` counts which grow with the model."""
MIB = 2**20


def run(recipe: Path, out: Path, *overrides: str) -> dict[str, float]:
    """Train in a process of its own: its processor time and the most memory that it had.

    A run that is finished is not run again, so that a script that was stopped continues.
    """
    taken = out.with_name(f"{out.name}.json")
    if taken.is_file():
        return json.loads(taken.read_text())
    words = [sys.executable, "-m", "practicum", "train", str(recipe), "--out", str(out), "--fresh"]
    words += [word for change in overrides for word in ("--set", change)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{recipe} ended with exit code {process.returncode}")
    found = {"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}
    taken.write_text(json.dumps(found))
    return found


def overrides(way: str, name: str, out: Path, seed: int) -> list[str]:
    """A recipe's changes for models in this folder."""
    changes = [f"seed={seed}", f"model.path={out / BASE / 'export'}"]
    if name == STUDENT:
        key = "model" if way == "full" else "adapter"
        inside = "export" if way == "full" else "export/adapter"
        changes += [f"teachers.{d}.{key}={out / way / d / inside}" for d in DOMAINS]
    return changes


def measure(seed: int, out: Path) -> dict[str, Any]:
    """Both ways with one base: scores of all models, and what each run took."""
    exam: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
    took: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
    base = run(RECIPES / "mopd" / "base.yaml", out / BASE, f"seed={seed}")
    for way, folder in WAYS.items():
        for name in (*DOMAINS, STUDENT):
            recipe, changes = RECIPES / folder / f"{name}.yaml", overrides(way, name, out, seed)
            took[way][name] = run(recipe, out / way / name, *changes)
            took[way][name]["models_mib"] = models_mib(load_recipe(recipe, changes))
        student = RECIPES / "mopd" / "student.yaml"
        places = {BASE: out / BASE} | {name: out / way / name for name in (*DOMAINS, STUDENT)}
        exam[way] = {name: scores(student, place, seed) for name, place in places.items()}
    return {"base": base, "took": took, "rows": {way: demo_rows(found) for way, found in exam.items()}}


def scores(recipe: Path, trained: Path, seed: int) -> dict[str, float]:
    """What a trained model answers right."""
    from practicum.trainer.evaluate import evaluate_model

    return evaluate_model(load_recipe(recipe, [f"seed={seed}"]).recipe, trained / "export").scores


def models_mib(loaded: LoadedRecipe) -> float:
    """Memory of weights, gradients, moments and teachers, as `practicum plan` counts it."""
    (memory,) = forecast(loaded.recipe, this_machine(), lambda _: 8.0).memory
    return sum(memory.parts.get(part, 0.0) for part in MODELS) / MIB


def comparison(found: Mapping[str, Any]) -> str:
    """Who answers how much right, and what it took, full fine-tuning beside adapters."""
    lines = []
    for seed, one in found.items():
        for way in WAYS:
            rows, took = one["rows"][way], one["took"][way]
            cells = (
                [rows[BASE][d] for d in DOMAINS],
                [rows[f"specialist {d}"][d] for d in DOMAINS],
                [rows[STUDENT][d] for d in DOMAINS],
            )
            shown = [" · ".join(f"{score:.2f}" for score in line) for line in cells]
            special = sum(took[d]["cpu_seconds"] for d in DOMAINS)
            student = took[STUDENT]
            lines.append(
                [
                    seed,
                    way,
                    *shown,
                    f"{min(rows[WAY].values(), default=1.0):.2f}",
                    f"{special:.0f} + {student['cpu_seconds']:.0f}",
                    f"{student['models_mib']:.1f}",
                    f"{student['peak_mib']:.0f}",
                ]
            )
    head = ["seed", "trained", "base", "specialists", "student", "least of the way"]
    head += ["processor seconds: specialists + student", "student's run: models, MiB", "all of it, MiB"]
    return table(head, lines)


def write(readme: Path = README) -> None:
    """Put the table between the markers of the README."""
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"{readme} has lost its markers: {BEGIN} and {END}")
    found = json.loads(STORED.read_text())
    readme.write_text(f"{before}{BEGIN}\n{comparison(found)}\n{END}{after}")


def main(seeds: list[int]) -> None:
    """Run the seeds one after another; what is finished stays if it is stopped."""
    for seed in seeds:
        found = json.loads(STORED.read_text()) if STORED.is_file() else {}
        found[str(seed)] = measure(seed, Path("runs/lora_mopd-seeds") / str(seed))
        STORED.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        write()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1])

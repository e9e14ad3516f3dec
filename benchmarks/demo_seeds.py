"""Runs the demo with several seeds and puts their scores into recipes/mopd/README.md.

`python -m benchmarks.demo_seeds [SEED ...]` runs those seeds, or 1 and 2, and writes the table of all that
are in results/demo_seeds.json and were made by the recipes as they are now.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import HERE, RESULTS
from benchmarks.tables import table
from practicum.commands.demo import BASE, SAMPLED, STUDENT, Rows, run_demo, shortfalls

SEEDS = range(1, 3)
RECIPES = HERE.parent / "recipes" / "mopd"
README = RECIPES / "README.md"
STORED = RESULTS / "demo_seeds.json"
BEGIN, END = "<!-- seeds: written by `python -m benchmarks.demo_seeds` -->", "<!-- end of seeds -->"


def recipes_now() -> dict[str, Any]:
    """What the recipes of the demo say, without comments and without their expected results."""
    said = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(RECIPES.glob("*.yaml"))}
    return {name: {k: v for k, v in recipe.items() if k != "expected"} for name, recipe in said.items()}


def stored() -> dict[str, Rows]:
    """The final table of each seed that the recipes as they are now have given."""
    if not STORED.is_file():
        return {}
    found = json.loads(STORED.read_text())
    return found["seeds"] if found["recipes"] == recipes_now() else {}


def store(seed: int, rows: Rows) -> None:
    """Keep the final table of a seed, beside those of the same recipes."""
    tables = {**stored(), str(seed): rows}
    ordered = {seed: tables[seed] for seed in sorted(tables, key=int)}
    STORED.write_text(json.dumps({"recipes": recipes_now(), "seeds": ordered}, indent=1) + "\n")


def seeds_table(tables: Mapping[str, Rows]) -> str:
    """A line for each seed: base, specialists on their own domains, and student, greedily and sampled."""
    lines = []
    for seed, rows in tables.items():
        domains = [name for name in rows[BASE] if name != "mean"]
        for how in ("", SAMPLED):
            scores = (
                [rows[f"{BASE}{how}"][d] for d in domains],
                [rows[f"specialist {d}{how}"][d] for d in domains],
                [rows[f"{STUDENT}{how}"][d] for d in domains],
            )
            cells = [" · ".join(f"{score:.2f}" for score in line) for line in scores]
            expected = "" if how else "; ".join(shortfalls(rows)) or "yes"
            lines.append(["" if how else seed, how.removeprefix(", ") or "greedy", *cells, expected])
    head = ["seed", "answers", "base", "specialists", "student", "as expected"]
    return table(head, lines)


def write(readme: Path = README) -> None:
    """Put the table between the markers of the README."""
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"{readme} has lost its markers: {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{seeds_table(stored())}\n{END}{after}")


def main(seeds: list[int]) -> None:
    """Run the seeds one after another; what is finished stays if it is stopped."""
    for seed in seeds:
        rows = run_demo(Path("runs/mopd-seeds") / str(seed), seed)
        if not rows:
            return
        store(seed, rows)
        write()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(SEEDS))

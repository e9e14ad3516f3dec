"""Recipes small enough for tests: a model of a few thousand parameters, a few prompts."""

from pathlib import Path
from typing import Any

import yaml

from practicum.recipe.load_recipe import LoadedRecipe, load_recipe

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "model": {"random_init": {"hidden": 32, "layers": 2, "heads": 2, "context": 64}},
    "tasks": {"copy": {"kind": "copy", "options": {"length": [1, 2]}}, "compare": {"kind": "compare"}},
    "rollout": {"samples": 4, "max_new_tokens": 6, "max_num_seqs": 16},
    "train": {"steps": 4, "prompts": 4, "lr": 1e-3},
    "eval": {"rows": 8},
    "runtime": {"threads": 1},
}


def tiny(folder: Path, *overrides: str, **sections: Any) -> LoadedRecipe:
    """The tiny recipe with whole sections replaced and single keys overridden."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(TINY | sections))
    return load_recipe(path, overrides)

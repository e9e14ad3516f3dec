"""practicum from Python: `import practicum as pr`. Each function does what the command of its name does.

Nothing here imports torch until it is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ruamel.yaml.representer import RepresenterError

from practicum.dataplane.stages import OwnStage, chain
from practicum.errors import PracticumError, RecipeError
from practicum.recipe.load_recipe import LoadedRecipe, problems_of
from practicum.recipe.load_recipe import load_recipe as load
from practicum.recipe.text import yamlfile
from practicum.recipe.text.show_recipe import screen, show_recipe
from practicum.recipe.user_functions import name_function
from practicum.roles.stage_table import make_plan
from practicum.trainer.run_models import Run, open_run, resolve_models

if TYPE_CHECKING:
    from practicum.trainer.run import OnStep

__all__ = [
    "LoadedRecipe",
    "PracticumError",
    "Report",
    "Run",
    "check",
    "evaluate",
    "load_recipe",
    "open_run",
    "sample",
    "train",
]

RecipeLike: TypeAlias = "str | Path | Mapping[str, Any] | LoadedRecipe"
"""A recipe file, a dict of keys, or a loaded recipe."""
_training = threading.Lock()


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """Findings of `check`. str() returns the screen of `practicum check`."""

    loaded: LoadedRecipe
    """The recipe, with the models that were resolved from run folders."""
    warnings: tuple[str, ...]
    """Reasons why the run may not learn."""
    findings: tuple[str, ...]
    """Files and models that were taken, rows, tokenizer, longest prompt, rewards of a made-up response."""
    sizes: tuple[str, ...]
    """Parameters, tokens, memory, sessions and stages of a step."""
    not_run: tuple[str, ...]
    """Stages that are skipped, with the reason."""

    def text(self, *, everything: bool = False) -> str:
        """Return the summary, with `everything` also all values and their origins."""
        lines = [screen(self.loaded, self.warnings, self.sizes, self.findings, everything=everything)]
        if everything:
            lines += ["", "skipped stages:", *(f"  {text}" for text in self.not_run or ("none",))]
            lines += ["", "# all values and their origins", show_recipe(self.loaded)]
        return "\n".join(lines)

    __str__ = __repr__ = text


def load_recipe(
    recipe: str | Path | Mapping[str, Any], set: Mapping[str, Any] | Sequence[str] = ()
) -> LoadedRecipe:
    """Load and check a recipe from a YAML file or a dict of keys. `.recipe` holds its values.

    `set` overrides values, as {"train.lr": 1e-5} or ["train.lr=1e-5"]. Raises one PracticumError with all
    mistakes.
    """
    if isinstance(set, Mapping):
        changes = [f"{key}={_as_yaml(key, value)}" for key, value in set.items()]
    else:
        changes = [set] if isinstance(set, str) else list(set)
    return load(_plain(recipe) if isinstance(recipe, Mapping) else recipe, changes)


def check(recipe: RecipeLike, *, static: bool = False) -> Report:
    """Check a recipe with its files, tokenizer and model. Raises what `train` would refuse.

    With `static`, only the recipe itself is checked and nothing is loaded.
    """
    loaded, taken = resolve_models(_loaded(recipe), weights=not static)
    plan = make_plan(loaded.recipe)
    assert plan.counts is not None
    warnings, findings = [], [*map(str, loaded.places), *taken]
    sizes = [*plan.counts.lines(), f"stages: {chain(plan)}"]
    if not static:
        from practicum.trainer.preflight import preflight

        with problems_of(loaded):
            checked = preflight(loaded)
        warnings, findings, sizes = checked.warnings, [*checked.findings, *findings], checked.sizes + sizes
    not_run = [f"{stage.name}: {why}" for stage, why in plan.skipped]
    return Report(loaded, tuple(warnings), tuple(findings), tuple(sizes), tuple(not_run))


def train(
    recipe: RecipeLike,
    *,
    on_step: OnStep | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    fresh: bool = False,
    change: bool = False,
    quiet: bool = False,
) -> Run:
    """Train a recipe in the folder `out`, by default the recipe's.

    `on_step` receives each step's metrics, a dict. If it returns True, the run ends there and is exported. If
    it raises, the run stops with a checkpoint. Ctrl-C ends the run after its step, `resume` continues it. The
    options are those of `practicum train`.
    """
    loaded = _loaded(recipe)
    from practicum.trainer.run import train_loaded

    folder = None if out is None else Path(out)
    if not _training.acquire(blocking=False):  # two would share threads and torch's random state
        raise PracticumError("this process trains a run already: start the other one after it, or elsewhere")
    try:
        return train_loaded(
            loaded, folder, resume=resume, fresh=fresh, change=change, on_step=on_step, quiet=quiet
        )
    finally:
        _training.release()


def evaluate(
    recipe: RecipeLike | Run, model: str | Path | None = None, *, quiet: bool = True
) -> dict[str, float]:
    """Evaluate the model of a recipe, of a run, or `model`, on held-out prompts, and return its scores.

    `model` is a folder, a hub name, a run folder or a checkpoint.
    """
    if isinstance(recipe, Run):
        model = model or recipe.folder
        recipe = LoadedRecipe(recipe.recipe, {}, recipe.folder / "recipe.yaml")
    loaded = _loaded(recipe)
    from practicum.trainer.evaluate import evaluate_recipe

    return evaluate_recipe(loaded, None if model is None else str(model), quiet=quiet)


def sample(
    run: Run | str | Path, prompts: str | Sequence[str], *, task: str | None = None, greedy: bool = False
) -> list[str]:
    """Return the response of a run's model to each prompt, as text.

    Prompts are read as those of the recipe's `task`, by default its first, with its chat template if any.
    """
    run = run if isinstance(run, Run) else open_run(run)
    from practicum.trainer.evaluate import sample_model, with_model

    recipe = with_model(run.recipe, str(run.model))
    return sample_model(recipe, [prompts] if isinstance(prompts, str) else prompts, task, greedy=greedy)


def _loaded(recipe: RecipeLike) -> LoadedRecipe:
    return recipe if isinstance(recipe, LoadedRecipe) else load_recipe(recipe)


def _as_yaml(key: str, value: Any) -> str:
    try:
        return yamlfile.dump(_plain(value), flow=True)
    except RepresenterError:
        expected = "numbers, strings, lists and dicts"
        raise RecipeError(f"set {key}", f"a {type(value).__name__}", expected) from None


def _plain(value: Any) -> Any:
    """Return paths as strings, functions as names, tuples as lists and numpy numbers as Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value) or isinstance(value, OwnStage):
        return name_function(value)
    return value.item() if hasattr(value, "item") else value

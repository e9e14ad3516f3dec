"""Finished runs and their models. Resolve run folders and checkpoints that are given as models.

Nothing here imports torch until weights are written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from practicum.errors import PracticumError, RecipeError
from practicum.observe.records.json_files import read_rows, read_versions
from practicum.recipe.derived import EXPORTED, adapter_folder
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.trainer.checkpoints import Checkpoints, is_checkpoint, unreadable
from practicum.trainer.run_folder import RunFolder, follow_umask

ORIGIN = "practicum.json"
"""File of an export that holds its step."""


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A finished run: its scores, and access to its folder."""

    recipe: Recipe
    """The resolved recipe, with all values."""
    folder: Path
    """The run folder."""
    first_eval: dict[str, float]
    """Scores of the evaluation before training, empty without one."""
    last_eval: dict[str, float]
    """Scores of the last evaluation."""
    steps: int
    """Finished steps."""
    seconds: float
    """Duration, of all starts together."""
    failures: tuple[str, ...] = ()
    """Messages with the counts of failed sessions by reason."""
    warnings: tuple[str, ...] = ()
    """Warnings about why the run may not have learned."""
    interrupted: bool = False
    """True if the run was stopped early. --resume continues it."""
    signal: int | None = None
    """The signal that stopped the run early: SIGINT or SIGTERM."""

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, one per step. Row 0 is the evaluation before training."""
        return RunFolder(self.folder).metrics()

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Rows of samples.jsonl: responses as text, with their rewards."""
        return read_rows(self.folder / "samples.jsonl")

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a metric and its values, as plot functions take them."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    @property
    def model(self) -> Path:
        """The model in HuggingFace format. For a stopped run, the newest checkpoint is exported."""
        return Path(model_folder(str(self.folder)))

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best evaluation, usable as a model, or None if none was kept."""
        path = self.folder / "checkpoints" / "best"
        return path.resolve() if path.exists() else None

    def __repr__(self) -> str:
        state = "stopped" if self.interrupted else "done"
        return f"<Run {self.name}: {state}, {self.steps} steps, {self.folder}>"


def open_run(path: str | Path) -> Run:
    """Return the run of a folder, as `train` returned it, or as far as it is. It has no `failures` and no
    `signal`, which no file holds."""
    folder = RunFolder(Path(path))
    if not folder.is_used:
        raise PracticumError(f"{path} is no run folder: name one that `train` wrote, such as runs/NAME")
    rows, log = read_rows(folder.path / "metrics.jsonl"), folder.path / "log.txt"
    evaluations = [
        scores for row in rows if (scores := {n: x for n, x in row.items() if n.startswith("eval/")})
    ]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    warnings = [text for line in lines for _, is_one, text in [line.partition(" warning: ")] if is_one]
    starts = read_versions(folder.path)["starts"]
    return Run(
        load_recipe(folder.recipe()).recipe,
        folder.path,
        evaluations[0] if evaluations and rows[0]["step"] == 0 else {},
        evaluations[-1] if evaluations else {},
        rows[-1]["step"] if rows else 0,
        sum(row.get("time/step", 0.0) for row in rows),
        warnings=tuple(dict.fromkeys(warnings)),
        interrupted=not starts or starts[-1].get("outcome") != "done",
    )


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model of a run: its final export, or a checkpoint."""

    folder: Path
    is_export: bool
    about: str

    def with_weights(self) -> Path:
        """Return a folder in HuggingFace format. A checkpoint is exported once."""
        if self.is_export:
            return self.folder
        run = self.folder.parent.parent
        to = run / "exports" / self.folder.name
        if not RunFolder(run).is_used or not os.access(run, os.W_OK):
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            to = cache / "practicum" / hashlib.sha256(str(self.folder).encode()).hexdigest()[:16] / to.name
        if _origin(to).get("saved") != _saved_at(self.folder):
            export_checkpoint(self.folder, to)
        return to

    def adapter(self, key: str) -> Path:
        """Return the adapter's folder, or raise a RecipeError about this recipe key if the model has none."""
        folder = self.with_weights() / EXPORTED
        if not folder.is_dir():
            found, expected = f"{self.folder}, which has no adapter", "a run with model.lora"
            advice = "the run trained all weights: use model instead of adapter"
            raise RecipeError(key, found, expected, advice)
        return folder


def find_run_model(named: str | Path) -> RunModel | None:
    """Return the model of a run folder or checkpoint, or None for other paths and hub names."""
    path = Path(named).expanduser()
    if not os.path.isdir(path) or (path / "config.json").is_file():
        return None
    if is_checkpoint(path):
        checkpoint = path.resolve()
        return RunModel(checkpoint, False, f"checkpoint {checkpoint.name}")
    run = RunFolder(path)
    if not run.is_used:
        return None
    checkpoints = Checkpoints(run.checkpoints)
    steps = checkpoints.steps()
    exported = _origin(run.export).get("step") if (run.export / "config.json").is_file() else -1
    if exported is None or (exported >= 0 and exported >= max(steps, default=0)):
        return RunModel(run.export, True, "its final model")
    if not steps:
        raise PracticumError(f"{path} is a run without a model: it has neither a checkpoint nor an export")
    return RunModel(checkpoints.path(steps[-1]), False, f"its newest checkpoint, step {steps[-1]}")


def resolve_models(
    loaded: LoadedRecipe, *, weights: bool = True, resumed: RunFolder | None = None
) -> tuple[LoadedRecipe, list[str]]:
    """Replace each run and checkpoint in a recipe by a HuggingFace folder. Return it, and messages about
    them.

    Without `weights`, the folders hold only config and tokenizer. A resumed run keeps its earlier choice.
    """
    recipe, taken = loaded.recipe, []
    before = dict(_models_of(resumed.recipe())) if resumed is not None else {}
    for path, named in _models_of(recipe):
        run_model = find_run_model(named)
        if run_model is None:
            continue
        is_adapter, kept = path[-1] == "adapter", before.get(path)
        if kept is not None and _is_of(str(Path(kept).parent) if is_adapter else kept, Path(named)):
            about, folder = "as when the run began", Path(kept)
        elif is_adapter:
            if not run_model.is_export and not weights:
                continue
            about, folder = run_model.about, run_model.adapter(".".join(path))
        else:
            held = run_model.folder if run_model.is_export else run_model.folder / "model"
            about, folder = run_model.about, run_model.with_weights() if weights else held
        taken.append(f"{'.'.join(path)}: {named}, {about}: {folder}")
        recipe = _put(recipe, path, str(folder))
    return replace(loaded, recipe=recipe), taken


def model_folder(named: str) -> str:
    """Return a folder in HuggingFace format or a hub name, for transformers."""
    run_model = find_run_model(named)
    return named if run_model is None else str(run_model.with_weights())


def adapter_path(named: str, key: str) -> str:
    """Return an adapter's folder, or raise a RecipeError about `key` if the run has none."""
    found = find_run_model(named)
    return named if found is None else str(found.adapter(key))


def merge_runs(
    named: Sequence[str], to: Path, weights: Sequence[float] | None = None, base: str | None = None
) -> str:
    """Merge runs, models or adapters of one base into a new folder, and return the base.

    The default weights are 1 / N. If all have adapters, the adapters are merged. The default base is the
    model that all runs started from. Without a common one, raise PracticumError.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise PracticumError(f"{to} is there already: choose another folder with --to DIR, or remove it")
    weights = weights or [1.0 / len(named)] * len(named)
    if len(weights) != len(named):
        raise PracticumError(f"{len(weights)} weights of {len(named)} models: give --weight once for each")
    base = None if base is None else model_folder(base)
    bases = {name: base or _base_of(name) for name in named}
    if len(set(bases.values())) > 1 or None in bases.values():
        listed = ", ".join(f"{name}: {found or 'unknown'}" for name, found in bases.items())
        raise PracticumError(
            f"no common base ({listed})\n  → merge runs that started from the same model, or set --base"
        )
    from practicum.models.merge_models import merge

    folders = [model_folder(name) for name in named]
    adapters = [adapter_folder(folder) for folder in folders]
    start, whole = str(next(iter(bases.values()))), all(folder is not None for folder in adapters)
    aside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        merge(start, [str(x) for x in adapters] if whole else folders, weights, aside, adapters=whole)
        follow_umask(aside)
        shutil.rmtree(to, ignore_errors=True)
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return start


def _base_of(named: str) -> str | None:
    """Return the initial model of the run of a run folder, export or checkpoint, or None if unknown."""
    folder = Path(named).expanduser().resolve()
    for path in (folder, *folder.parents[:3]):
        if RunFolder(path).is_used:
            found = _get(RunFolder(path).recipe(), ("model", "path"))
            return None if found is None else str(Path(model_folder(found)).expanduser().resolve())
    return None


def export_checkpoint(checkpoint: Path, to: Path) -> None:
    """Export a checkpoint's model atomically in HuggingFace format. Needs no GPU."""
    if not (checkpoint / "model" / "config.json").is_file():
        raise PracticumError(
            f"{checkpoint} was written by an older version and has no config and tokenizer: resume its run "
            "for a step to write a complete one"
        )
    from practicum.learning.learner_checkpoint import read_weights
    from practicum.models.adapter_files import merge_checkpoint
    from practicum.models.model_files import write_model

    to.parent.mkdir(parents=True, exist_ok=True)
    aside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        student = checkpoint / "student"
        write_model(checkpoint / "model", merge_checkpoint(student, read_weights(student), aside), aside)
        step = json.loads((checkpoint / "progress.json").read_text())["step"]
        finish_export(aside, to, step, _saved_at(checkpoint))
    except PracticumError:
        raise
    except Exception as error:
        raise unreadable(checkpoint, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def finish_export(aside: Path, to: Path, step: int, saved: int | None = None) -> None:
    """Move a written export to its final folder, with its step and the umask's permissions."""
    (aside / ORIGIN).write_text(json.dumps({"step": step, "saved": saved}) + "\n")
    follow_umask(aside)
    shutil.rmtree(to, ignore_errors=True)
    aside.rename(to)


def export_run(named: Path, step: int | None, best: bool, to: Path | None) -> tuple[Path, Path]:
    """Export a checkpoint of a run. Return the checkpoint and the folder."""
    if is_checkpoint(named) and step is None and not best:
        checkpoint = named.resolve()
    else:
        checkpoint = _choose(RunFolder(named), step, best)
    if to is None:
        return checkpoint, RunModel(checkpoint, False, "").with_weights()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise PracticumError(f"{to} is there already: choose another folder with --to DIR, or remove it")
    export_checkpoint(checkpoint, to)
    return checkpoint, to


def _choose(run: RunFolder, step: int | None, best: bool) -> Path:
    if not run.is_used:
        raise PracticumError(f"{run.path} is not a run folder or checkpoint written by `train`")
    checkpoints, best_path = Checkpoints(run.checkpoints), run.checkpoints / "best"
    steps = checkpoints.steps()
    missing = None
    if not steps:
        missing = "checkpoint" + (f"; its final model is {run.export}" if run.export.is_dir() else "")
    elif best and not is_checkpoint(best_path):
        missing = "best checkpoint: set eval.every so that evaluations run during training"
    elif step is not None and step not in steps:
        missing = f"checkpoint of step {step}, only of {', '.join(map(str, steps))}"
    if missing:
        raise PracticumError(f"{run.path} has no {missing}")
    return best_path.resolve() if best else checkpoints.path(steps[-1] if step is None else step)


def _models_of(data: Any) -> list[tuple[tuple[str, ...], str]]:
    """Return the recipe paths that name a model or tokenizer, with the names."""
    paths = [("model", "path"), ("model", "tokenizer"), ("algorithm", "kl", "reference")]
    for where in (("teachers",), ("reward", "models")):
        for name in _get(data, where) or ():
            at = (*where, name)
            paths += [] if _get(data, (*at, "url")) else [(*at, "model")]
            paths += [(*at, "adapter"), (*at, "tokenizer")]
    return [(path, value) for path in paths if (value := _get(data, path)) is not None]


def _get(data: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else getattr(data, name, None)
    return data


def _put(section: Any, path: tuple[str, ...], value: str) -> Any:
    name, *more = path
    new = _put(_get(section, (name,)), tuple(more), value) if more else value
    return section | {name: new} if isinstance(section, dict) else section.model_copy(update={name: new})


def _is_of(kept: str, named: Path) -> bool:
    """Return True if a resolved model is one that a run folder, or its best checkpoint, may stand for."""
    folder, named = Path(kept).resolve(), named.expanduser()
    run = folder.parent.parent if folder.parent.name == "exports" else folder.parent
    means = named.parent.parent if named.name == "best" else named
    return (folder / "config.json").is_file() and run == means.resolve()


def _origin(export: Path) -> dict[str, Any]:
    file = export / ORIGIN
    return json.loads(file.read_text()) if file.is_file() else {}


def _saved_at(checkpoint: Path) -> int:
    """Return a stamp that distinguishes a checkpoint from a later one of the same step."""
    return (checkpoint / "progress.json").stat().st_mtime_ns

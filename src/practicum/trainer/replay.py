"""`practicum replay`: repeat the learner's part of a recorded step from the checkpoint before it.

With the run's recipe, all numbers are equal bit for bit. With other values, it shows their effect.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.columns import dtype_of
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stages import Plan
from practicum.errors import PracticumError, RecipeError, RecipeErrors
from practicum.models.load_model import load_model
from practicum.observe.records.compare_runs import Difference, first_in_rows
from practicum.observe.records.read_record import Record, RecordedRow, require_run
from practicum.observe.records.record_files import FOLDER, RecordPlace
from practicum.observe.records.recorder import Recorder
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.derived import mixtures, products
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.learner_rank import LearnerRank, set_threads
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.roles.student import UpdateReport
from practicum.teachers.ledger import make_ledger
from practicum.teachers.load_teachers import Teachers, load_colocated, make_group, signal_width
from practicum.teachers.teacher_scorer import TeacherScorer
from practicum.trainer.checkpoints import Checkpoints, is_checkpoint, read_progress
from practicum.trainer.preflight import known_traits
from practicum.trainer.run_folder import RunFolder
from practicum.trainer.sample_step import TRAIN
from practicum.trainer.step import prefixed

CHANGEABLE = ("algorithm.", "distill.", "train.", "critic.", "reward.weight", "route.shares")
"""Keys that the learner's part of a step reads."""


@dataclass(slots=True)
class Replayed:
    """The result of a repeated step."""

    metrics: dict[str, float]
    gradient: Tensor
    """Flat gradient of the first optimizer step, after clipping."""
    first: Difference | None
    """The first recorded number that differs."""
    weights_equal: bool | None
    """True if the weights are those of the step's checkpoint, None without a checkpoint."""


@dataclass(slots=True)
class Replay:
    """A replay with the run's recipe and, if values were overridden, one with these."""

    step: int
    rows: int
    same: Replayed
    changed: Replayed | None
    differing: dict[str, tuple[float | None, float]]
    """Metrics that differ although the recipe is the run's: the run's value and the replay's."""
    notes: list[str]

    @property
    def is_equal(self) -> bool:
        return self.same.first is None and not self.differing and self.same.weights_equal is not False


@dataclass(slots=True)
class _Batch:
    """The recorded rows of a step."""

    record: Record
    step: int
    rows: list[RecordedRow]
    ref: BatchRef
    baselines: dict[int, float]


def replay_step(run: Path, step: int, overrides: Sequence[str] = ()) -> Replay:
    """Repeat the update of a recorded step, and compare. Raise PracticumError if the record is incomplete."""
    require_run(run)
    folder, notes = RunFolder(run), list[str]()
    resolved = _recipe_at(folder, step)
    as_it_was = load_recipe(resolved).recipe
    try:
        other = _changed(resolved, overrides, notes) if overrides else None
    except RecipeErrors as found:
        raise RecipeErrors(f"{run / 'recipe.yaml'} with --set", found.errors) from None
    if (kept := as_it_was.track.record) != "all":
        raise PracticumError(
            f"{run} records only some rows of each step (track.record: {kept}), and a replay needs all.\n"
            "  → train with --set track.record=all"
        )
    has_baselines = estimator_traits(as_it_was.algorithm.advantage).greedy_baseline
    batch = _read_batch(Record(run), step, has_baselines=has_baselines)
    checkpoints = Checkpoints(folder.checkpoints)
    if step > 1 and step - 1 not in checkpoints.steps():
        there = ", ".join(map(str, checkpoints.steps())) or "no step"
        raise PracticumError(
            f"a replay of step {step} needs the checkpoint of step {step - 1}, but {run} has "
            f"checkpoints of {there}.\n  → replay a step after one of these, or train with "
            "--set checkpoint.every=1 --set checkpoint.keep_last=1000"
        )
    before = checkpoints.path(step - 1) if step > 1 else None
    if as_it_was.data_parallel > 1:
        notes.append("the run had several ranks and the replay has one, so sums are rounded differently")
    same = _learn(as_it_was, batch, before, notes, checkpoints.path(step))
    changed = None if other is None else _learn(other, batch, before, notes)
    line = next((row for row in folder.metrics() if row["step"] == step), {})
    differing = {n: (line.get(n), value) for n, value in same.metrics.items() if line.get(n) != value}
    return Replay(step, len(batch.rows), same, changed, differing, notes)


def _recipe_at(folder: RunFolder, step: int) -> dict[str, Any]:
    """Return the run's resolved recipe without changes made after this step."""
    resolved, path = folder.recipe(), folder.path / "changes.jsonl"
    changes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for change in reversed(changes):
        if change["step"] > step:
            section, last = _section(resolved, change["key"])
            section[last] = change["old"]
    return resolved


def _changed(resolved: dict[str, Any], overrides: Sequence[str], notes: list[str]) -> Recipe:
    """Return the recipe with overrides. Values that conflict with them are reset and listed in `notes`."""
    changed_keys = {text.partition("=")[0].strip() for text in overrides}
    for key in changed_keys:
        if not key.startswith(CHANGEABLE):
            expected = f"a key that the learner reads: {', '.join(f'{k}…' for k in CHANGEABLE)}"
            raise RecipeError(f"--set {key}", "a key that only affects sampling", expected)
    try:
        return load_recipe(resolved, overrides).recipe
    except RecipeErrors as found:
        for path in (error.path for error in found.errors):
            section, last = _section(resolved, path)
            if path in changed_keys or section.pop(last, None) is None:
                raise
            notes.append(f"{path} is reset to its default: the run's value conflicts with --set")
    return load_recipe(resolved, overrides).recipe


def _section(resolved: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the mapping that holds a key (empty if missing), and the last word of the key."""
    *outer, last = path.split(".")
    section: Any = resolved
    for name in outer:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}, last


def _read_batch(record: Record, step: int, *, has_baselines: bool) -> _Batch:
    every = record.rows()
    trained_rows = sorted((row for row in every if row.trained == step), key=lambda row: row.key)
    if not trained_rows:
        there = sorted({row.trained for row in every if row.trained is not None})
        known = f"{there[0]} to {there[-1]}" if there else "none"
        raise PracticumError(f"{record.run} has no recorded update in step {step}; steps with one: {known}")
    rows = [whole for row in trained_rows if (whole := record.row(row.step, row.key)) is not None]
    if record.problems:
        raise PracticumError(f"the record can't be replayed: {record.problems[0]}")
    keys = tuple(row.summary.key for row in rows)
    ref = BatchRef(TRAIN, keys, tuple(replace(row.summary.tags, recorded=True) for row in rows))
    rewards = {row.key.prompt: row.tags.reward for row in every if row.tags.is_baseline}
    baselines = {key.prompt: rewards[key.prompt] or 0.0 for key in keys} if has_baselines else {}
    return _Batch(record, step, rows, ref, baselines)


def _column(batch: _Batch, name: str) -> Column:
    spec = FIELDS[name]
    if spec.extent == "object":
        objects = [row.objects.get(name, {}) for row in batch.rows]
        return [{key: torch.tensor(x) for key, x in values.items()} for values in objects]
    if missing := [row.summary.key for row in batch.rows if name not in row.columns]:
        raise PracticumError(
            f"step {batch.step} has no recorded {name} of {missing[0]}, which the learner needs: the run "
            "did not compute it"
        )
    rows = [torch.tensor(row.columns[name], dtype=dtype_of(spec)) for row in batch.rows]
    return torch.stack(rows) if spec.extent == "scalar" else Ragged.from_rows(rows)


def _learn(
    recipe: Recipe, batch: _Batch, before: Path | None, notes: list[str], after: Path | None = None
) -> Replayed:
    """Run the learner's stages in this process, from the checkpoint `before` the step or the recipe's model.
    `after` is the step's checkpoint. Violated checks are added to `notes` and do not stop the replay."""
    checks = recipe.checks.model_copy(update={"level": "off" if recipe.checks.level == "off" else "warn"})
    runtime = recipe.runtime.model_copy(update={"kind": "local"})
    recipe = recipe.model_copy(update={"runtime": runtime, "checks": checks})
    set_threads(recipe.runtime.threads, sides=2 if recipe.rollout.lag else 1)
    plan = make_plan(recipe, known_traits(recipe.model))
    gradients: list[Tensor] = []
    with tempfile.TemporaryDirectory() as aside:
        again = Path(aside)
        (again / "versions.json").write_text(json.dumps({"practicum": "replay"}))
        recorder = Recorder(RecordPlace(again / FOLDER, "replay", everything=True))
        model, watch = load_model(recipe.model, recipe.seed), Watch(checks, notes.append)
        teachers = _teachers(recipe, model) if "teachers" in plan else None
        rank = LearnerRank(recipe, plan, MemoryStore(), watch, model, teachers, recorder=recorder)
        _load(rank, before, batch.step)
        learner, written = rank.student.learner, set[str]()
        for stage in plan.learner_stages():
            names = [name for name in stage.reads if name not in written]
            rank.store.put(batch.ref, {name: _column(batch, name) for name in names})
            written |= {*stage.reads, *stage.writes}

        def keep_gradient(*_: object) -> None:
            if not gradients:
                parts = (p.grad.detach() for p in learner.stepper.parameters if p.grad is not None)
                gradients.append(torch.cat([part.flatten().double() for part in parts]))

        learner.stepper.optimizer.register_step_pre_hook(keep_gradient)
        metrics = _run_stages(rank, plan, batch)
        known = {row.key: row for row in Record(again).rows()}
        pairs = [(row.summary, known[row.summary.key]) for row in batch.rows if row.summary.key in known]
        first = first_in_rows(batch.step, pairs, batch.record, Record(again))
    equal = None
    if after is not None and is_checkpoint(after):
        learnt = {name: x.detach().clone() for name, x in learner.model.state_dict().items()}
        learner.load(after / "student")
        equal = all(torch.equal(x, learnt[name]) for name, x in learner.model.state_dict().items())
    return Replayed(metrics, gradients[0], first, equal)


def _load(rank: LearnerRank, before: Path | None, step: int) -> None:
    """Load the checkpoint before the step, if there is one."""
    if before is not None:
        rank.student.learner.load(before / "student")
        if rank.critic is not None:
            rank.critic.critic.load(before / "critic")
        if rank.teachers is not None:
            rank.teachers.load(before / "teachers")
        rank.advantages.kl.load_state_dict(read_progress(before).kl)
    if rank.teachers is not None:
        rank.teachers.refresh(step)


def _teachers(recipe: Recipe, model: PreTrainedModel) -> Teachers:
    """Return the teachers' output heads for the signal full. Scores come from the record."""
    assert recipe.distill is not None
    if recipe.distill.signal != "full":
        return Teachers({}, least_width=signal_width(recipe.teachers, recipe.distill, recipe.model))
    scorers: dict[str, TeacherScorer] = {}
    for name, teacher in recipe.teachers.items():
        scorers |= load_colocated(
            make_group({name: teacher}, recipe.distill, recipe.model, recipe.seed, model)
        )
    heads = {name: scorer.scorers[0].head() for name, scorer in scorers.items()}
    return Teachers(
        scorers, None, heads, targets=products(recipe.teachers), mixtures=mixtures(recipe.teachers)
    )


def _run_stages(rank: LearnerRank, plan: Plan, batch: _Batch) -> dict[str, float]:
    step, metrics = StepInfo(batch.ref, batch.step, batch.baselines), dict[str, float]()
    if "pad" in plan and (padding := rank.stages["pad"](step)) is not None:
        step = replace(step, batch=BatchRef.concat([step.batch, padding]))
    for stage in plan.learner_stages():
        report = rank.stages[stage.name](step)
        if isinstance(report, UpdateReport):
            metrics |= prefixed("train", report.metrics)
            if report.measured is not None:
                ledger = make_ledger(batch.ref, report.measured, {}, {}).metrics()
                metrics |= {n: v for n, v in ledger.items() if not n.endswith(("/seconds", "/wakes"))}
    return metrics


def replay_text(replayed: Replay) -> str:
    same, other = replayed.same, replayed.changed
    lines = [f"note: {note}" for note in replayed.notes]
    what = f"step {replayed.step}, repeated from {replayed.rows} recorded rows"
    if replayed.is_equal:
        weights = " and the weights of the checkpoint" if same.weights_equal else ""
        lines.append(f"{what}: all recorded columns, {len(same.metrics)} metrics{weights} are equal")
    else:
        lines.append(f"{what}: numbers differ")
        if (first := same.first) is not None:
            where = f"{first.key}{'' if first.token is None else f', token {first.token}'}"
            lines.append(f"  first {first.field} of {where}: {first.one} in the run, {first.two} here")
        differing = list(replayed.differing.items())[:8]
        lines += [f"  {name}: {a} in the run, {b} here" for name, (a, b) in differing]
        if same.weights_equal is False:
            lines.append("  the weights differ from the step's checkpoint")
    if other is not None:
        cosine = float(torch.nn.functional.cosine_similarity(same.gradient, other.gradient, dim=0))
        lines += ["", f"cosine of the gradients of the first optimizer step: {cosine:.6f}"]
        one, two = same.metrics, other.metrics
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        width = max(map(len, names), default=0)
        lines.append(f"{'metric':<{width}}  {'run':>12}  {'changed':>12}" if names else "no metric changes")
        lines += [f"{n:<{width}}  {_number(one.get(n))}  {_number(two.get(n))}" for n in names]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return f"{'–' if value is None else f'{value:.6g}':>12}"

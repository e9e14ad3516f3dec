"""`practicum replay`: the learner's part of a recorded step, run again from the checkpoint before it.

With the run's own recipe every number comes back bit for bit; with other values it shows what they change.
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
from practicum.dataplane.fields import FIELDS, Field
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stages import Plan, StageSpec
from practicum.errors import PracticumError, RecipeError, RecipeErrors
from practicum.models.load_model import load_model
from practicum.observe.records.compare_runs import Difference, first_in_rows
from practicum.observe.records.read_record import Record, RecordedRow, require_run
from practicum.observe.records.record_files import FOLDER, RecordPlace
from practicum.observe.records.recorder import Recorder
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.roles.student import UpdateReport
from practicum.roles.train_rank import TrainRank, set_threads
from practicum.teachers.ledger import make_ledger
from practicum.teachers.load_teachers import PLACEMENTS, Teachers, make_group, signal_width
from practicum.teachers.teacher_scorer import TeacherScorer
from practicum.trainer.checkpoints import Checkpoints, is_checkpoint, read_progress
from practicum.trainer.preflight import known_traits
from practicum.trainer.run_folder import RunFolder
from practicum.trainer.sample_step import TRAIN
from practicum.trainer.step import prefixed

CHANGEABLE = ("algorithm.", "distill.", "train.", "critic.", "reward.weight", "route.shares")
"""What the learner's part of a step depends on, beside the batch."""


@dataclass(slots=True)
class Replayed:
    """A step as it was learnt again."""

    metrics: dict[str, float]
    gradient: Tensor
    """Of the first optimizer step, after clipping, all parameters in one."""
    first: Difference | None
    """The first recorded number that came out otherwise."""
    weights_equal: bool | None
    """Whether the weights are those of the step's checkpoint; None if there is none."""


@dataclass(slots=True)
class Replay:
    """A replay: as the run had it and, if values were changed, with them."""

    step: int
    rows: int
    same: Replayed
    changed: Replayed | None
    differing: dict[str, tuple[float | None, float]]
    """Metrics of the run that came out otherwise with its own recipe: the run's value, and the replay's."""
    notes: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether every number came back."""
        return self.same.first is None and not self.differing and self.same.weights_equal is not False


def replay_step(run: Path, step: int, overrides: Sequence[str] = ()) -> Replay:
    """Learn from a recorded step again, and compare; what is missing for that is a PracticumError."""
    require_run(run)
    folder = RunFolder(run)
    as_it_was = load_recipe(_recipe_at(folder, step)).recipe
    recipe = _here(as_it_was)
    other, notes = None, list[str]()
    if overrides:
        try:
            other, notes = _changed(_recipe_at(folder, step), overrides)
        except RecipeErrors as found:
            raise RecipeErrors(f"{run / 'recipe.yaml'} with --set", found.errors) from None
    batch = _RecordedBatch(Record(run), recipe, step)
    checkpoint = _checkpoint_before(folder, step)
    if as_it_was.data_parallel > 1:
        notes.append("the run had several ranks, the replay has one: sums are rounded in another order")
    same = _learn(recipe, batch, checkpoint, notes, Checkpoints(folder.checkpoints).path(step))
    changed = None if other is None else _learn(other, batch, checkpoint, notes)
    line = next((row for row in folder.metrics() if row["step"] == step), {})
    differing = {
        name: (line.get(name), value) for name, value in same.metrics.items() if line.get(name) != value
    }
    return Replay(step, len(batch.rows), same, changed, differing, notes)


def _recipe_at(folder: RunFolder, step: int) -> dict[str, Any]:
    """The resolved recipe of a step: the run's, without what was changed after that step."""
    resolved, path = folder.recipe(), folder.path / "changes.jsonl"
    changes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for change in reversed(changes):
        if change["step"] > step:
            *outer, last = change["key"].split(".")
            section = resolved
            for name in outer:
                section = section[name]
            section[last] = change["old"]
    return resolved


def _here(recipe: Recipe) -> Recipe:
    """The recipe in this process, whatever runtime the run had; a check that fires is told, and no more."""
    warned = {} if recipe.checks.level == "off" else {"level": "warn"}
    runtime = recipe.runtime.model_copy(update={"kind": "local"})
    return recipe.model_copy(update={"runtime": runtime, "checks": recipe.checks.model_copy(update=warned)})


def _changed(resolved: dict[str, Any], overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe with other values, and sentences about those of the run that they rule out."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not key.startswith(CHANGEABLE):
            expected = f"a key that the learner reads: {', '.join(f'{k}…' for k in CHANGEABLE)}"
            raise RecipeError(f"--set {key}", "a value of what came before the batch", expected)
    try:
        return _here(load_recipe(resolved, overrides).recipe), []
    except RecipeErrors as found:
        changed_keys = {text.partition("=")[0].strip() for text in overrides}
        dropped = [e.path for e in found.errors if e.path not in changed_keys and _drop(resolved, e.path)]
        if len(dropped) < len(found.errors):
            raise
    notes = [f"{key} is as by default: the run's value does not go with --set" for key in dropped]
    return _here(load_recipe(resolved, overrides).recipe), notes


def _drop(resolved: dict[str, Any], path: str) -> bool:
    """Take a key out of a recipe; whether it was there."""
    *outer, last = path.split(".")
    section: Any = resolved
    for name in outer:
        section = section.get(name) if isinstance(section, dict) else None
    return isinstance(section, dict) and section.pop(last, None) is not None


def _checkpoint_before(folder: RunFolder, step: int) -> Path | None:
    """The checkpoint to start from; None for the first step, which starts from the recipe's model."""
    checkpoints = Checkpoints(folder.checkpoints)
    steps = checkpoints.steps()
    if step == 1:
        return None
    if step - 1 not in steps:
        there = ", ".join(map(str, steps)) or "no step"
        raise PracticumError(
            f"a replay of step {step} starts from the checkpoint of step {step - 1}, and {folder.path} has "
            f"checkpoints of {there}.\n  → replay a step after one of those, or train with "
            "--set checkpoint.every=1 --set checkpoint.keep_last=1000"
        )
    return checkpoints.path(step - 1)


class _RecordedBatch:
    """The rows that a step learnt from, as they were recorded."""

    def __init__(self, record: Record, recipe: Recipe, step: int) -> None:
        self.record, self.step = record, step
        if recipe.track.record != "all":
            raise PracticumError(
                f"{record.run} keeps some rows of a step only (track.record: {recipe.track.record}): "
                "a replay needs all.\n  → train with --set track.record=all"
            )
        trained_rows = [row for row in record.rows() if row.trained == step]
        if not trained_rows:
            there = sorted({row.trained for row in record.rows() if row.trained is not None})
            known = f"{there[0]} to {there[-1]}" if there else "none"
            raise PracticumError(
                f"{record.run} has no recorded update in step {step}; steps with one: {known}"
            )
        self.rows: list[RecordedRow] = []
        for row in sorted(trained_rows, key=lambda row: row.key):
            whole = record.row(row.step, row.key)
            assert whole is not None
            self.rows.append(whole)
        if record.problems:
            raise PracticumError(f"the record can't be replayed: {record.problems[0]}")
        tags = tuple(replace(row.summary.tags, recorded=True) for row in self.rows)
        self.ref = BatchRef(TRAIN, tuple(row.summary.key for row in self.rows), tags)
        self.baselines = {}
        if estimator_traits(recipe.algorithm.advantage).greedy_baseline:
            rewards = {row.key.prompt: row.tags.reward for row in record.rows() if row.tags.is_baseline}
            self.baselines = {key.prompt: rewards[key.prompt] or 0.0 for key in self.ref.keys}

    def columns(self, names: Sequence[str]) -> dict[str, Column]:
        """Recorded columns as the store has them."""
        return {name: self._column(FIELDS[name]) for name in names}

    def _column(self, spec: Field) -> Column:
        if spec.extent == "object":
            objects = [row.objects.get(spec.name, {}) for row in self.rows]
            return [{name: torch.tensor(x) for name, x in values.items()} for values in objects]
        for row in self.rows:
            if spec.name not in row.columns:
                raise PracticumError(
                    f"step {self.step} has no recorded {spec.name} of {row.summary.key}, which the "
                    "learner needs: the run did not compute it"
                )
        rows = [torch.tensor(row.columns[spec.name], dtype=dtype_of(spec)) for row in self.rows]
        return torch.stack(rows) if spec.extent == "scalar" else Ragged.from_rows(rows)


def _learn(
    recipe: Recipe,
    batch: _RecordedBatch,
    checkpoint: Path | None,
    notes: list[str],
    after: Path | None = None,
) -> Replayed:
    """Run the stages of the learner on the recorded batch; `after` is the step's own checkpoint.

    What checks find is added to `notes`.
    """
    set_threads(recipe.runtime.threads, sides=2 if recipe.rollout.lag else 1)
    plan = make_plan(recipe, known_traits(recipe.model))
    with tempfile.TemporaryDirectory() as aside:
        again = Path(aside)
        (again / "versions.json").write_text(json.dumps({"practicum": "replay"}))
        place = RecordPlace(again / FOLDER, "replay", everything=True)
        watch = Watch(recipe.checks, notes.append)
        rank = _start(recipe, plan, Recorder(place), watch, checkpoint, batch.step)
        rank.store.put(batch.ref, batch.columns(_inputs(plan)))
        gradients: list[Tensor] = []
        rank.student.learner.stepper.optimizer.register_step_pre_hook(
            lambda *_: gradients.append(_gradient(rank) if not gradients else torch.empty(0))
        )
        metrics = _run_stages(rank, plan, batch)
        rows = [row.summary for row in batch.rows]
        known = {row.key: row for row in Record(again).rows()}
        pairs = [(row, known[row.key]) for row in rows if row.key in known]
        first = first_in_rows(batch.step, pairs, batch.record, Record(again))
    equal = None
    if after is not None and is_checkpoint(after):
        equal = _has_weights_of(rank, after / "student")
    return Replayed(metrics, gradients[0], first, equal)


def _run_stages(rank: TrainRank, plan: Plan, batch: _RecordedBatch) -> dict[str, float]:
    step = StepInfo(batch.ref, batch.step, batch.baselines)
    if "pad" in plan and (padding := rank.stages["pad"](step)) is not None:
        step = replace(step, batch=BatchRef.concat([step.batch, padding]))
    metrics: dict[str, float] = {}
    for stage in plan.learner_stages():
        report = rank.stages[stage.name](step)
        if isinstance(report, UpdateReport):
            metrics |= prefixed("train", report.metrics)
            if report.measured is not None:
                ledger = make_ledger(batch.ref, report.measured, {}, {}).metrics()
                metrics |= {n: v for n, v in ledger.items() if not n.endswith(("/seconds", "/wakes"))}
    return metrics


def _inputs(plan: Plan) -> list[str]:
    """The fields that the learner's stages read and none of them writes."""
    stages: list[StageSpec] = plan.learner_stages()
    needed: dict[str, None] = {}
    written: set[str] = set()
    for stage in stages:
        needed |= dict.fromkeys(name for name in stage.reads if name not in written)
        written |= set(stage.writes)
    return list(needed)


def _start(
    recipe: Recipe, plan: Plan, recorder: Recorder, watch: Watch, checkpoint: Path | None, step: int
) -> TrainRank:
    """The learner as it was before the step."""
    model = load_model(recipe.model, recipe.seed)
    teachers = _teachers(recipe, model) if "teachers" in plan else None
    rank = TrainRank(recipe, plan, MemoryStore(), watch, model, teachers, recorder=recorder)
    if checkpoint is not None:
        rank.student.learner.load(checkpoint / "student")
        if rank.critic is not None:
            rank.critic.critic.load(checkpoint / "critic")
        if rank.teachers is not None:
            rank.teachers.load(checkpoint / "teachers")
        rank.advantages.kl.load_state_dict(read_progress(checkpoint).kl)
    if rank.teachers is not None:
        rank.teachers.refresh(step)
    return rank


def _teachers(recipe: Recipe, model: PreTrainedModel) -> Teachers:
    """What the learner needs of them: their scores are recorded, their output heads may be asked for."""
    assert recipe.distill is not None
    if recipe.distill.signal != "full":
        return Teachers({}, least_width=signal_width(recipe))
    scorers: dict[str, TeacherScorer] = {}
    for name in recipe.teachers:
        scorers |= PLACEMENTS["colocated"](make_group(recipe, [name], model))
    heads = {name: scorer.scorers[0].head() for name, scorer in scorers.items()}
    return Teachers(scorers, None, heads, targets=recipe.teacher_targets)


def _gradient(rank: TrainRank) -> Tensor:
    grads = (p.grad for p in rank.student.learner.stepper.parameters)
    return torch.cat([grad.detach().flatten().double() for grad in grads if grad is not None])


def _has_weights_of(rank: TrainRank, folder: Path) -> bool:
    """Whether the student is the one in a checkpoint, which it becomes."""
    learner = rank.student.learner
    learnt = {name: x.detach().clone() for name, x in learner.model.state_dict().items()}
    learner.load(folder)
    return all(torch.equal(x, learnt[name]) for name, x in learner.model.state_dict().items())


def replay_text(replayed: Replay) -> str:
    """A replay for people."""
    lines = [*(f"note: {note}" for note in replayed.notes)]
    what = f"step {replayed.step} learnt again from {replayed.rows} recorded rows"
    if replayed.is_equal:
        weights = " and the weights of the checkpoint" if replayed.same.weights_equal else ""
        numbers = f"all recorded columns, {len(replayed.same.metrics)} metrics{weights}"
        lines.append(f"{what}: {numbers} are those of the run")
    else:
        lines.append(f"{what}: the numbers are not those of the run")
        if (first := replayed.same.first) is not None:
            token = "" if first.token is None else f", token {first.token}"
            lines.append(
                f"  first {first.field} of {first.key}{token}: {first.one} in the run, {first.two} here"
            )
        lines += [
            f"  {name}: {a} in the run, {b} here" for name, (a, b) in list(replayed.differing.items())[:8]
        ]
        if replayed.same.weights_equal is False:
            lines.append("  the weights are not those of the step's checkpoint")
    return "\n".join([*lines, *_changes_text(replayed)])


def _changes_text(replayed: Replay) -> list[str]:
    """What the changed values did."""
    if (other := replayed.changed) is None:
        return []
    same = replayed.same
    names = [n for n in {**same.metrics, **other.metrics} if same.metrics.get(n) != other.metrics.get(n)]
    cosine = torch.nn.functional.cosine_similarity(same.gradient, other.gradient, dim=0)
    lines = ["", f"cosine of the gradients of the first optimizer step: {float(cosine):.6f}"]
    if not names:
        return [*lines, "no metric changes"]
    width = max(map(len, names))
    lines.append(f"{'metric':<{width}}  {'as it was':>12}  {'changed':>12}")
    return lines + [
        f"{n:<{width}}  {_number(same.metrics.get(n))}  {_number(other.metrics.get(n))}" for n in names
    ]


def _number(value: float | None) -> str:
    return f"{'–' if value is None else f'{value:.6g}':>12}"

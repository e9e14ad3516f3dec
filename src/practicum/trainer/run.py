"""A run: steps, evaluations, checkpoints and everything written about them, from a recipe to an export."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from practicum.checks.learning import LearningWatch
from practicum.checks.watch import Watch
from practicum.errors import CheckError, PracticumError
from practicum.models.load_model import save_tokenizer
from practicum.observe.progress import ProgressView
from practicum.observe.tables import ledger_table
from practicum.observe.text import say
from practicum.observe.trackers import StepDetails, Tracker, make_trackers
from practicum.recipe.load_recipe import LoadedRecipe, problems_of
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text.show_recipe import origin_notes
from practicum.records.recorder import Recorder
from practicum.roles.stage_table import make_plan
from practicum.runtime.random_state import seed_generators, set_random_state
from practicum.runtime.start_roles import Roles, loading, start_roles
from practicum.tasks.check_tasks import tasks_needing_answer
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.teachers.ledger import totals
from practicum.trainer.checkpoints import Checkpoints, Progress, step_name
from practicum.trainer.evaluate import Evaluation, evaluate
from practicum.trainer.failures import Failures
from practicum.trainer.finished_run import Run
from practicum.trainer.folder_lock import hold_folder
from practicum.trainer.interrupt import Interrupt, Stopped
from practicum.trainer.planned_memory import planned_memory
from practicum.trainer.preflight import check_without_models, known_traits
from practicum.trainer.process_state import ProcessState
from practicum.trainer.recipe_changes import Change, allowed_changes
from practicum.trainer.run_folder import RunFolder, choose_folder, folder_of, require_possible
from practicum.trainer.run_models import finish_export, resolve_models
from practicum.trainer.sample_step import SampledStep
from practicum.trainer.samples import StepSamples
from practicum.trainer.saver import Saver, best_metric
from practicum.trainer.step import StepRunner
from practicum.trainer.versions import describe_start
from practicum.user_code import text_of

LEDGER_WIDTH = 150
"""Columns of the table of teachers, also where the output is no terminal."""


OnStep = Callable[[dict[str, Any]], object]
"""Called with each row of metrics.jsonl as soon as it is written."""


class Trainer:
    """One recipe, from its start or its last checkpoint to its end."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        view: ProgressView,
        *,
        resume: bool = False,
        on_step: OnStep | None = None,
    ) -> None:
        self.recipe, self.folder, self.view, self.on_step = recipe, folder, view, on_step
        self.plan = make_plan(recipe, known_traits(recipe.model))
        self.watch = Watch(recipe.checks, self._report)
        self.process_state = ProcessState(self._report)
        view.stage("reading data and tokenizer")
        checked = check_without_models(recipe)
        self.process_state.restore()
        left_out = checked.left_out
        needs_answer = tasks_needing_answer(recipe)
        stream = make_stream(recipe.tasks, recipe.seed, needs_answer=needs_answer, left_out=left_out)
        self.eval_prompts = eval_prompts(recipe.tasks, recipe.eval.rows, recipe.seed, left_out)
        self.checkpoint: Path | None = None
        self.progress = Progress()
        self._passed_over: dict[int, str] = {}
        if resume:
            checkpoint = Checkpoints(folder.checkpoints, 1).latest(
                lambda p: folder.find_damage(p.positions, p.record_sums)
            )
            self.checkpoint, self.progress, self._passed_over = checkpoint
            stream.load_state_dict(self.progress.stream)
        resumed = None if self.checkpoint is None else f"continuing from {self.checkpoint.name}"
        view.starting(resumed or loading(recipe))
        # After all that may fail: whoever it starts is stopped by `close` alone.
        record = folder.record_place(recipe)
        self.roles: Roles = start_roles(recipe, self.plan, self.watch, record)
        recorder = None if record is None else Recorder(replace(record, role="controller"))
        self.runner = StepRunner(recipe, self.plan, self.roles, stream, self.watch, recorder)
        self.samples = StepSamples(self.roles)
        self.runner.on_stage, self.runner.on_rolled = self._stage, self._note_rolled
        if self.runner.window is not None:
            self.runner.window.on_wait = self._note_wait
        if "advantages" in self.plan:
            self.runner.on_batch = self.samples.add_advantages
        self.saver = Saver(recipe, folder, self.roles, self.runner)
        self.trackers: list[Tracker] = []
        self.failures = Failures(view.say, folder.log)
        self.learning = LearningWatch(recipe)
        self._to_warn_of = list(checked.warnings)
        self._began = time.monotonic()

    def begin(self, changes: Sequence[Change] = (), findings: Sequence[str] = ()) -> None:
        """Take the folder into use: all that can be wrong with the recipe is known by now.

        A resumed run continues from its checkpoint; `changes` are what its recipe sets differently.
        `findings` are shown and logged.
        """
        if self.checkpoint is None:
            self.folder.replace(self.recipe)
            seed_generators(self.recipe.seed)
        else:
            self._load(self.checkpoint)
            self._record_changes(changes)
        self.trackers = make_trackers(self.recipe, self.folder.path)
        self.samples.for_trackers = bool(self.trackers)
        for sentence in [*findings, *self.roles.describe(planned_memory(self.recipe))]:
            self._report(sentence)
        steps = self.recipe.train.steps
        if self.checkpoint is not None and self.progress.step >= steps:
            self.view.say(f"all {steps} steps are done already: --set train.steps=N continues the run")
        for sentence in self._to_warn_of:
            self.view.warn(sentence)
            if self.checkpoint is None:  # else the log has it
                self.folder.log(f"warning: {sentence}")

    def _load(self, path: Path) -> None:
        roles = self.roles
        for step, damage in self._passed_over.items():
            self.saver.checkpoints.set_aside(step)
            self._report(f"checkpoint {step_name(step)} can't be used, {path.name} is: {damage}")
        roles.load(path, self.progress.kl)
        self.runner.restore(self.progress.step, self.progress.window)
        self._check_taken_up(path.name)
        set_random_state(torch.load(path / "random.pt", weights_only=True))
        self.folder.rewind(self.progress.positions)
        done = list(self.folder.metrics())
        self.view.recall(done)
        self._to_warn_of += [sentence for row in done for sentence in self.learning.note(row)]
        self.folder.log(f"resumed from {path.name}")

    def _check_taken_up(self, name: str) -> None:
        """What the run continues with is what the checkpoint says."""
        kept, stream = self.progress, self.runner.stream
        for what, found, expected in (
            ("the next prompt", stream.state_dict()["position"], kept.stream["position"]),
            ("the weights' version", self.roles.version, kept.version),
            ("the KL weight", self.roles.kl_state(), kept.kl),
        ):
            if found != expected:
                text = f"{what} is {found} after {name} was read, and {expected} in it"
                raise CheckError(f"{text}: the checkpoint was not taken up whole")

    def _record_changes(self, changes: Sequence[Change]) -> None:
        first = self.progress.step + 1
        for change in changes:
            self.folder.append("changes.jsonl", [change.row(first)])
            self._report(f"changed from step {first} on: {change}")
        self.folder.write_recipe(self.recipe)

    def train(self, interrupt: Interrupt) -> Run:
        """All steps that are left, then the export."""
        steps = self.recipe.train.steps
        if not self.folder.positions()["metrics.jsonl"]:
            first = self.evaluate()
            self.progress.first_eval = first.scores
            self._record(0, dict(first.scores), {"eval": first.answers})
        if self.progress.pending:
            self._complete_step()
        self._mark()
        while self.progress.step < steps and not interrupt.asked and not self._is_good_enough():
            self._one_step(self.progress.step + 1)
        if self.saver.checkpoints.steps()[-1:] != [self.progress.step]:
            self.saver.save()
        if not interrupt.asked:
            aside = self.folder.export.with_name(".export")
            shutil.rmtree(aside, ignore_errors=True)
            self.roles.export(aside)
            finish_export(aside, self.folder.export, self.progress.step)
        return Run(
            self.recipe,
            self.folder.path,
            self.progress.first_eval,
            self.progress.last_eval or self.progress.first_eval,
            self.progress.step,
            self._elapsed(),
            tuple(self.failures.summary()),
            tuple(self.view.warnings),
            interrupt.number,
        )

    def evaluate(self) -> Evaluation:
        """Scores and answers on the held-out prompts with the current weights."""
        self.view.stage("eval")
        began, step = time.perf_counter(), self.progress.step
        evaluation = evaluate(self.recipe, self.roles, self.eval_prompts, self.folder.log, step=step)
        self.process_state.restore()
        if evaluation.scores:
            evaluation.scores["time/eval"] = time.perf_counter() - began
        return evaluation

    def _one_step(self, number: int) -> None:
        self._end_step(number, self.runner.step(number))
        self._complete_step()

    def _end_step(self, number: int, metrics: dict[str, float]) -> None:
        """All is learnt: from now on a checkpoint is of this step."""
        self.progress.step = number
        recorded = {"samples": self.samples.answers, "distributions": self.samples.distributions}
        self.progress.pending = {"metrics": metrics, **recorded}
        self.samples.clear()
        self._mark()

    def _complete_step(self) -> None:
        """Evaluate, record and keep the step that was learnt last."""
        every, steps, number = self.recipe.eval.every, self.recipe.train.steps, self.progress.step
        pending = self.progress.pending
        metrics, tables = dict(pending["metrics"]), {"samples": pending["samples"]}
        if number == steps or (every and number % every == 0):
            evaluation = self.evaluate()
            self.progress.last_eval = evaluation.scores
            metrics |= evaluation.scores
            tables["eval"] = evaluation.answers
        self._record(number, metrics, tables, pending["distributions"])
        self.progress.pending = {}
        is_best = self._is_best(metrics)
        self._mark()
        if is_best or self.saver.is_due(number):
            self.saver.save()

    def rescue(self) -> str:
        """After an error: keep the last finished step, and say what there is to continue from."""
        lost = ""
        try:
            self.process_state.restore()
            if (learnt := self.runner.learnt) is not None and learnt[0] > self.progress.step:
                self._end_step(*learnt)
            self.saver.rescue()
        except Exception as error:  # the first error is the one to show
            self.folder.log(f"no checkpoint of step {self.progress.step}: {type(error).__name__}: {error}")
            lost = f"no checkpoint of step {self.progress.step} could be written: {error}\n"
        if self.samples.answers:  # of the step under way, for whoever looks why it failed; cut when resumed
            with suppress(OSError):
                self.folder.append("samples.jsonl", self.samples.answers)
        if not (saved := self.saver.checkpoints.steps()):
            return f"{lost}{self.folder.path} has no checkpoint: start again with --fresh"
        return f"{lost}{self.folder.path} has a checkpoint of step {saved[-1]}: --resume continues from it"

    def _is_good_enough(self) -> bool:
        """Whether the last evaluation reached eval.stop_at."""
        goal = self.recipe.eval.stop_at
        scores = self.progress.last_eval or self.progress.first_eval
        return goal is not None and scores.get("eval/greedy", -math.inf) >= goal

    def _is_best(self, metrics: dict[str, float]) -> bool:
        name = best_metric(self.recipe)
        if name is None or name not in metrics:
            return False
        if self.progress.best is not None and metrics[name] <= self.progress.best:
            return False
        self.progress.best, self.progress.best_step = metrics[name], self.progress.step
        return True

    def _record(
        self,
        number: int,
        metrics: dict[str, float],
        tables: Mapping[str, list[dict[str, Any]]],
        distributions: Mapping[str, list[float]] | None = None,
    ) -> None:
        row = {"step": number, **metrics}
        self.folder.append("metrics.jsonl", [row])
        for name, answers in tables.items():
            self.folder.append(f"{name}.jsonl", answers)
        details = StepDetails({name: rows for name, rows in tables.items() if rows}, distributions or {})
        for tracker in self.trackers:
            tracker.log(number, metrics)
            tracker.log_details(number, details)
        self.view.step(number, metrics)
        for sentence in self.learning.note(metrics):
            self.view.warn(sentence)
            self.folder.log(f"warning: {sentence}")
        if self.on_step is not None:
            self.on_step(row)

    def _stage(self, name: str) -> None:
        self.process_state.restore()
        self.view.stage(name)

    def _note_rolled(self, sampled: SampledStep) -> None:
        self.process_state.restore()
        for batch in sampled.rolled:
            self.failures.note(batch)
            self.samples.rolled_out(sampled.number, batch, self.roles.rollouts[sampled.copy].prompts)
        if self.samples.answers:
            self.view.sample(self.samples.answers[-1])

    def _note_wait(self, sentence: str) -> None:
        self.view.waiting(sentence)
        self.folder.log(f"the learner waits: {sentence}")

    def _report(self, sentence: str) -> None:
        self.view.say(sentence)
        self.folder.log(sentence)

    def _elapsed(self) -> float:
        return self.progress.seconds + time.monotonic() - self._began

    def _mark(self) -> None:
        self.saver.mark(self.progress, self._elapsed())

    def close(self) -> None:
        """Stop what runs in the background."""
        for tracker in self.trackers:
            tracker.close()
        self.runner.close()
        self.roles.close()


def train_loaded(
    loaded: LoadedRecipe,
    out: Path | None = None,
    *,
    resume: bool = False,
    fresh: bool = False,
    change: bool = False,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> Run:
    """Train one recipe.

    With `change` a resumed run may have a recipe with other values than the run had.
    """
    start = describe_start(loaded.source)
    path = folder_of(loaded.recipe).path if out is None else out
    require_possible(path)
    with hold_folder(path):
        folder = choose_folder(loaded.recipe, out, resume=resume, fresh=fresh)
        return _train_in(folder, loaded, start, resume=resume, change=change, on_step=on_step, quiet=quiet)


def _train_in(
    folder: RunFolder,
    loaded: LoadedRecipe,
    start: Mapping[str, Any],
    *,
    resume: bool,
    change: bool,
    on_step: OnStep | None,
    quiet: bool,
) -> Run:
    loaded, taken = resolve_models(loaded, resumed=folder if resume else None)
    recipe = loaded.recipe
    resolved = recipe.model_dump(mode="json", exclude={"extends"})
    changes = allowed_changes(folder.recipe(), resolved, change=change) if resume else []
    steps = Checkpoints(folder.checkpoints, 1).steps() if resume else []
    console = Console(quiet=True, force_terminal=False) if quiet else None
    view = ProgressView(recipe.name, recipe.train.steps, done=steps[-1] if steps else 0, console=console)
    with ExitStack() as stack:
        stack.enter_context(view)
        interrupt = stack.enter_context(Interrupt(view.say))
        with problems_of(loaded):
            trainer = Trainer(recipe, folder, view, resume=resume, on_step=on_step)
        run = stack.enter_context(closing(trainer))
        try:
            run.begin(changes, taken)
            folder.write_about(origin_notes(loaded), run.plan)
            if folder.record_place(recipe) is not None:
                save_tokenizer(recipe.model, folder.path / "tokenizer.json")
            folder.note_start(start)
            outcome = run.train(interrupt)
            folder.note_end("interrupted" if outcome.interrupted else "done", outcome.steps)
            return outcome
        except BaseException as error:
            kind = "" if isinstance(error, Stopped) else f"{type(error).__name__}: "
            reason = f"stopped by {kind}{text_of(error)}"
            folder.log(reason)
            if details := getattr(error, "details", ""):
                folder.log(f"traceback:\n{details}")
            if isinstance(error, Exception):
                error.add_note(run.rescue())
            with suppress(OSError):
                folder.note_end(reason, run.progress.step)
            raise


def train_recipes(
    recipes: Sequence[LoadedRecipe],
    *,
    resume: bool = False,
    fresh: bool = False,
    change: bool = False,
    out: Path | None = None,
) -> list[Run]:
    """Train recipes one after the other, with a summary of each."""
    if out is not None and len(recipes) > 1:
        raise PracticumError("--out is for one recipe; several write to their own folders")
    outcomes = []
    for loaded in recipes:
        outcome = train_loaded(loaded, out, resume=resume, fresh=fresh, change=change)
        outcomes.append(outcome)
        say(summary(outcome, loaded.recipe.expected))
        show_ledger(outcome.folder)
        if outcome.interrupted:
            break
    return outcomes


def summary(outcome: Run, expected: str | None) -> str:
    """A run in a few lines: how it ended, its scores before and after, where it lies."""
    ended = "stopped, --resume continues it" if outcome.interrupted else "done"
    lines = [f"{outcome.name}: {ended} · {outcome.steps} steps in {outcome.seconds:.0f} s · {outcome.folder}"]
    for name, last in outcome.last_eval.items():
        if name.startswith("eval/"):
            first = outcome.first_eval.get(name)
            lines.append(f"  {name} {f'{first:.3f} → ' if first is not None else ''}{last:.3f}")
    if outcome.interrupted and outcome.steps:
        lines.append(f"  model: {outcome.folder} is its model so far, wherever a model is named")
    lines += [f"  {line}" for line in outcome.failures]
    lines += [f"  warning: {line}" for line in outcome.warnings]
    return "\n".join([*lines, *([f"  expected: {expected}"] if expected else [])])


def show_ledger(folder: Path) -> None:
    """What each teacher and domain had of the run, if it had teachers."""
    lines = totals(RunFolder(folder).metrics())
    if lines:
        Console(width=max(Console().width, LEDGER_WIDTH)).print(ledger_table(lines))

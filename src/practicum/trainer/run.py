"""Train a recipe: steps, evaluations, checkpoints, records and the final export.

Read `train_loaded` first.
"""

from __future__ import annotations

import gc
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from practicum.checks.learning import LearningWatch, Signal
from practicum.checks.watch import Watch
from practicum.errors import CheckError, PracticumError
from practicum.models.load_model import save_tokenizer
from practicum.observe.progress import ProgressView
from practicum.observe.records.recorder import Recorder
from practicum.observe.text import ledger_table, say, update_rest
from practicum.observe.trackers import StepDetails, Tracker, make_trackers
from practicum.recipe.load_recipe import LoadedRecipe, problems_of
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text.show_recipe import origin_notes, resolved_yaml
from practicum.roles.stage_table import make_plan
from practicum.runtime.random_state import seed_generators, set_random_state
from practicum.runtime.start_roles import Roles, loading, start_roles
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.teachers.ledger import totals
from practicum.trainer.checkpoints import Checkpoints, Progress, unreadable
from practicum.trainer.evaluate import Evaluation, evaluate
from practicum.trainer.preflight import check_without_models, known_traits
from practicum.trainer.recipe_changes import Change, allowed_changes
from practicum.trainer.run_folder import RunFolder, choose_folder, folder_of, hold_folder, write_atomic
from practicum.trainer.run_models import Run, finish_export, resolve_models
from practicum.trainer.sample_step import SampledStep
from practicum.trainer.samples import Failures, StepSamples
from practicum.trainer.saver import Saver
from practicum.trainer.step import StepRunner
from practicum.trainer.window import make_sampling

LEDGER_WIDTH = 150
"""Width of the table of teachers, also if the output is not a terminal."""
PROBED_STEPS = 10
"""Least steps of a run that first compares teachers with the student, by three small rollouts for each."""
OnStep = Callable[[dict[str, Any]], object]
"""Callback that receives each row of metrics.jsonl after it is written. If it returns True, the run ends."""


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
    """Train one recipe. With `change`, a resumed run may change values of its recipe."""
    path = folder_of(loaded.recipe) if out is None else out
    with hold_folder(path), ExitStack() as stack:
        folder = choose_folder(path, resume=resume, fresh=fresh)
        loaded, taken = resolve_models(loaded, resumed=folder if resume else None)
        recipe, changes, done = loaded.recipe, list[Change](), 0
        if resume:
            resolved = recipe.model_dump(mode="json", exclude={"extends"})
            changes = allowed_changes(folder.recipe(), resolved, change=change)
            done = max(Checkpoints(folder.checkpoints).steps(), default=0)
        console = Console(quiet=True, force_terminal=False) if quiet else None
        view = ProgressView(recipe.name, recipe.train.steps, done=done, console=console)
        stack.enter_context(view)
        interrupt = stack.enter_context(Interrupt(view.say))
        with problems_of(loaded):
            trainer = Trainer(recipe, folder, view, resume=resume, on_step=on_step)
        stack.enter_context(closing(trainer))
        try:
            trainer.begin(changes, taken)
            folder.write_about(origin_notes(loaded), trainer.plan)
            if folder.record_place(recipe.recorded_groups) is not None:
                save_tokenizer(recipe.model, folder.path / "tokenizer.json")
            folder.note_start(loaded.source)
            outcome = trainer.train(interrupt)
            folder.note_end("interrupted" if outcome.interrupted else "done", outcome.steps)
            return outcome
        except BaseException as error:
            kind = "" if isinstance(error, Stopped) else f"{type(error).__name__}: "
            reason = f"stopped by {kind}{error}"
            folder.log(reason)
            if details := getattr(error, "details", ""):
                folder.log(f"traceback:\n{details}")
            if isinstance(error, Exception):
                error.add_note(trainer.rescue())
            with suppress(OSError):
                folder.note_end(reason, trainer.progress.step)
            raise


class Trainer:
    """Trains one recipe, from the start or the last checkpoint to the end."""

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
        view.stage("reading data and tokenizer")
        checked = check_without_models(recipe)
        left_out, needs_answer = checked.left_out, recipe.tasks_needing_answer
        stream = make_stream(recipe.tasks, recipe.seed, needs_answer=needs_answer, left_out=left_out)
        self.eval_prompts = eval_prompts(recipe.tasks, recipe.eval.rows, recipe.seed, left_out)
        self.checkpoint: Path | None = None
        self.progress = Progress()
        if resume:
            self.checkpoint, self.progress = Checkpoints(folder.checkpoints).latest()
            stream.load_state_dict(self.progress.stream)
        view.starting(f"continuing from {self.checkpoint.name}" if self.checkpoint else loading(recipe))
        # Last, after everything that may fail, because only `close` stops its processes.
        record = folder.record_place(recipe.recorded_groups)
        self.roles: Roles = start_roles(recipe, self.plan, self.watch, record, folder.path)
        recorder = None if record is None else Recorder(replace(record, role="controller"))
        self.samples = StepSamples(self.roles)
        options = {"on_stage": view.stage, "on_wait": self._note_wait}
        sampling = make_sampling(recipe, self.plan, self.roles, stream, recorder, **options)
        self.runner = StepRunner(
            recipe,
            self.plan,
            self.roles,
            sampling,
            self.watch,
            recorder,
            on_stage=view.stage,
            on_rolled=self._note_rolled,
            on_batch=self.samples.add_advantages if "advantages" in self.plan else lambda batch: None,
        )
        self.saver = Saver(recipe.checkpoint, folder, self.roles, self.runner)
        self.trackers: list[Tracker] = []
        self.failures = Failures(view.say, folder.log)
        self.learning = LearningWatch(Signal.of(recipe))
        self._to_warn_of = list(checked.warnings)
        self._to_log = [finding for finding in checked.findings if finding.startswith("teacher ")]
        self._is_enough = self._loop_rewards = False  # on_step has returned True; a loop returns rewards
        self._began = time.monotonic()

    def begin(self, changes: Sequence[Change] = (), findings: Sequence[str] = ()) -> None:
        """Start writing to the folder, after all checks of the recipe. A resumed run continues from its
        checkpoint, with `changes` to its recipe. `findings` are printed and logged."""
        first, steps = self.progress.step + 1, self.recipe.train.steps
        if self.checkpoint is None:
            self.folder.replace(resolved_yaml(self.recipe))
            seed_generators(self.recipe.seed)
        else:
            self._load(self.checkpoint)
            for change in changes:
                self.folder.append("changes.jsonl", [change.row(first)])
                self._report(f"changed from step {first} on: {change}")
            write_atomic(self.folder.path / "recipe.yaml", resolved_yaml(self.recipe))
        self.trackers = make_trackers(self.recipe, self.folder.path)
        self.samples.for_trackers = bool(self.trackers)
        for sentence in [*findings, *self.roles.describe()]:
            self._report(sentence)
        if self.checkpoint is not None and first > steps:
            self.view.say(f"all {steps} steps are done: --set train.steps=N continues the run")
        self._warn(self._to_warn_of, is_new=self.checkpoint is None)

    def _load(self, path: Path) -> None:
        progress = self.progress
        try:
            self.roles.load(path, progress.kl)
            random = torch.load(path / "random.pt", weights_only=True)
        except PracticumError:
            raise
        except Exception as error:
            raise unreadable(path, error) from error
        self.runner.restore(progress.step, progress.window)
        position = self.runner.sampling.stream_state(progress.step + 1)["position"]
        resumed = position, self.roles.version, self.roles.kl_state()
        saved = progress.stream["position"], progress.version, progress.kl
        if resumed != saved:
            raise CheckError(
                f"{path.name} was not resumed completely: the next prompt, the weights' version and the KL "
                f"weight are {resumed}, and {saved} in the checkpoint"
            )
        set_random_state(random)
        self.folder.rewind(progress.positions)
        done = self.folder.metrics()
        self.view.recall(done)
        self._to_warn_of += [sentence for row in done for sentence in self.learning.note(row)]
        self.folder.log(f"resumed from {path.name}")

    def train(self, interrupt: Interrupt) -> Run:
        progress, goal = self.progress, self.recipe.eval.stop_at
        if not self.folder.positions()["metrics.jsonl"]:
            first = self.evaluate()
            progress.first_eval = first.scores
            self._record(0, dict(first.scores), {"eval": first.answers})
            if self.recipe.train.steps >= PROBED_STEPS:
                self.view.stage("teachers")
                for finding in self._to_log:
                    self.folder.log(finding)
                table, doubts = self.roles.compare_teachers()
                for line in table:
                    self._report(line)
                self._warn(doubts)
        if progress.pending:
            self._complete_step()
        self.saver.mark(self.progress, self._elapsed())
        before = progress.step
        while progress.step < self.recipe.train.steps and not (interrupt.asked or self._is_enough):
            score = (progress.last_eval or progress.first_eval).get("eval/greedy", -math.inf)
            if goal is not None and score >= goal:
                break
            self._end_step(progress.step + 1, self.runner.step(progress.step + 1))
            self._complete_step()
            if progress.step == before + 1:  # permanent objects, which later collections need not scan
                gc.collect(1)  # of the oldest objects, hardly any is garbage, and looking takes long
                gc.freeze()
        if self.saver.checkpoints.steps()[-1:] != [progress.step]:
            self.saver.save()
        if not interrupt.asked:
            aside = self.folder.export.with_name(".export")
            shutil.rmtree(aside, ignore_errors=True)
            self.roles.export(aside)
            finish_export(aside, self.folder.export, progress.step)
        return Run(
            self.recipe,
            self.folder.path,
            progress.first_eval,
            progress.last_eval or progress.first_eval,
            progress.step,
            self._elapsed(),
            tuple(self.failures.summary()),
            tuple(self.view.warnings),
            interrupt.asked,
            interrupt.number,
        )

    def evaluate(self) -> Evaluation:
        """Return scores and responses of the current weights on held-out prompts."""
        self.view.stage("eval")
        began, step = time.perf_counter(), self.progress.step
        evaluation = evaluate(self.recipe, self.roles, self.eval_prompts, self.folder.log, step=step)
        if evaluation.scores:
            evaluation.scores["time/eval"] = time.perf_counter() - began
        return evaluation

    def _end_step(self, number: int, metrics: dict[str, float]) -> None:
        """Mark the step as trained. Later checkpoints are of this step."""
        self.progress.step = number
        recorded = {"samples": self.samples.answers, "distributions": self.samples.distributions}
        self.progress.pending = {"metrics": metrics, **recorded}
        self.samples.clear()
        self.saver.mark(self.progress, self._elapsed())

    def _complete_step(self) -> None:
        """Evaluate, record and checkpoint the last trained step."""
        progress, every = self.progress, self.recipe.eval.every
        pending, number, is_best = progress.pending, progress.step, False
        metrics, tables = dict(pending["metrics"]), {"samples": pending["samples"]}
        if number == self.recipe.train.steps or (every and number % every == 0):
            evaluation = self.evaluate()
            progress.last_eval = evaluation.scores
            metrics |= evaluation.scores
            tables["eval"] = evaluation.answers
            score = evaluation.scores.get("eval/greedy")
            if every and score is not None and (progress.best is None or score > progress.best):
                progress.best, progress.best_step, is_best = score, number, True
        self._record(number, metrics, tables, pending["distributions"])
        progress.pending = {}
        self.saver.mark(self.progress, self._elapsed())
        if is_best or self.saver.is_due(number):
            self.saver.save()

    def rescue(self) -> str:
        """After an error, save the last finished step, and return a message about how to continue."""
        lost = ""
        try:
            if (learnt := self.runner.learnt) is not None and learnt[0] > self.progress.step:
                self._end_step(*learnt)
            self.saver.rescue()
        except Exception as error:  # the first error is the one to show
            self.folder.log(f"no checkpoint of step {self.progress.step}: {type(error).__name__}: {error}")
            lost = f"no checkpoint of step {self.progress.step} could be written: {error}\n"
        if (
            self.samples.answers
        ):  # samples of the failed step help to debug it, and a resumed run removes them
            with suppress(OSError):
                self.folder.append("samples.jsonl", self.samples.answers)
        if not (saved := self.saver.checkpoints.steps()):
            return f"{lost}{self.folder.path} has no checkpoint: start again with --fresh"
        return f"{lost}{self.folder.path} has a checkpoint of step {saved[-1]}: --resume continues from it"

    def _record(
        self,
        number: int,
        metrics: dict[str, float],
        tables: Mapping[str, list[dict[str, Any]]],
        distributions: Mapping[str, list[float]] | None = None,
    ) -> None:
        row = {"step": number, **metrics}
        for name, rows in {"metrics": [row], **tables}.items():
            self.folder.append(f"{name}.jsonl", rows)
        details = StepDetails({name: rows for name, rows in tables.items() if rows}, distributions or {})
        for tracker in self.trackers:
            tracker.log(number, metrics)
            tracker.log_details(number, details)
        self.view.step(number, metrics)
        self._warn(self.learning.note(metrics))
        if self.on_step is not None:
            self._is_enough = self.on_step(row) is True

    def _warn(self, sentences: Iterable[str], *, is_new: bool = True) -> None:
        for sentence in sentences:
            self.view.warn(sentence)
            if is_new:  # otherwise it is in the log
                self.folder.log(f"warning: {sentence}")

    def _note_rolled(self, sampled: SampledStep) -> None:
        if not self._loop_rewards and any(t.loop_reward is not None for b in sampled.rolled for t in b.tags):
            self._loop_rewards = True
            replaced = ["reward.functions", *(["reward.models"] if self.recipe.reward.models else [])]
            names = " and ".join(replaced)
            self._report(f"agent.loop returns rewards: they replace {names}, which don't score its sessions")
        for batch in sampled.rolled:
            self.failures.note(batch)
            self.samples.rolled_out(sampled.number, batch, sampled.rollout.prompts)
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

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        self.runner.sampling.close()
        self.roles.close()
        gc.unfreeze()


class Stopped(KeyboardInterrupt):
    """Raised by a second signal, with its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"a second {signal.Signals(number).name}")
        self.number = number


class Interrupt:
    """Context in which SIGINT and SIGTERM set `asked` and `number`. A second signal raises Stopped."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self.number: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._handle)
                self._before[number] = signal.SIG_DFL if before is None else before  # None: not Python's
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise Stopped(number)
        self.asked, self.number = True, number
        self._say("stopping after this step, with a checkpoint; Ctrl-C again stops immediately")


def train_recipes(recipes: Sequence[LoadedRecipe], *, out: Path | None = None, **options: Any) -> list[Run]:
    """Train recipes one after the other, with a summary of each. `options` are those of `train_loaded`."""
    if out is not None and len(recipes) > 1:
        raise PracticumError("--out works with one recipe only: remove it, or train the recipes one by one")
    outcomes: list[Run] = []
    for loaded in recipes:
        outcomes.append(outcome := train_loaded(loaded, out, **options))
        say(summary(outcome))
        show_ledger(outcome)
        if outcome.interrupted:
            break
    return outcomes


def show_ledger(outcome: Run) -> None:
    if lines := totals(outcome.metrics):
        Console(width=max(Console().width, LEDGER_WIDTH)).print(ledger_table(lines))
        if rest := update_rest(outcome.metrics):
            say(rest)


def summary(outcome: Run) -> str:
    """Summarise a run in a few lines: state, scores before and after, folder and warnings."""
    ended = "stopped, --resume continues it" if outcome.interrupted else "done"
    lines = [f"{outcome.name}: {ended} · {outcome.steps} steps in {outcome.seconds:.0f} s · {outcome.folder}"]
    domains = {name.split("/", 2)[2] for name in outcome.last_eval if name.count("/") > 1}
    for name, last in outcome.last_eval.items():
        if name.startswith("eval/") and (len(domains) > 1 or name.count("/") == 1):
            first = outcome.first_eval.get(name)
            lines.append(f"  {name} {f'{first:.3f} → ' if first is not None else ''}{last:.3f}")
    if outcome.interrupted and outcome.steps:
        lines.append(
            f"  model: {outcome.folder} (use the run folder wherever a recipe or command takes a model)"
        )
    lines += [f"  {line}" for line in outcome.failures]
    lines += [f"  warning: {line}" for line in outcome.warnings]
    if (expected := outcome.recipe.expected) is not None:
        lines.append(f"  expected: {expected}")
    return "\n".join(lines)

"""The teachers' role: rows are scored by their teachers, and the scores are written.

Teachers with their own resources score a session as soon as it is finished (`score_session`). Rows of
colocated teachers wait until the rollout is done: then the stage `teachers` wakes each that has rows once,
while the student's engines sleep (`Roles.engines_asleep`).
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column, Columns, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.errors import DeadlineError, TeacherError
from practicum.learning.learner import Learner
from practicum.learning.minibatches import spread_evenly
from practicum.learning.parallel import Parallel
from practicum.models.attention import OutputHead
from practicum.models.images import images_of
from practicum.places.adapter_teachers import AdapterTeacher
from practicum.places.model_cache import ModelCache
from practicum.places.place import TeacherPlace, score_rows
from practicum.places.torch_teacher import ColocatedTeacher, OwnTeacher
from practicum.places.vllm_teacher import VllmTeacher
from practicum.recipe.derived import compare_temperature, scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.records.recording_store import stage_span
from practicum.roles.run_stage import StepInfo, stage
from practicum.tasks.prompts import Prompt
from practicum.teachers.route import before_text, teacher_of


@dataclass(slots=True)
class Teachers:
    """The teachers of a run: where each lives, and what the learner must know of each."""

    places: dict[str, TeacherPlace]
    residency: ModelCache | None = None
    """Wakes colocated teachers; None if each has a device of its own and never sleeps."""
    heads: dict[str, OutputHead] = field(default_factory=dict)
    """Output heads, if the signal is the full distribution."""
    least_width: int = 0
    """Hidden size of the widest teacher elsewhere."""

    @property
    def width(self) -> int:
        """Hidden size of the widest teacher, which rows of hidden states are filled up to."""
        return max((head.weight.shape[1] for head in self.heads.values()), default=self.least_width)

    def colocated(self) -> dict[str, ColocatedTeacher | VllmTeacher]:
        """Those that are woken after the rollout."""
        here = {n: p for n, p in self.places.items() if isinstance(p, ColocatedTeacher | VllmTeacher)}
        return {name: place for name, place in here.items() if place.sleeps}

    def sleeper(self, name: str) -> str:
        """The model that is woken for a teacher: teachers on one base share it."""
        place = self.places[name]
        return place.base.name if isinstance(place, AdapterTeacher) else name

    def awake(self, name: str) -> AbstractContextManager[None]:
        """A teacher is awake inside."""
        place = self.places[name]
        if self.residency is None or (isinstance(place, AdapterTeacher) and not place.base.sleeps):
            return nullcontext()
        return self.residency.awake(self.sleeper(name))

    @property
    def wakes(self) -> dict[str, int]:
        """How often each colocated teacher was woken so far."""
        known = {} if self.residency is None else self.residency.wakes
        shared = [name for name, place in self.places.items() if isinstance(place, AdapterTeacher)]
        return {**known, **{name: known.get(self.sleeper(name), 0) for name in shared}}

    def close(self) -> None:
        """Stop all of them, even if one can't be."""
        with ExitStack() as stack:
            for place in self.places.values():
                stack.callback(place.close)


_ROUNDING = 0.01
"""Largest |difference| in nats of two logprobs of one token."""


class TeacherRole:
    """Scores rows by their teachers, for one rollout at a time."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        teachers: Teachers,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab: int | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """On several ranks each scores its own share of the rows, apart from the others."""
        self.recipe, self.plan, self.store = recipe, plan, store
        self.loaded, self.tokenizer = teachers, tokenizer
        self.rank, self.ranks = (0, 1) if parallel is None else (parallel.rank, parallel.world)
        assert recipe.distill is not None
        signal = recipe.distill.signal
        self.options = ScoreOptions(
            top_k=recipe.distill.top_k if signal == "top_k" else 0,
            hidden=signal == "full",
            temperature=compare_temperature(recipe),
            vocab=vocab,
        )
        self._colocated = teachers.colocated() if teachers.residency is not None else {}
        self._spent = self.seconds(), teachers.wakes
        self._copies: dict[str, tuple[dict[str, Tensor], int]] = {}
        self.student: Learner | None = None
        """Whose weights copies of the student take; it is made after the teachers."""

    def teacher_of(self, prompt: Prompt) -> str:
        """Who corrects this prompt."""
        return teacher_of(prompt, self.recipe.route, self.recipe.teachers, self.recipe.seed)

    def seconds(self) -> dict[str, float]:
        """Seconds of scoring of each teacher so far."""
        return {name: place.busy_s for name, place in self.loaded.places.items()}

    async def score_session(self, name: str, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Have rows scored by a teacher with its own resources, and write the scores."""
        with stage_span(self.store, "teachers", batch.tags[0].step, name, len(batch)):
            columns = Columns("teachers", self.store.get(batch, self.plan["teachers"].reads))
            rows = self._rows(batch, columns, prompts)
            scores = await score_rows(self.loaded.places[name], rows, self.options)
            self._check(name, rows, scores)
            self.store.put(batch, self._columns(scores), keep_tags=True)

    def _own_rows(self, step: StepInfo) -> BatchRef:
        """This rank's share of the rows that wait for colocated teachers."""
        waiting = waiting_rows(self.recipe, step.batch)
        parts = share_by_tokens(
            [tags.prompt_tokens + tags.response_tokens for tags in waiting.tags], self.ranks
        )
        return waiting.take(parts[self.rank] if self.rank < len(parts) else [])

    @stage("teachers", rows=_own_rows)
    def score(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """Scores of rows by colocated teachers, each woken once and put to sleep whatever happens."""
        rows = self._rows(batch, columns, step.prompts)
        scores: dict[int, Scores] = {}
        for names, places in self._by_model(batch):
            rows_of_teachers = [(batch.tags[i].teacher or "", rows[i]) for i in places]
            with (
                stage_span(self.store, "teachers", step.number, ", ".join(names), len(places)),
                self.loaded.awake(names[0]),
            ):
                work = gather_all(
                    self.loaded.places[who].score(row, self.options) for who, row in rows_of_teachers
                )
                found = self._in_time(names, work, len(places))
            for (who, row), score in zip(rows_of_teachers, found, strict=True):
                self._check(who, [row], [score])
            scores.update(zip(places, found, strict=True))
        return self._columns([scores[i] for i in range(len(batch))])

    def _by_model(self, batch: BatchRef) -> list[tuple[list[str], list[int]]]:
        """Places of the rows that are scored together, by the model of their teachers, and whose they are."""
        groups: dict[str, tuple[list[str], list[int]]] = {}
        for i, tags in enumerate(batch.tags):
            assert tags.teacher is not None
            names, places = groups.setdefault(self.loaded.sleeper(tags.teacher), ([], []))
            names += [] if tags.teacher in names else [tags.teacher]
            places.append(i)
        return [*groups.values()]

    def _in_time(
        self, names: Sequence[str], work: Coroutine[Any, Any, list[Scores]], rows: int
    ) -> list[Scores]:
        deadline = sum(self.recipe.teachers[name].deadline_s for name in names)
        who = f"teacher{'s' if len(names) > 1 else ''} {', '.join(names)}"
        try:
            return run_async(work, timeout=deadline, owner=f"{who} ({rows} rows)")
        except DeadlineError as late:
            advice = f"if it is only slow, raise teachers.{names[0]}.deadline_s"
            raise DeadlineError(f"{late}; {advice}") from late

    def refresh(self, step: int) -> None:
        """Before step `step`: copies of the student whose time has come take its weights."""
        for name, teacher in self.recipe.teachers.items():
            if name in self.loaded.places and takes_new_weights(teacher, step):
                assert self.student is not None
                # A copy of our own: it is also what a checkpoint keeps of this teacher.
                copied = {key: x.cpu().clone() for key, x in self.student.named_weights()}
                self.give_weights(name, copied, self.student.version)
                self._forget_spent()

    def save(self, folder: Path) -> None:
        """Write the copies of the student that are not its start."""
        for name, (weights, version) in self._copies.items():
            folder.mkdir(parents=True, exist_ok=True)
            contiguous = {key: x.contiguous() for key, x in weights.items()}
            save_file(contiguous, copy_file(folder, name), metadata={"version": str(version)})

    def load(self, folder: Path) -> None:
        """Take up the copies that `save` wrote."""
        for path in sorted(folder.glob("*.safetensors")):
            if path.stem not in self.loaded.places:
                continue
            self.give_weights(path.stem, *read_copy(path))
        self._forget_spent()

    def give_weights(self, name: str, weights: dict[str, Tensor], version: int) -> None:
        """Make a copy of the student what these weights are."""
        self._copies[name] = weights, version
        place = self.loaded.places[name]
        assert isinstance(place, ColocatedTeacher | OwnTeacher | VllmTeacher)
        with self.loaded.awake(name) if name in self._colocated else nullcontext():
            place.take(weights, version)
            if name in self.loaded.heads:
                self.renew_head(name, place.head())

    def renew_head(self, name: str, fresh: OutputHead) -> None:
        """Take a teacher's output head as it is now, if the learner has need of it."""
        if (head := self.loaded.heads.get(name)) is not None:
            head.weight.copy_(fresh.weight)
            if head.bias is not None and fresh.bias is not None:
                head.bias.copy_(fresh.bias)

    def _forget_spent(self) -> None:
        """What was just done is no scoring of a step."""
        self._spent = self.seconds(), self.loaded.wakes

    def spent(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and wakes of each teacher since this was asked last."""
        seconds, wakes = self.seconds(), self.loaded.wakes
        before_s, before_w = self._spent
        self._spent = seconds, wakes
        return (
            {name: s - before_s.get(name, 0.0) for name, s in seconds.items()},
            {name: n - before_w.get(name, 0) for name, n in wakes.items()},
        )

    def _check(self, name: str, rows: Sequence[ScoreRequest], scores: Sequence[Scores]) -> None:
        for row, score in zip(rows, scores, strict=True):
            self._check_ids(name, row, score)
            self._check_positions(name, row, score)

    def _check_positions(self, name: str, row: ScoreRequest, scores: Scores) -> None:
        """A token has one logprob: as the row's token, and among the most likely ones of its position."""
        ids_RK, best_RK = scores.topk_ids, scores.topk_logprobs
        if ids_RK is None or best_RK is None:
            return
        own_RK = ids_RK == torch.tensor(row.ids[row.start :]).unsqueeze(1)
        apart_RK = (best_RK - scores.logprobs.unsqueeze(1)).abs().masked_fill(~own_RK, 0.0)
        if apart_RK.numel() and not float(apart_RK.max()) <= _ROUNDING:
            at = int(apart_RK.amax(1).argmax())
            raise TeacherError(
                f"teacher {name} gives token {at} of the answer of {row.name} a logprob of "
                f"{float(scores.logprobs[at]):.4g}, and another one by {float(apart_RK.max()):.3g} among its "
                "most likely tokens: its scores are not of the tokens that they stand beside"
            )

    def _check_ids(self, name: str, row: ScoreRequest, scores: Scores) -> None:
        """A server may name tokens that the student does not have: it does not know how many count."""
        vocab, ids = self.options.vocab, scores.topk_ids
        if vocab is not None and ids is not None and ids.numel() and int(ids.max()) >= vocab:
            raise TeacherError(
                f"teacher {name} finds token {int(ids.max())} likely in {row.name}, and the student has "
                f"{vocab} outputs: load it here, without teachers.{name}.url: such tokens are left out"
            )

    def _rows(self, batch: BatchRef, columns: Columns, prompts: Mapping[Key, Prompt]) -> list[ScoreRequest]:
        ids = (columns.ragged(name).rows for name in ("prompt_ids", "response_ids"))
        pictures = images_of(columns) if "multi_modal_inputs" in columns else [None] * len(batch)
        rows = []
        for (key, tags), prompt, response, images in zip(batch, *ids, pictures, strict=True):
            assert tags.teacher is not None
            before = self._before(tags.teacher, prompts.get(key))
            ids = [*before, *prompt.tolist(), *response.tolist()]
            rows.append(ScoreRequest(ids, len(ids) - response.shape[0], str(key), images))
        return rows

    def _before(self, name: str, prompt: Prompt | None) -> list[int]:
        teacher = self.recipe.teachers[name]
        if teacher.before is None:
            return []
        assert prompt is not None, "a row's prompt is remembered as long as the row is in the store"
        return self.tokenizer.encode(before_text(teacher, prompt), add_special_tokens=False)

    def _columns(self, scores: Sequence[Scores]) -> dict[str, Column]:
        columns: dict[str, Column] = {"teacher_logprobs": Ragged.from_rows([s.logprobs for s in scores])}
        if self.options.top_k:
            ids, best = zip(*(_top(s) for s in scores), strict=True)
            columns["teacher_topk_ids"] = Ragged.from_rows(ids)
            columns["teacher_topk_logprobs"] = Ragged.from_rows(best)
        if self.options.hidden:
            columns["teacher_hidden"] = Ragged.from_rows([_widened(s, self.loaded.width) for s in scores])
        return columns


def waiting_rows(recipe: Recipe, batch: BatchRef) -> BatchRef:
    """The rows that wait for colocated teachers until the rollout is done."""
    waits = {name for name, teacher in recipe.teachers.items() if not scores_during_rollout(teacher)}
    return batch.where(lambda _, tags: tags.teacher in waits)


def prompts_read(recipe: Recipe, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> dict[Key, Prompt]:
    """The prompts of those rows whose teachers read more of them than their tokens."""
    reads = {name for name, teacher in recipe.teachers.items() if teacher.before is not None}
    return {key: prompts[key] for key, tags in batch if tags.teacher in reads}


def share_by_tokens(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows over ranks that work apart from each other, longest first to the least loaded; none is idle."""
    return [sorted(part) for part in spread_evenly(tokens, min(ranks, len(tokens)))]


def copy_file(folder: Path, name: str) -> Path:
    """Where a checkpoint keeps a teacher that is a copy of the student."""
    return folder / f"{name}.safetensors"


def read_copy(path: Path) -> tuple[dict[str, Tensor], int]:
    """The weights in such a file, and their version."""
    with safe_open(path, "pt") as file:
        version = int(file.metadata()["version"])
    return load_file(path), version


def takes_new_weights(teacher: Teacher, step: int) -> bool:
    """Whether a copy of the student takes its weights before this step."""
    every = teacher.student.every if teacher.student is not None else 0
    return bool(every) and step > 1 and (step - 1) % every == 0


def _top(scores: Scores) -> tuple[Tensor, Tensor]:
    assert scores.topk_ids is not None
    assert scores.topk_logprobs is not None
    return scores.topk_ids, scores.topk_logprobs


def _widened(scores: Scores, width: int) -> Tensor:
    assert scores.hidden is not None
    return pad(scores.hidden, (0, width - scores.hidden.shape[1]))

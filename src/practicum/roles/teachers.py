"""The teachers' role: rows find their teacher, are scored, and what it said is written.

Teachers with resources of their own score a row as soon as its session is finished (`stream`). Colocated
ones wait until the rollout is done (`score`): the student's engine sleeps, each that has rows is woken once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from practicum.concurrency.event_loop import run_async
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.plan import Plan
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stage import Columns, stage
from practicum.dataplane.store import Store
from practicum.engines.protocol import Rests, Scores
from practicum.errors import DeadlineError, TeacherError
from practicum.models.output_head import OutputHead
from practicum.places.model_cache import ModelCache
from practicum.places.place import ScoreOptions, ScoreRow, TeacherPlace, score_rows
from practicum.places.torch_teacher import ColocatedTeacher, OwnTeacher
from practicum.places.vllm_teacher import VllmTeacher
from practicum.recipe.derived import compare_temperature
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.roles.stage_extras import images_of
from practicum.tasks.prompts import Prompt
from practicum.teachers.route import before_text, teacher_of


@dataclass(slots=True)
class Teachers:
    """The teachers of a run: where each lives, and what the learner must know of each."""

    places: dict[str, TeacherPlace]
    residency: ModelCache
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
        found = {n: p for n, p in self.places.items() if isinstance(p, ColocatedTeacher | VllmTeacher)}
        return {name: place for name, place in found.items() if place.sleeps}

    def close(self) -> None:
        """Stop all of them, even if one can't be."""
        with ExitStack() as stack:
            for place in self.places.values():
                stack.callback(place.close)


class TeacherRole:
    """Scores rows by their teachers. Works for one rollout at a time."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        staff: Teachers,
        engine: Rests,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab: int | None = None,
    ) -> None:
        self.recipe, self.plan, self.store = recipe, plan, store
        self.staff, self.engine, self.tokenizer = staff, engine, tokenizer
        assert recipe.distill is not None
        signal = recipe.distill.signal
        self.wanted = ScoreOptions(
            top_k=recipe.distill.top_k if signal == "top_k" else 0,
            hidden=signal == "full",
            temperature=compare_temperature(recipe),
            vocab=vocab,
        )
        self._colocated = staff.colocated()
        self._spent = self.seconds(), dict(staff.residency.wakes)
        self._copies: dict[str, tuple[dict[str, Tensor], int]] = {}

    def teacher_of(self, prompt: Prompt) -> str:
        """Who corrects this prompt."""
        return teacher_of(prompt, self.recipe.route, self.recipe.teachers, self.recipe.seed)

    def seconds(self) -> dict[str, float]:
        """Seconds of scoring of each teacher so far."""
        return {name: place.busy_s for name, place in self.staff.places.items()}

    @property
    def streams(self) -> bool:
        """Whether some teacher scores while the student still rolls out."""
        return len(self._colocated) < len(self.staff.places)

    async def stream(self, session: BatchRef, prompt: Prompt) -> None:
        """Score a finished session if its teacher has resources of its own, and write what it said."""
        name = session.tags[0].teacher
        assert name is not None
        if name in self._colocated or session.tags[0].is_baseline:
            return
        await self.correct(name, session, {key: prompt for key in session.keys})

    async def correct(self, name: str, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Have rows scored by a teacher that is awake, and write what it said."""
        columns = Columns("teachers", self.store.get(batch, self.plan["teachers"].reads))
        rows = self._rows(batch, columns, prompts)
        scores = await score_rows(self.staff.places[name], rows, self.wanted)
        for row, one in zip(rows, scores, strict=True):
            self._check_ids(name, row, one)
        self.store.put(batch, self._columns(scores), keep_tags=True)

    @stage("teachers")
    def score(self, batch: BatchRef, columns: Columns, *, prompts: Mapping[Key, Prompt]) -> dict[str, Column]:
        """Scores of rows by colocated teachers, each woken once and put to sleep whatever happens."""
        rows = self._rows(batch, columns, prompts)
        found: dict[int, Scores] = {}
        self.engine.sleep()
        try:
            for name, mine in _by_teacher(batch).items():
                with self.staff.residency.awake(name):
                    work = score_rows(self.staff.places[name], [rows[i] for i in mine], self.wanted)
                    scores = self._in_time(name, work, len(mine))
                found.update(zip(mine, scores, strict=True))
        finally:
            self.engine.wake()
        return self._columns([found[i] for i in range(len(batch))])

    def _in_time(self, name: str, work: Coroutine[Any, Any, list[Scores]], rows: int) -> list[Scores]:
        deadline = self.recipe.teachers[name].deadline_s
        try:
            return run_async(work, timeout=deadline, owner=f"teacher {name} ({rows} rows)")
        except DeadlineError as late:
            raise DeadlineError(f"{late}; if it is only slow, raise teachers.{name}.deadline_s") from late

    def refresh(self, step: int, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Before step `step`: copies of the student whose time has come take these weights."""
        for name, teacher in self.recipe.teachers.items():
            if name in self.staff.places and takes_new_weights(teacher, step):
                # A copy of our own: it is also what a checkpoint keeps of this teacher.
                copied = {key: x.cpu().clone() for key, x in weights().items()}
                self.give_weights(name, copied, version)
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
            if path.stem not in self.staff.places:
                continue
            self.give_weights(path.stem, *read_copy(path))
        self._forget_spent()

    def give_weights(self, name: str, weights: dict[str, Tensor], version: int) -> None:
        """Make a copy of the student what these weights are."""
        self._copies[name] = weights, version
        place = self.staff.places[name]
        assert isinstance(place, ColocatedTeacher | OwnTeacher | VllmTeacher)
        with self.staff.residency.awake(name) if name in self._colocated else nullcontext():
            place.take(weights, version)
            if name in self.staff.heads:
                self.renew_head(name, place.head())

    def renew_head(self, name: str, fresh: OutputHead) -> None:
        """Take a teacher's output head as it is now, if the learner has need of it."""
        if (head := self.staff.heads.get(name)) is not None:
            head.weight.copy_(fresh.weight)
            if head.bias is not None and fresh.bias is not None:
                head.bias.copy_(fresh.bias)

    def _forget_spent(self) -> None:
        """What was just done is no scoring of a step."""
        self._spent = self.seconds(), dict(self.staff.residency.wakes)

    def spent(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and wakes of each teacher since this was asked last."""
        seconds, wakes = self.seconds(), dict(self.staff.residency.wakes)
        before_s, before_w = self._spent
        self._spent = seconds, wakes
        return (
            {name: s - before_s.get(name, 0.0) for name, s in seconds.items()},
            {name: n - before_w.get(name, 0) for name, n in wakes.items()},
        )

    def _check_ids(self, name: str, row: ScoreRow, scores: Scores) -> None:
        """A server can't be told how many outputs count, so it may name tokens that the student lacks."""
        vocab, ids = self.wanted.vocab, scores.topk_ids
        if vocab is not None and ids is not None and ids.numel() and int(ids.max()) >= vocab:
            raise TeacherError(
                f"teacher {name} finds token {int(ids.max())} likely in {row.name}, and the student has "
                f"{vocab} outputs: load it here, without teachers.{name}.url: such tokens are left out"
            )

    def waiting(self, batch: BatchRef) -> BatchRef:
        """The rows that colocated teachers have yet to score."""
        return batch.where(lambda _, tags: tags.teacher in self._colocated)

    def _rows(self, batch: BatchRef, columns: Columns, prompts: Mapping[Key, Prompt]) -> list[ScoreRow]:
        ids = (columns.ragged(name).rows for name in ("prompt_ids", "response_ids"))
        rows = []
        for (key, tags), prompt, response, images in zip(batch, *ids, images_of(columns, batch), strict=True):
            assert tags.teacher is not None
            before = self._before(tags.teacher, prompts.get(key))
            ids = [*before, *prompt.tolist(), *response.tolist()]
            rows.append(ScoreRow(ids, len(ids) - response.shape[0], str(key), images))
        return rows

    def _before(self, name: str, prompt: Prompt | None) -> list[int]:
        teacher = self.recipe.teachers[name]
        if teacher.before is None:
            return []
        assert prompt is not None, "a row's prompt is remembered as long as the row is in the store"
        return self.tokenizer.encode(before_text(teacher, prompt), add_special_tokens=False)

    def _columns(self, scores: Sequence[Scores]) -> dict[str, Column]:
        columns: dict[str, Column] = {"teacher_logprobs": Ragged.from_rows([s.logprobs for s in scores])}
        if self.wanted.top_k:
            ids, best = zip(*(_top(s) for s in scores), strict=True)
            columns["teacher_topk_ids"] = Ragged.from_rows(ids)
            columns["teacher_topk_logprobs"] = Ragged.from_rows(best)
        if self.wanted.hidden:
            columns["teacher_hidden"] = Ragged.from_rows([_widened(s, self.staff.width) for s in scores])
        return columns


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


def _by_teacher(batch: BatchRef) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for i, tags in enumerate(batch.tags):
        assert tags.teacher is not None
        rows.setdefault(tags.teacher, []).append(i)
    return rows


def _top(scores: Scores) -> tuple[Tensor, Tensor]:
    assert scores.topk_ids is not None
    assert scores.topk_logprobs is not None
    return scores.topk_ids, scores.topk_logprobs


def _widened(scores: Scores, width: int) -> Tensor:
    assert scores.hidden is not None
    return pad(scores.hidden, (0, width - scores.hidden.shape[1]))

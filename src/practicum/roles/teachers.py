"""The teachers' role: score rows with their teachers, and write the scores.

Teachers in separate processes or on servers score each session as soon as it finishes. Colocated ones score
after the rollout: each with rows is woken once, while the student's engines sleep
(`RolloutRole.engines_asleep`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from practicum.algorithms.token_logprobs import logprobs_at, scaled_logits
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all, in_thread
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import SAME_TOKENS
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column, Columns, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.engines.protocol import GenerateRequest, ScoreOptions, ScoreRequest, Scores
from practicum.errors import TeacherError
from practicum.learning.learner import Learner
from practicum.learning.minibatches import spread_evenly
from practicum.learning.parallel import Parallel
from practicum.models.attention import OutputHead
from practicum.models.vision import images_of
from practicum.observe.records.recorder import NOT_RECORDED, Recorder
from practicum.recipe.schema.teacher_sections import Distill, Teacher
from practicum.roles.probe_teachers import PROBE_S, Questions, Replies, asks_of
from practicum.roles.run_stage import StepInfo, stage
from practicum.tasks.prompts import Prompt
from practicum.teachers.load_teachers import Teachers, top_k
from practicum.teachers.route import before_text
from practicum.teachers.shared_tokens import Alignment, SharedTokens
from practicum.teachers.teacher_scorer import TeacherScorer

T = TypeVar("T")
_WAKE_S = 60.0
"""Seconds for waking models, in addition to the deadlines of their rows."""
_ROUNDING = 0.01
"""Maximum |difference| in nats of two logprobs of one token."""


class TeacherRole:
    """Scores rows with their teachers, for one rollout at a time."""

    def __init__(
        self,
        distill: Distill,
        plan: Plan,
        store: Store,
        teachers: Teachers,
        tokenizer: PreTrainedTokenizerBase,
        *,
        temperature: float,
        vocab: int | None = None,
        shared: Mapping[str, SharedTokens] | None = None,
        parallel: Parallel | None = None,
        recorder: Recorder = NOT_RECORDED,
    ) -> None:
        """`shared` are the tokens that teachers with another tokenizer share with the student."""
        self.plan, self.store, self.recorder = plan, store, recorder
        self.loaded, self.tokenizer, self.shared = teachers, tokenizer, shared or {}
        self._by_match, self._by_top = distill.signal == "shared", distill.compares_top
        self.rank, self.ranks = (0, 1) if parallel is None else (parallel.rank, parallel.world)
        self.options = ScoreOptions(top_k(distill), distill.signal == "full", temperature, vocab)
        self._spent = self.seconds(), teachers.wakes
        self.stage_s = 2 * sum(scorer.spec.deadline_s for scorer in teachers.scorers.values()) + _WAKE_S
        self.student: Learner | None = None
        """The learner, for copies of the student. It is created after the teachers."""

    def seconds(self) -> dict[str, float]:
        return {name: scorer.busy_s for name, scorer in self.loaded.scorers.items()}

    def _rank_share(self, step: StepInfo) -> BatchRef:
        """Return this rank's share of the rows, balanced by tokens."""
        tokens = [tags.prompt_tokens + tags.response_tokens for tags in step.batch.tags]
        parts = spread_evenly(tokens, min(self.ranks, len(tokens)))
        return step.batch.take(sorted(parts[self.rank]) if self.rank < len(parts) else [])

    @stage("teachers", rows=_rank_share)
    async def score(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """Score rows model by model, waking each sleeping model once."""
        rows, aligned = self._rows(batch, columns, step.prompts)
        by_model: dict[str, list[tuple[int, str]]] = {}
        for i, name in rows:
            by_model.setdefault(self.loaded.scorers[name].model, []).append((i, name))
        scores: dict[tuple[int, str], Scores] = {}
        for asked in by_model.values():
            names = dict.fromkeys(name for _, name in asked)
            awake, teachers = self.loaded.awake(asked[0][1]), self.loaded.scorers
            with self.recorder.span("teachers", step.number, ", ".join(names), len(asked)):
                async with in_thread(awake):
                    wanted = (teachers[one[1]].score(rows[one], self._options(one[1])) for one in asked)
                    found = await gather_all(wanted)
            for one, score in zip(asked, found, strict=True):
                self._check(one[1], rows[one], score)
                scores[one] = score
        tops = self._tops(columns, len(batch))
        whole: list[Scores] = []
        responses = columns.ragged("response_ids").rows
        for i, (tags, response) in enumerate(zip(batch.tags, responses, strict=True)):
            name = tags.teacher or ""
            parts = [scores[i, part] for part in self.loaded.parts(name)]
            if name in self.loaded.targets:
                parts = [self._product(name, parts, response)]
            elif name in self.loaded.mixtures:
                parts = [mixed(parts, list(self.loaded.mixtures[name].values()))]
            elif (found := aligned.get(i)) is not None:
                parts = [self.shared[name].scores(found, parts[0], len(response), tops[i])]
            whole += parts
        columns_of = self._columns(whole)
        if self._by_match:
            matches = [torch.full_like(response, SAME_TOKENS) for response in responses]
            for i, found in aligned.items():
                matches[i] = self.shared[batch.tags[i].teacher or ""].match(found, responses[i].tolist())
            columns_of["teacher_match"] = Ragged.from_rows(matches)
        return columns_of

    def _product(self, name: str, parts: Sequence[Scores], response_R: Tensor) -> Scores:
        """Return the scores of a row whose teacher's target is a product of these."""
        hidden_RH = torch.cat([score.hidden for score in parts if score.hidden is not None], dim=1)
        own_RV = self.loaded.head(name)(hidden_RH.to(self.loaded.heads[name].weight.device))
        scaled_RV = scaled_logits(own_RV, self.options.temperature)
        logprobs_R = logprobs_at(scaled_RV, response_R.to(scaled_RV.device).unsqueeze(1)).squeeze(1).cpu()
        return replace(parts[0], logprobs=logprobs_R, hidden=hidden_RH)

    def logprobs_by(self, name: str, batch: BatchRef, columns: Columns, step: StepInfo) -> Ragged:
        """Return a teacher's logprobs of any rows' tokens, for custom stages."""
        tags = tuple(replace(tags, teacher=name) for tags in batch.tags)
        asked, aligned = self._rows(replace(batch, tags=tags), columns, step.prompts, tops=False)
        if aligned:
            raise TeacherError(f"teacher {name} has another tokenizer: a stage can't ask it for logprobs")
        rows, options = asked.values(), replace(self.options, top_k=0, hidden=False)
        scores = self._ask(name, lambda teacher: (teacher.score(row, options) for row in rows))
        return Ragged.from_rows([score.logprobs for score in scores])

    def answers_by(self, name: str, requests: Sequence[GenerateRequest]) -> list[list[int]]:
        """Sample responses of a teacher, for custom stages."""
        answers = self._ask(name, lambda teacher: (teacher.generate(request) for request in requests))
        return [answer.tokens.tolist() for answer in answers]

    def _ask(self, name: str, work: Callable[[TeacherScorer], Iterable[Coroutine[Any, Any, T]]]) -> list[T]:
        """Run work on a teacher outside of its stage, and wait for it."""
        if name not in self.loaded.scorers or name in {**self.loaded.targets, **self.loaded.mixtures}:
            raise TeacherError(f"stages can use colocated teachers without a target only, not {name}")

        async def ask() -> list[T]:
            async with in_thread(self.loaded.awake(name)):
                return await gather_all(work(self.loaded.scorers[name]))

        return run_async(ask(), timeout=self.stage_s, owner=f"teacher {name}")

    def ask(self, name: str, questions: Questions) -> Replies:
        """Return a teacher's replies to the probe before the first step."""
        work = asks_of(self.loaded)[name](questions)
        return run_async(work, timeout=PROBE_S, owner=f"the probe of teacher {name}")

    def refresh(self, step: int) -> None:
        """Load the student's weights into the copies that are updated before step `step`."""
        for name, scorer in self.loaded.scorers.items():
            if takes_new_weights(scorer.spec, step):
                assert self.student is not None
                # Cloned, because checkpoints save these weights too.
                copied = {key: x.cpu().clone() for key, x in self.student.named_weights()}
                self.take(name, copied, self.student.version)
                self.spent()  # not the scoring of a step

    def save(self, folder: Path) -> None:
        """Write the copies of the student that have been updated."""
        for name, scorer in self.loaded.scorers.items():
            if scorer.held is not None and scorer.held.weights is not None:
                folder.mkdir(parents=True, exist_ok=True)
                contiguous = {key: x.contiguous() for key, x in scorer.held.weights.items()}
                metadata = {"version": str(scorer.held.version)}
                save_file(contiguous, folder / f"{name}.safetensors", metadata=metadata)

    def load(self, folder: Path) -> None:
        """Load the copies that `save` wrote."""
        for path in sorted(folder.glob("*.safetensors")):
            if path.stem in self.loaded.scorers:
                self.take(path.stem, *read_copy(path))
        self.spent()  # not the scoring of a step

    def take(self, name: str, weights: dict[str, Tensor], version: int) -> None:
        """Load these weights into a copy of the student."""
        with self.loaded.awake(name):
            self.loaded.scorers[name].take(weights, version)
            if name in self.loaded.heads:
                self.renew_head(name, self.loaded.scorers[name].scorers[0].head())

    def renew_head(self, name: str, fresh: OutputHead) -> None:
        """Update a teacher's output head if the learner needs it."""
        if (head := self.loaded.heads.get(name)) is not None:
            head.weight.copy_(fresh.weight)
            if head.bias is not None and fresh.bias is not None:
                head.bias.copy_(fresh.bias)

    def spent(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds and wake-ups of each teacher since the last call."""
        seconds, wakes = self.seconds(), self.loaded.wakes
        before_s, before_w = self._spent
        self._spent = seconds, wakes
        return (
            {name: s - before_s.get(name, 0.0) for name, s in seconds.items()},
            {name: n - before_w.get(name, 0) for name, n in wakes.items()},
        )

    def _check(self, name: str, row: ScoreRequest, scores: Scores) -> None:
        """Check that likely tokens are the student's, and that a token has one logprob at its position."""
        ids_RK, best_RK, vocab = scores.topk_ids, scores.topk_logprobs, self.options.vocab
        if ids_RK is None or best_RK is None or not ids_RK.numel():
            return
        vocab = None if name in self.shared else vocab  # servers do not know the student's vocabulary
        if vocab is not None and int(ids_RK.max()) >= vocab:
            raise TeacherError(
                f"teacher {name} returned token {int(ids_RK.max())} for {row.name}, but the student has "
                f"{vocab} outputs: load it locally, which excludes such tokens, without teachers.{name}.url"
            )
        own_RK = ids_RK == torch.tensor(row.ids[row.start :]).unsqueeze(1)
        apart_RK = (best_RK - scores.logprobs.unsqueeze(1)).abs().masked_fill(~own_RK, 0.0)
        if not float(apart_RK.max()) <= _ROUNDING:
            at = int(apart_RK.amax(1).argmax())
            raise TeacherError(
                f"teacher {name} returned inconsistent logprobs for token {at} of the response of "
                f"{row.name}: {float(scores.logprobs[at]):.4g}, and in its top-k a value that differs by "
                f"{float(apart_RK.max()):.3g}. Its scores are misaligned with the tokens"
            )

    def _rows(
        self, batch: BatchRef, columns: Columns, prompts: Mapping[Key, Prompt], *, tops: bool = True
    ) -> tuple[dict[tuple[int, str], ScoreRequest], dict[int, Alignment]]:
        """Return the requests to each teacher (parts of a product too) for each row, and rows' alignments."""
        top_rows = self._tops(columns, len(batch)) if tops else [None] * len(batch)
        aligned: dict[int, Alignment] = {}
        ids = (columns.ragged(name).rows for name in ("prompt_ids", "response_ids"))
        pictures = images_of(columns) if "multi_modal_inputs" in columns else [None] * len(batch)
        rows = {}
        for i, ((key, tags), prompt, response, images) in enumerate(zip(batch, *ids, pictures, strict=True)):
            for name in self.loaded.parts(tags.teacher or ""):
                teacher, before, text = self.loaded.scorers[name].spec, [], ""
                if teacher.prompt_prefix is not None:
                    text = before_text(teacher, prompts[key])
                    before = self.tokenizer.encode(text, add_special_tokens=False)
                if (shared := self.shared.get(name)) is not None:
                    found = shared.request(prompts[key], text, response.tolist(), top_rows[i], str(key))
                    rows[i, name], aligned[i] = found
                    continue
                sequence = [*before, *prompt.tolist(), *response.tolist()]
                start = len(sequence) - response.shape[0]
                support = None if self._by_match else top_rows[i]
                rows[i, name] = ScoreRequest(sequence, start, str(key), images, support=support)
        return rows, aligned

    def _tops(self, columns: Columns, count: int) -> Sequence[Tensor | None]:
        """Return the student's most likely tokens of each row, if they are compared."""
        return columns.ragged("rollout_topk_ids").rows if "rollout_topk_ids" in columns else [None] * count

    def _options(self, name: str) -> ScoreOptions:
        """Return the options of a request to a teacher. A teacher with another tokenizer has none."""
        return replace(self.options, top_k=0, vocab=None) if name in self.shared else self.options

    def _columns(self, scores: Sequence[Scores]) -> dict[str, Column]:
        def rows(tensors: Iterable[Tensor | None]) -> Ragged:
            return Ragged.from_rows([tensor for tensor in tensors if tensor is not None])

        columns: dict[str, Column] = {"teacher_logprobs": rows(s.logprobs for s in scores)}
        if self._by_top:
            columns["teacher_topk_ids"] = rows(s.topk_ids for s in scores)
            columns["teacher_topk_logprobs"] = rows(s.topk_logprobs for s in scores)
        if self.options.hidden:
            hidden, width = [s.hidden for s in scores if s.hidden is not None], self.loaded.width
            columns["teacher_hidden"] = rows(pad(x, (0, width - x.shape[1])) for x in hidden)
        return columns


def mixed(parts: Sequence[Scores], weights: Sequence[float]) -> Scores:
    """Return the scores of a mixture of teachers' distributions: the same tokens, scored by each."""

    def mix(logprobs: Sequence[Tensor]) -> Tensor:
        logs = torch.tensor(weights, dtype=torch.float64).log()
        terms = [x.double() + log for x, log in zip(logprobs, logs, strict=True)]
        return torch.stack(terms).logsumexp(0).to(logprobs[0].dtype)

    tops = [score.topk_logprobs for score in parts if score.topk_logprobs is not None]
    best_RK = mix(tops) if tops else None
    return replace(parts[0], logprobs=mix([score.logprobs for score in parts]), topk_logprobs=best_RK)


def prompts_read(
    teachers: Mapping[str, Teacher], batch: BatchRef, prompts: Mapping[Key, Prompt], *, whole: bool
) -> dict[Key, Prompt]:
    """Return the prompts of rows whose teachers read more than the prompt's tokens, or of all rows."""
    reads = {
        name
        for name, teacher in teachers.items()
        for part in (name, *(teacher.target or ()), *(teacher.mixture or ()))
        if whole or teachers[part].prompt_prefix is not None
    }
    return {key: prompts[key] for key, tags in batch if tags.teacher in reads}


def read_copy(path: Path) -> tuple[dict[str, Tensor], int]:
    """Return the weights in a file that `TeacherRole.save` wrote, and their version."""
    with safe_open(path, "pt") as file:
        version = int(file.metadata()["version"])
    return load_file(path), version


def takes_new_weights(teacher: Teacher, step: int) -> bool:
    """Return True if a copy of the student is updated before this step."""
    every = teacher.student.every if teacher.student is not None else 0
    return bool(every) and step > 1 and (step - 1) % every == 0

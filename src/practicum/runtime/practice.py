"""The rollout role: runs sessions on an engine, writes their rows, judges them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.plan import Plan
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stage import Columns, stage
from practicum.dataplane.store import Store
from practicum.errors import PracticumError
from practicum.recipe.schema import Recipe
from practicum.recipe.ways import uses_reward
from practicum.rollout.loops import find_loop
from practicum.rollout.protocol import Engine, Sampling
from practicum.rollout.session import Session, Trajectory, require_trajectories
from practicum.rollout.together import together
from practicum.runtime.events import run_async
from practicum.runtime.faculty import Faculty
from practicum.runtime.jury import Jury
from practicum.tasks.prompts import Prompt, demonstration, encode_prompt
from practicum.tasks.rewards import Judge, RewardSample
from practicum.teachers.place import OpenTime


@dataclass(frozen=True, slots=True)
class Attempt:
    """One session to run: which prompt, which of its sessions, drawn how."""

    prompt: Prompt
    session: int
    sampling: Sampling
    is_baseline: bool = False


class Practice:
    """Rolls out and judges: one for training, one for evaluation, over one engine."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        judge: Judge,
        faculty: Faculty | None = None,
        jury: Jury | None = None,
    ) -> None:
        self.recipe, self.plan, self.store = recipe, plan, store
        self.engine, self.tokenizer, self.judge = engine, tokenizer, judge
        self.faculty, self.jury = faculty, jury
        self._streams = OpenTime()
        self._tail_s = self._streamed_s = 0.0
        assert isinstance(tokenizer.eos_token_id, int)
        self.end_id = tokenizer.eos_token_id
        self.prompts: dict[Key, Prompt] = {}
        self._loop = find_loop(recipe.rollout.loop)
        self._last_sample = 0.0

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens, by its task's chat settings."""
        task = self.recipe.tasks[prompt.task]
        return encode_prompt(prompt, self.tokenizer, chat=task.chat, system=task.system)

    def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write each prompt with its answer as the response: rows for supervised training."""
        rows = [self._demonstration(prompt) for prompt in prompts]
        return self._put(partition, rows, self.plan["demonstrate"].writes)

    def rollout(self, attempts: Sequence[Attempt], partition: str, *, seed: int) -> BatchRef:
        """Run sessions at once; a row is in the store as soon as its session is done."""
        encoded = {a.prompt.uid: self.encode(a.prompt) for a in attempts}
        before = self._streams.seconds
        self._last_sample = time.perf_counter()
        work = self._run_all(attempts, encoded, partition, seed)
        run_async(work, timeout=self.recipe.rollout.deadline_s, owner=f"rollout ({partition})")
        self._tail_s += time.perf_counter() - self._last_sample
        self._streamed_s += self._streams.seconds - before
        wanted = {(a.prompt.uid, a.session) for a in attempts}
        rows = self.store.batch(partition)
        # Sessions finish in any order; the batch is in the order of its keys.
        chosen = sorted((i for i, k in enumerate(rows.keys) if k[:2] in wanted), key=rows.keys.__getitem__)
        return rows.take(chosen)

    async def _run_all(
        self, attempts: Sequence[Attempt], encoded: dict[int, list[int]], partition: str, seed: int
    ) -> None:
        await together(self._run(a, encoded[a.prompt.uid], partition, seed) for a in attempts)

    async def _run(self, attempt: Attempt, ids: list[int], partition: str, seed: int) -> None:
        prompt = attempt.prompt
        session = Session(prompt, ids, attempt.session, self.engine, attempt.sampling, self.tokenizer, seed)
        name = self.recipe.rollout.loop
        try:
            trajectories = require_trajectories(await self._loop(session), name)
        except PracticumError:
            raise
        except (Exception, SystemExit) as error:
            raise PracticumError(
                f"agent loop {name} raised {type(error).__name__} on prompt {prompt.uid} "
                f"(task {prompt.task}, row {prompt.index}): {error}"
            ) from error
        self._last_sample = time.perf_counter()
        rows = [
            (Key(prompt.uid, attempt.session, i), self._tags(prompt, t, attempt), t, prompt)
            for i, t in enumerate(trajectories)
        ]
        batch = self._put(partition, rows, self.plan["rollout"].writes)
        streams = [] if self.faculty is None else [self.faculty.stream(batch, prompt)]
        if self.jury is not None:
            answer = session.text(trajectories[-1])
            streams.append(self.jury.stream(self.jury.case(batch.keys[-1], prompt, answer)))
        streamed = any(role is not None and role.streams for role in (self.faculty, self.jury))
        with self._streams.work() if streamed else nullcontext():
            await together(streams)

    def _tags(self, prompt: Prompt, trajectory: Trajectory, attempt: Attempt | None) -> Tags:
        pieces = trajectory.pieces
        return Tags(
            prompt_tokens=len(trajectory.prompt_ids),
            response_tokens=sum(len(piece.ids) for piece in pieces),
            sampled_tokens=sum(len(piece.ids) for piece in pieces if piece.sampled),
            version_min=trajectory.version_min or 0,
            version_max=trajectory.version_max,
            domain=prompt.domain,
            task=prompt.task,
            teacher=None if self.faculty is None else self.faculty.teacher_of(prompt),
            finish=trajectory.finish,
            is_baseline=attempt is not None and attempt.is_baseline,
        )

    def take_hidden_share(self) -> float | None:
        """Of the time in which finished sessions were scored or judged by models with resources of their own,
        the share that other sessions still rolled out; since this was asked last. None if there was none."""
        tail, whole = self._tail_s, self._streamed_s
        self._tail_s = self._streamed_s = 0.0
        return 1.0 - min(1.0, tail / whole) if whole else None

    def _demonstration(self, prompt: Prompt) -> tuple[Key, Tags, Trajectory, Prompt]:
        ids = self.tokenizer.encode(demonstration(prompt), add_special_tokens=False)
        trajectory = Trajectory(self.encode(prompt))
        trajectory.add_demonstration([*ids, self.end_id])
        return Key(prompt.uid), self._tags(prompt, trajectory, None), trajectory, prompt

    def _put(
        self,
        partition: str,
        rows: Sequence[tuple[Key, Tags, Trajectory, Prompt]],
        fields: Sequence[str],
    ) -> BatchRef:
        batch = BatchRef(partition, tuple(r[0] for r in rows), tuple(r[1] for r in rows))
        columns = [trajectory.columns() for _, _, trajectory, _ in rows]
        self.store.put(batch, {f: Ragged.from_rows([c[f] for c in columns]) for f in fields})
        self.prompts.update((key, prompt) for key, _, _, prompt in rows)
        return batch

    @stage("reward")
    def reward(self, batch: BatchRef, columns: Columns) -> tuple[dict[str, Column], dict[str, list[float]]]:
        """Judge each session once; a session that can't be judged is marked failed, not scored zero.

        Returns the scores of each reward function and model, for metrics.
        """
        prompt_ids, response_ids = columns.ragged("prompt_ids"), columns.ragged("response_ids")
        mask = columns.ragged("response_mask")
        sessions: dict[tuple[int, int], int] = {}
        for i, key in enumerate(batch.keys):  # the last trajectory of a session holds its answer
            sessions[key.prompt, key.session] = i
        samples = [self._sample(batch, i, prompt_ids[i], response_ids[i][mask[i]]) for i in sessions.values()]
        judged = run_async(self.judge.score(samples), timeout=self.recipe.rollout.deadline_s, owner="reward")
        if self.jury is not None:
            jury, keys = self.jury, [batch.keys[i] for i in sessions.values()]
            shown = zip(keys, samples, strict=True)
            cases = [jury.case(key, self.prompts[key], sample.response_text) for key, sample in shown]
            judged = jury.add(judged, cases)
        verdicts = dict(zip(sessions, judged, strict=True))
        rewards, tags = torch.zeros(len(batch)), {}
        for i, (key, tag) in enumerate(batch):
            verdict = verdicts[key.prompt, key.session]
            # A judgement that nothing is learnt from does not take a row away from the teachers.
            failed = verdict.reward is None and uses_reward(self.recipe)
            rewards[i] = torch.nan if verdict.reward is None else verdict.reward
            tags[key] = replace(
                tag,
                reward=verdict.reward,
                status="failed" if failed else tag.status,
                failure=verdict.failure if failed else tag.failure,
            )
        self.store.tag(batch.partition, tags)
        parts: dict[str, list[float]] = {}
        for row, verdict in zip(sessions.values(), judged, strict=True):
            if verdict.reward is None or batch.tags[row].is_baseline:
                continue
            for name, value in verdict.parts.items():
                parts.setdefault(name, []).append(value)
        return {"reward": rewards}, parts

    def _sample(
        self, batch: BatchRef, i: int, prompt_ids: torch.Tensor, response_ids: torch.Tensor
    ) -> RewardSample:
        key, tags = batch.keys[i], batch.tags[i]
        prompt = self.prompts[key]
        return RewardSample(
            prompt_text=str(self.tokenizer.decode(prompt_ids, skip_special_tokens=True)),
            response_text=str(self.tokenizer.decode(response_ids, skip_special_tokens=True)),
            answer=prompt.answer,
            row=prompt.row,
            task=prompt.task,
            domain=prompt.domain,
            finish=tags.finish,
            key=str(key),
            response_tokens=tags.response_tokens,
        )

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what is remembered of rows that leave the store."""
        for key in keys:
            self.prompts.pop(key, None)
            if self.jury is not None:
                self.jury.forget([key])

"""The rollout role in this process: runs sessions, and hands them on to judges and teachers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.concurrency.open_time import OpenTime
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.roles.reward import RewardRole
from practicum.roles.reward_models import RewardModelRole
from practicum.roles.session_runner import SessionRow, SessionRunner
from practicum.roles.teachers import TeacherRole
from practicum.sessions.attempts import Attempt
from practicum.sessions.session import SessionStart
from practicum.tasks.prompts import Prompt


class RolloutRole:
    """Rolls out and judges: one for training, one for evaluation, over one engine."""

    def __init__(
        self, sessions: SessionRunner, faculty: TeacherRole | None = None, jury: RewardModelRole | None = None
    ) -> None:
        self.sessions, self.faculty = sessions, faculty
        self.recipe, self.plan, self.store = sessions.recipe, sessions.plan, sessions.store
        self.prompts: dict[Key, Prompt] = {}
        self._openings: dict[int, list[int]] = {}
        self.judging = RewardRole(
            self.recipe,
            self.plan,
            self.store,
            sessions.tokenizer,
            sessions.judge,
            jury,
            self.prompts,
            lambda prompt: self._openings[prompt.uid],
        )
        self._streams = OpenTime()
        self._tail_s = self._streamed_s = 0.0
        self._last_sample = 0.0

    def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write what an expert does with each prompt: rows for supervised training."""
        work = gather_all(self.sessions.demonstrate(prompt) for prompt in prompts)
        found = run_async(work, timeout=self.recipe.rollout.deadline_s, owner="demonstrations")
        for prompt, rows in zip(prompts, found, strict=True):
            self._remember(rows, prompt)
        rows = [row for rows in found for row in rows]
        return self.sessions.put(partition, rows, self.plan["demonstrate"].writes)

    def rollout(self, attempts: Sequence[Attempt], partition: str, *, seed: int) -> BatchRef:
        """Run sessions at once; a session's rows are in the store as soon as it is done, failed ones too."""
        prompts = {a.prompt.uid: a.prompt for a in attempts}
        starts = {uid: self.sessions.start(prompt) for uid, prompt in prompts.items()}
        self._openings.clear()
        self._openings.update((uid, start.ids) for uid, start in starts.items())
        before = self._streams.seconds
        self._last_sample = time.perf_counter()
        work = gather_all(self._run(a, starts[a.prompt.uid], partition, seed) for a in attempts)
        run_async(work, timeout=self.recipe.rollout.deadline_s, owner=f"rollout ({partition})")
        self._tail_s += time.perf_counter() - self._last_sample
        self._streamed_s += self._streams.seconds - before
        wanted = {(a.prompt.uid, a.session) for a in attempts}
        rows = self.store.batch(partition)
        # Sessions finish in any order; the batch is in the order of its keys.
        chosen = sorted((i for i, k in enumerate(rows.keys) if k[:2] in wanted), key=rows.keys.__getitem__)
        return rows.take(chosen)

    async def _run(self, attempt: Attempt, start: SessionStart, partition: str, seed: int) -> None:
        rows = await self.sessions.run(attempt, start, seed)
        self._last_sample = time.perf_counter()
        self._remember(rows, attempt.prompt)
        batch = self.sessions.put(partition, rows, self.plan["rollout"].writes)
        if batch.tags[0].status == "failed":
            return
        streams = [self.judging.stream(batch)] if self.judging.streams(batch) else []
        if self.faculty is not None:
            streams.append(self.faculty.stream(batch, attempt.prompt))
        streamed = self.judging.has_models or (self.faculty is not None and self.faculty.streams)
        with self._streams.work() if streamed else nullcontext():
            if streams:
                await gather_all(streams)

    def _remember(self, rows: Sequence[SessionRow], prompt: Prompt) -> None:
        self.prompts.update((row.key, prompt) for row in rows)

    def reward(self, batch: BatchRef) -> dict[str, list[float]]:
        """Judge finished sessions; gives the scores of each reward function and model, for metrics."""
        return self.judging.reward(batch) or {}

    def take_hidden_share(self) -> float | None:
        """Of the time in which finished sessions were scored or judged by models with resources of their own,
        the share that other sessions still rolled out; since this was asked last. None if there was none."""
        tail, whole = self._tail_s, self._streamed_s
        self._tail_s = self._streamed_s = 0.0
        return 1.0 - min(1.0, tail / whole) if whole else None

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what is remembered of rows that leave the store."""
        keys = list(keys)
        for key in keys:
            self.prompts.pop(key, None)
        self.judging.forget(keys)

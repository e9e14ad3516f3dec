"""The rollout role: runs sessions on an engine, writes their rows, hands them on to judges and teachers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.padding import padding_batch
from practicum.dataplane.plan import SIGHT, Plan
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.store import Store
from practicum.errors import PracticumError
from practicum.models.vision import sequence_positions
from practicum.recipe.schema import Recipe
from practicum.recipe.ways import session_deadline
from practicum.rollout.encoder import Encoder
from practicum.rollout.loops import find_loop
from practicum.rollout.policies import EnginePolicy, ExpertPolicy, Policy
from practicum.rollout.protocol import Engine, Sampling
from practicum.rollout.session import Session, Start
from practicum.rollout.together import together
from practicum.rollout.tools.toolbox import Toolbox
from practicum.rollout.trajectory import Trajectory
from practicum.runtime.attempts import Attempt, Ended, run_attempt
from practicum.runtime.events import run_async
from practicum.runtime.experts import make_expert
from practicum.runtime.faculty import Faculty
from practicum.runtime.judging import Judging
from practicum.runtime.jury import Jury
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import Judge, RewardSample
from practicum.teachers.place import OpenTime

Rows = Sequence[tuple[Key, Tags, Trajectory, Prompt]]


class Practice:
    """Rolls out and judges: one for training, one for evaluation, over one engine."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        engine: Engine,
        encoder: Encoder,
        judge: Judge,
        toolbox: Toolbox,
        *,
        context: int,
        config: Any,
        widths: Mapping[str, int],
        faculty: Faculty | None = None,
        jury: Jury | None = None,
    ) -> None:
        self.recipe, self.plan, self.store = recipe, plan, store
        self.encoder, self.judge, self.toolbox = encoder, judge, toolbox
        self.tokenizer = tokenizer = encoder.tokenizer
        self.context, self.config, self.widths, self.faculty = context, config, widths, faculty
        self.prompts: dict[Key, Prompt] = {}
        self._openings: dict[int, list[int]] = {}
        self.judging = Judging(recipe, plan, store, tokenizer, judge, jury, self.prompts, self._openings)
        self._policy = EnginePolicy(engine, keep=recipe.agent.loop != "single_turn")
        self._streams = OpenTime()
        self._tail_s = self._streamed_s = 0.0
        assert isinstance(tokenizer.eos_token_id, int)
        self.end_id = tokenizer.eos_token_id
        self._loop = find_loop(recipe.agent.loop)
        self._last_sample = 0.0

    def start(self, prompt: Prompt) -> Start:
        """The prompt as the model gets it."""
        encoded = self.encoder(prompt)
        return Start(encoded.ids, encoded.images, encoded.messages, self.encoder.tools)

    def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write what an expert does with each prompt in the agent's loop: rows for supervised training."""
        sampling = Sampling(max_new_tokens=self.context, stop=frozenset({self.end_id}))
        policy = ExpertPolicy(make_expert(self.recipe.agent, self.toolbox), self.tokenizer)

        async def shown(prompt: Prompt) -> Rows:
            ended = await self._attempt(Attempt(prompt, 0, sampling), self.start(prompt), policy, 0)
            if ended.result is None:
                raise PracticumError(f"{prompt} can't be demonstrated: {ended.failure}")
            return self._rows(Attempt(prompt, 0, sampling), ended)

        work = together(shown(prompt) for prompt in prompts)
        found = run_async(work, timeout=self.recipe.rollout.deadline_s, owner="demonstrations")
        return self._put(partition, [row for rows in found for row in rows], self.plan["demonstrate"].writes)

    def rollout(self, attempts: Sequence[Attempt], partition: str, *, seed: int) -> BatchRef:
        """Run sessions at once; a session's rows are in the store as soon as it is done, failed ones too."""
        starts = {a.prompt.uid: self.start(a.prompt) for a in {a.prompt.uid: a for a in attempts}.values()}
        self._openings.clear()
        self._openings.update((uid, start.ids) for uid, start in starts.items())
        before = self._streams.seconds
        self._last_sample = time.perf_counter()
        work = together(self._run(a, starts[a.prompt.uid], partition, seed) for a in attempts)
        run_async(work, timeout=self.recipe.rollout.deadline_s, owner=f"rollout ({partition})")
        self._tail_s += time.perf_counter() - self._last_sample
        self._streamed_s += self._streams.seconds - before
        wanted = {(a.prompt.uid, a.session) for a in attempts}
        rows = self.store.batch(partition)
        # Sessions finish in any order; the batch is in the order of its keys.
        chosen = sorted((i for i, k in enumerate(rows.keys) if k[:2] in wanted), key=rows.keys.__getitem__)
        return rows.take(chosen)

    async def _run(self, attempt: Attempt, start: Start, partition: str, seed: int) -> None:
        ended = await self._attempt(attempt, start, self._policy, seed)
        self._last_sample = time.perf_counter()
        if ended.result is None:
            self._put_failed(attempt, ended, partition)
            return
        batch = self._put(partition, self._rows(attempt, ended), self.plan["rollout"].writes)
        streams = [self.judging.stream(batch)] if self.judging.streams(batch) else []
        if self.faculty is not None:
            streams.append(self.faculty.stream(batch, attempt.prompt))
        streamed = self.judging.has_models or (self.faculty is not None and self.faculty.streams)
        with self._streams.work() if streamed else nullcontext():
            if streams:
                await together(streams)

    async def _attempt(self, attempt: Attempt, start: Start, policy: Policy, seed: int) -> Ended:
        def make(number: int) -> Session:
            return Session(
                attempt.prompt,
                start,
                attempt.session,
                policy,
                attempt.sampling,
                self.tokenizer,
                context=self.context,
                agent=self.recipe.agent,
                toolbox=self.toolbox,
                check=self._checker(attempt.prompt),
                seed=seed,
                attempt=number,
            )

        return await run_attempt(self._loop, self.recipe.agent, make, session_deadline(self.recipe))

    def _checker(self, prompt: Prompt) -> Callable[[str], float]:
        """What the task's checker says of a text."""

        def check(text: str) -> float:
            known = (prompt.answer, prompt.row, prompt.task, prompt.domain)
            return self.judge.check(
                RewardSample("", text, *known, finish="", key=str(prompt), response_tokens=0)
            )

        return check

    def _rows(self, attempt: Attempt, ended: Ended) -> Rows:
        assert ended.result is not None
        prompt = attempt.prompt
        found = zip(ended.result.trajectories, ended.result.row_rewards(), strict=True)
        return [
            (Key(prompt.uid, attempt.session, i), self._tags(attempt, ended, t, reward), t, prompt)
            for i, (t, reward) in enumerate(found)
        ]

    def _tags(self, attempt: Attempt, ended: Ended, trajectory: Trajectory, reward: float | None) -> Tags:
        prompt, pieces = attempt.prompt, trajectory.pieces
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
            turns=trajectory.turns,
            tool_calls=trajectory.tool_calls,
            tool_errors=trajectory.tool_errors,
            breaks=trajectory.breaks,
            retries=ended.retries,
            given_reward=reward,
            is_baseline=attempt.is_baseline,
        )

    def _put_failed(self, attempt: Attempt, ended: Ended, partition: str) -> None:
        """A failed session is a row without fields: seen and counted, never trained on."""
        prompt = attempt.prompt
        tags = Tags(
            status="failed",
            failure=ended.failure,
            domain=prompt.domain,
            task=prompt.task,
            retries=ended.retries,
            is_baseline=attempt.is_baseline,
        )
        key = Key(prompt.uid, attempt.session)
        self.prompts[key] = prompt
        self.store.put(BatchRef(partition, (key,), (tags,)), {})

    def take_hidden_share(self) -> float | None:
        """Of the time in which finished sessions were scored or judged by models with resources of their own,
        the share that other sessions still rolled out; since this was asked last. None if there was none."""
        tail, whole = self._tail_s, self._streamed_s
        self._tail_s = self._streamed_s = 0.0
        return 1.0 - min(1.0, tail / whole) if whole else None

    def _put(self, partition: str, rows: Rows, fields: Sequence[str]) -> BatchRef:
        batch = BatchRef(partition, tuple(r[0] for r in rows), tuple(r[1] for r in rows))
        trajectories = [trajectory for _, _, trajectory, _ in rows]
        columns = [trajectory.columns() for trajectory in trajectories]
        put: dict[str, Column] = {
            f: Ragged.from_rows([c[f] for c in columns]) for f in fields if f not in SIGHT
        }
        if set(SIGHT) <= set(fields):
            pictures = [t.images for t in trajectories]
            put["multi_modal_inputs"] = [{} if one is None else one.as_inputs() for one in pictures]
            places = [sequence_positions(self.config, t.ids(), t.images) for t in trajectories]
            put["position_ids"] = Ragged.from_rows(places)
        self.prompts.update((key, prompt) for key, _, _, prompt in rows)
        self.store.put(batch, put)
        return batch

    def pad(self, partition: str, count: int) -> BatchRef:
        """Write `count` rows that do nothing, in one put, with every field that this plan's stages write."""
        fields = padding_fields(self.plan)
        batch, columns = padding_batch(partition, count, fields, end_id=self.end_id, widths=self.widths)
        self.store.put(batch, columns)
        return batch

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what is remembered of rows that leave the store."""
        keys = list(keys)
        for key in keys:
            self.prompts.pop(key, None)
        self.judging.forget(keys)


def padding_fields(plan: Plan) -> list[str]:
    """The fields of a padding row: all that a stage of the plan writes."""
    return list(dict.fromkeys(name for stage in plan for name in stage.writes))

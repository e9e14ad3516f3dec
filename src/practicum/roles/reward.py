"""The reward role: judges sessions, as they finish where that is possible, and places what they earned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.plan import Plan
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stage import Columns, stage
from practicum.dataplane.store import Store
from practicum.recipe.derived import uses_reward
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.reward_models import RewardModelRole
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions, RewardResult, RewardSample

SessionName = tuple[int, int]
LOOP = "loop"
"""The name in metrics of rewards that the agent's loop gave itself."""


class RewardRole:
    """Judges sessions by the recipe's functions and models; a loop's own reward stands as it is."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        judge: RewardFunctions,
        jury: RewardModelRole | None,
        prompts: Mapping[Key, Prompt],
        opening: Callable[[Prompt], list[int]],
    ) -> None:
        """`opening` gives the tokens of a prompt, without the tokens of an answer."""
        self.recipe, self.plan, self.store, self.tokenizer = recipe, plan, store, tokenizer
        self.judge, self.jury, self._prompts, self._opening = judge, jury, prompts, opening
        self._said: dict[SessionName, RewardResult] = {}

    @property
    def has_models(self) -> bool:
        """Whether models with resources of their own judge while others roll out."""
        return self.jury is not None and self.jury.streams

    def streams(self, session: BatchRef) -> bool:
        """Whether a finished session is to be judged while others still roll out."""
        if "reward" not in self.plan or session.tags[0].given_reward is not None:
            return False
        return self.jury is not None or self.judge.streams(session.tags[0].task)

    async def stream(self, session: BatchRef) -> None:
        """Judge a finished session, as far as that is possible now."""
        columns = Columns("reward", self.store.get(session, self.plan["reward"].reads))
        sample = self._sample(session, columns, range(len(session)))
        name, works = session.keys[0][:2], []
        if self.judge.streams(sample.task):
            works.append(self._judge(name, sample))
        if self.jury is not None:
            case = self.jury.case(session.keys[-1], self._prompts[session.keys[-1]], sample.response_text)
            works.append(self.jury.stream(case))
        await gather_all(works)

    async def _judge(self, name: SessionName, sample: RewardSample) -> None:
        self._said[name] = await self.judge.judge(sample)

    @stage("reward")
    def reward(self, batch: BatchRef, columns: Columns) -> tuple[dict[str, Column], dict[str, list[float]]]:
        """Judge each session once; a session that can't be judged is marked failed, not scored zero.

        Returns the scores of each reward function and model, for metrics.
        """
        sessions: dict[SessionName, list[int]] = {}
        for i, key in enumerate(batch.keys):
            sessions.setdefault(key[:2], []).append(i)
        verdicts = self._verdicts(batch, columns, sessions)
        rewards_B, placed_B, tags = torch.zeros(len(batch)), torch.zeros(len(batch)), {}
        parts: dict[str, list[float]] = {}
        for name, rows in sessions.items():
            verdict = verdicts[name]
            # A judgement that nothing is learnt from does not take a row away from the teachers.
            failed = verdict.reward is None and uses_reward(self.recipe)
            for i in rows:
                rewards_B[i] = torch.nan if verdict.reward is None else verdict.reward
                status = {"status": "failed", "failure": verdict.failure} if failed else {}
                trace = verdict.trace or batch.tags[i].trace
                tags[batch.keys[i]] = replace(batch.tags[i], reward=verdict.reward, trace=trace, **status)
            for i, value in _earned(batch, rows, verdict).items():
                placed_B[i] = value
            if verdict.reward is not None and not batch.tags[rows[0]].is_baseline:
                for part, value in verdict.parts.items():
                    parts.setdefault(part, []).append(value)
        self.store.tag(batch.partition, tags)
        return {
            "reward": rewards_B,
            "reward_tokens": at_last_sampled(placed_B, columns.ragged("response_mask")),
        }, parts

    def _verdicts(
        self, batch: BatchRef, columns: Columns, sessions: Mapping[SessionName, Sequence[int]]
    ) -> dict[SessionName, RewardResult]:
        verdicts: dict[SessionName, RewardResult] = {}
        samples: dict[SessionName, RewardSample] = {}
        for name, rows in sessions.items():
            given = [batch.tags[i].given_reward for i in rows]
            if given[0] is not None:
                total = sum(value or 0.0 for value in given)
                verdicts[name] = RewardResult(total, {LOOP: total})
            else:
                samples[name] = self._sample(batch, columns, rows)
        late = [name for name in samples if name not in self._said]
        if late:
            work = self.judge.score([samples[name] for name in late])
            said = run_async(work, timeout=self.recipe.rollout.deadline_s, owner="reward")
            self._said.update(zip(late, said, strict=True))
        judged = [self._said.pop(name) for name in samples]
        if self.jury is not None:
            keys = [batch.keys[sessions[name][-1]] for name in samples]
            shown = zip(keys, samples.values(), strict=True)
            cases = [self.jury.case(key, self._prompts[key], s.response_text) for key, s in shown]
            judged = self.jury.add(judged, cases)
        return verdicts | dict(zip(samples, judged, strict=True))

    def _sample(self, batch: BatchRef, columns: Columns, rows: Sequence[int]) -> RewardSample:
        """What a session's rows show to a reward function."""
        response_ids, mask = columns.ragged("response_ids"), columns.ragged("response_mask")
        turns = [turn for i in rows for turn in sampled_runs(response_ids[i], mask[i])]
        texts = tuple(str(self.tokenizer.decode(turn, skip_special_tokens=True)) for turn in turns)
        key, prompt = batch.keys[rows[-1]], self._prompts[batch.keys[rows[-1]]]
        return RewardSample(
            prompt_text=str(self.tokenizer.decode(self._opening(prompt), skip_special_tokens=True)),
            response_text=texts[-1] if texts else "",
            answer=prompt.answer,
            row=prompt.row,
            task=prompt.task,
            domain=prompt.domain,
            finish=batch.tags[rows[-1]].finish,
            key=str(key),
            response_tokens=sum(batch.tags[i].response_tokens for i in rows),
            turns=texts,
            trajectories=len(rows),
        )

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what was said of rows that leave the store unjudged."""
        for key in keys:
            self._said.pop(key[:2], None)
            if self.jury is not None:
                self.jury.forget([key])


def _earned(batch: BatchRef, rows: Sequence[int], verdict: RewardResult) -> dict[int, float]:
    """What each row earned: as the loop said, else the session's reward at its last sampled token."""
    if batch.tags[rows[0]].given_reward is not None:
        return {i: batch.tags[i].given_reward or 0.0 for i in rows}
    last = next((i for i in reversed(rows) if batch.tags[i].sampled_tokens), None)
    return {} if last is None or verdict.reward is None else {last: verdict.reward}


def sampled_runs(ids: Tensor, mask: Tensor) -> list[Tensor]:
    """The student's turns in a response: runs of sampled tokens."""
    runs, at = [], 0
    for sampled, run in groupby(mask.tolist()):
        length = len(list(run))
        if sampled:
            runs.append(ids[at : at + length])
        at += length
    return runs


def at_last_sampled(values_B: Tensor, mask: Ragged) -> Ragged:
    """Each row's value at its last sampled token, 0 elsewhere; a row without one has none."""
    row_N = torch.arange(len(mask)).repeat_interleave(torch.tensor(mask.lengths))
    last_B = torch.full((len(mask),), -1, dtype=torch.int64)
    sampled_M = torch.nonzero(mask.values).squeeze(1)
    last_B.scatter_reduce_(0, row_N[sampled_M], sampled_M, "amax")
    placed_N = torch.zeros(len(mask.values))
    has_B = last_B >= 0
    placed_N[last_B[has_B]] = values_B[has_B]
    return Ragged.packed(placed_N, mask.lengths)

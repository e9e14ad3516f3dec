"""The reward role: scores sessions, as they finish where that is possible, and writes their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from practicum.concurrency.event_loop import run_async
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column, Columns, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.recipe.derived import uses_reward, waits_for_models
from practicum.recipe.schema.recipe import Recipe
from practicum.records.recording_store import stage_span
from practicum.rewards.reward_place import JudgeInput
from practicum.roles.reward_models import RewardModelRole
from practicum.roles.run_stage import StepInfo, stage
from practicum.tasks.prompts import Encoder, Prompt
from practicum.tasks.rewards import RewardFunctions, RewardResult, RewardSample

SessionName = tuple[int, ...]
Sessions = dict[SessionName, list[int]]
_TEXTS = 4096
"""Prompt texts that are kept for the sessions that share them."""
LOOP = "loop"
"""The name, among the parts of a reward, of what the agent's loop gave itself."""


class RewardRole:
    """Scores sessions by the recipe's functions and models; a reward that the loop gave stands as it is.

    The stage `reward` scores a batch; `score_session` does the same on the event loop, for a finished session
    while others still roll out (`rewards_at_once`).
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        encoder: Encoder,
        functions: RewardFunctions,
        models: RewardModelRole | None,
    ) -> None:
        self.recipe, self.plan, self.store = recipe, plan, store
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        self.functions, self.models = functions, models
        self._prompt_texts: dict[int, str] = {}

    @stage("reward")
    def reward(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """Score each session once; one that can't be scored is marked failed, not scored zero."""
        sessions = _sessions(batch)
        samples = self._samples(batch, columns, step.prompts, sessions)
        results: list[RewardResult] = []
        if samples:
            work, deadline_s = self.functions.score(list(samples.values())), self.recipe.rollout.deadline_s
            results = run_async(work, timeout=deadline_s, owner="reward")
        if self.models is not None:
            inputs = self._model_inputs(batch, step.prompts, sessions, samples)
            results = self.models.add(results, inputs, batch.tags[0].step)
        return self._written(batch, columns, sessions, dict(zip(samples, results, strict=True)))

    async def score_session(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Score a finished session and write its reward; as the stage does, on the event loop."""
        with stage_span(self.store, "reward", batch.tags[0].step, rows=len(batch)):
            await self._score_session(batch, prompts)

    async def _score_session(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        columns, sessions = (
            Columns("reward", self.store.get(batch, self.plan["reward"].reads)),
            _sessions(batch),
        )
        samples = self._samples(batch, columns, prompts, sessions)
        results = await self.functions.score(list(samples.values()))
        if self.models is not None:
            inputs = self._model_inputs(batch, prompts, sessions, samples)
            results = await self.models.add_streamed(results, inputs, batch.tags[0].step)
        writes = self._written(batch, columns, sessions, dict(zip(samples, results, strict=True)))
        self.store.put(batch, writes, keep_tags=True)

    def _samples(
        self, batch: BatchRef, columns: Columns, prompts: Mapping[Key, Prompt], sessions: Sessions
    ) -> dict[SessionName, RewardSample]:
        """What the sessions without a reward show to a reward function."""
        unscored = {name: rows for name, rows in sessions.items() if batch.tags[rows[0]].given_reward is None}
        return {name: self._sample(batch, columns, prompts, rows) for name, rows in unscored.items()}

    def _sample(
        self, batch: BatchRef, columns: Columns, prompts: Mapping[Key, Prompt], rows: Sequence[int]
    ) -> RewardSample:
        response_ids, mask = columns.ragged("response_ids"), columns.ragged("response_mask")
        runs = [run for i in rows for run in sampled_runs(response_ids[i], mask[i])]
        texts = tuple(str(self.tokenizer.decode(run, skip_special_tokens=True)) for run in runs)
        key, prompt = batch.keys[rows[-1]], prompts[batch.keys[rows[-1]]]
        return RewardSample(
            prompt_text=self._prompt_text(prompt),
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

    def _prompt_text(self, prompt: Prompt) -> str:
        """The prompt as the student reads it; the sessions of a prompt share it."""
        text = self._prompt_texts.get(prompt.uid)
        if text is None:
            if len(self._prompt_texts) >= _TEXTS:
                self._prompt_texts.clear()
            text = str(self.tokenizer.decode(self.encoder(prompt).ids, skip_special_tokens=True))
            self._prompt_texts[prompt.uid] = text
        return text

    def _model_inputs(
        self,
        batch: BatchRef,
        prompts: Mapping[Key, Prompt],
        sessions: Sessions,
        samples: Mapping[SessionName, RewardSample],
    ) -> list[JudgeInput]:
        assert self.models is not None
        keys = [batch.keys[sessions[name][-1]] for name in samples]
        shown = zip(keys, samples.values(), strict=True)
        return [self.models.model_input(key, prompts[key], s.response_text) for key, s in shown]

    def _written(
        self,
        batch: BatchRef,
        columns: Columns,
        sessions: Sessions,
        results: Mapping[SessionName, RewardResult],
    ) -> dict[str, Column]:
        """The columns of these results, with the rows' tags set."""
        rewards_B, placed_B, tags = torch.zeros(len(batch)), torch.zeros(len(batch)), {}
        for name, rows in sessions.items():
            result = results[name] if name in results else _given(batch, rows)
            # A failure of what nothing is learnt from does not take a row away from the teachers.
            failed = result.reward is None and uses_reward(self.recipe)
            for i in rows:
                rewards_B[i] = torch.nan if result.reward is None else result.reward
                changed: dict[str, Any] = {"reward": result.reward, "reward_parts": result.parts}
                changed["trace"] = result.trace or batch.tags[i].trace
                if failed:
                    changed |= {"status": "failed", "failure": result.failure}
                tags[batch.keys[i]] = replace(batch.tags[i], **changed)
            for i, value in _earned(batch, rows, result).items():
                placed_B[i] = value
        self.store.tag(batch.partition, tags)
        reward_tokens = at_last_sampled(placed_B, columns.ragged("response_mask"))
        return {"reward": rewards_B, "reward_tokens": reward_tokens}


def rewards_at_once(recipe: Recipe, plan: Plan, functions: RewardFunctions, task: str) -> bool:
    """Whether a finished session of a task is scored while others still roll out.

    Not if a colocated model takes part, which waits for the engines to sleep, nor if a function takes a
    whole batch. Functions alone must be slow enough to be worth it.
    """
    if "reward" not in plan or waits_for_models(recipe) or not functions.divides(task):
        return False
    return bool(recipe.reward.models) or functions.streams(task)


def _sessions(batch: BatchRef) -> Sessions:
    """The rows of each session."""
    sessions: Sessions = {}
    for i, key in enumerate(batch.keys):
        sessions.setdefault(key[:2], []).append(i)
    return sessions


def _given(batch: BatchRef, rows: Sequence[int]) -> RewardResult:
    """The reward that the loop gave a session."""
    total = sum(batch.tags[i].given_reward or 0.0 for i in rows)
    return RewardResult(total, {LOOP: total})


def _earned(batch: BatchRef, rows: Sequence[int], result: RewardResult) -> dict[int, float]:
    """The reward of each row: as the loop gave it, else the session's at its last sampled token."""
    if batch.tags[rows[0]].given_reward is not None:
        return {i: batch.tags[i].given_reward or 0.0 for i in rows}
    last = next((i for i in reversed(rows) if batch.tags[i].sampled_tokens), None)
    return {} if last is None or result.reward is None else {last: result.reward}


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

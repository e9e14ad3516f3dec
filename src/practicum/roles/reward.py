"""The reward role: score sessions, if possible as they finish, and write their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from practicum.concurrency.gather import gather_all, in_thread
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column, Columns, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.engines.model_cache import ModelCache
from practicum.errors import DataError, RewardError
from practicum.observe.records.recorder import NOT_RECORDED, SCORED, Recorder
from practicum.recipe.schema.recipe import Reward, Task
from practicum.rewards.judge import CannotScore, JudgeInput
from practicum.rewards.reward_scorer import RewardScorer
from practicum.rewards.score_functions import RewardFunctions, RewardResult, RewardSample
from practicum.roles.run_stage import StepInfo, stage
from practicum.tasks.messages import message_text
from practicum.tasks.prompts import Encoder, Prompt, answer_text, chat_messages, prompt_text
from practicum.user_code import shorten

SessionName = tuple[int, ...]
Sessions = dict[SessionName, list[int]]
_TEXTS = 4096
"""Size of the cache of prompt texts, which sessions of a group share."""
LOOP = "loop"
"""Name of the reward part that the agent loop set."""


class RewardRole:
    """Scores sessions with the recipe's functions and models. A reward set by the agent loop takes
    precedence.

    The stage `reward` runs on each session when it finishes (`rewards_early`), or on all sessions after the
    rollout. `residency` wakes sleeping models.
    """

    def __init__(
        self,
        section: Reward,
        tasks: Mapping[str, Task],
        plan: Plan,
        store: Store,
        encoder: Encoder,
        functions: RewardFunctions,
        models: Mapping[str, RewardScorer] | None = None,
        residency: ModelCache | None = None,
        recorder: Recorder = NOT_RECORDED,
        *,
        deadline_s: float,
        learnt: bool,
    ) -> None:
        """`deadline_s` is the functions' deadline, models have separate ones. `learnt` means trained on."""
        self.section, self.tasks, self.plan, self.store = section, tasks, plan, store
        self.encoder, self.tokenizer, self.recorder = encoder, encoder.tokenizer, recorder
        self.functions, self.models, self.residency = functions, models or {}, residency
        self._learnt, self._prompt_texts = learnt, dict[int, str]()
        # Each model's deadline is earlier, and its error names the model.
        self.stage_s = deadline_s + 3 * sum(section.models[name].deadline_s for name in self.models)

    @stage("reward")
    async def reward(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """Score each session once. A session that can't be scored is marked as failed."""
        sessions: Sessions = {}
        for i, key in enumerate(batch.keys):
            sessions.setdefault(key[:2], []).append(i)
        samples = {
            name: self._sample(batch, columns, step.prompts, rows)
            for name, rows in sessions.items()
            if batch.tags[rows[0]].loop_reward is None
        }
        results = await self.functions.score(list(samples.values())) if samples else []
        if self.models:
            keys = [batch.keys[sessions[name][-1]] for name in samples]
            shown = zip(keys, samples.values(), strict=True)
            inputs = [self._judge_input(key, step.prompts[key], s.response_text) for key, s in shown]
            results = await self._add_models(results, inputs, step.number)
        return self._written(batch, columns, sessions, dict(zip(samples, results, strict=True)))

    async def _add_models(
        self, results: Sequence[RewardResult], inputs: Sequence[JudgeInput], step: int
    ) -> list[RewardResult]:
        """Add the models' scores to the functions' results. Results without a reward are unchanged."""
        scored = [i for i, result in enumerate(results) if result.reward is not None]
        scores: dict[int, dict[str, float | CannotScore]] = {i: {} for i in scored}

        async def ask(name: str, scorer: RewardScorer) -> None:
            awake = nullcontext()
            if scorer.sleeper is not None and self.residency is not None:
                awake = self.residency.awake(scorer.key)
            with self.recorder.span("reward", step, name, len(scored)):
                async with in_thread(awake):
                    found = await gather_all(scorer.judge(inputs[i]) for i in scored)
            for i, score in zip(scored, found, strict=True):
                scores[i][name] = score

        if scored:
            await gather_all(ask(name, scorer) for name, scorer in self.models.items())
        return [
            self._with_models(result, inputs[i], scores[i]) if i in scores else result
            for i, result in enumerate(results)
        ]

    def _with_models(
        self, result: RewardResult, shown: JudgeInput, scores: Mapping[str, float | CannotScore]
    ) -> RewardResult:
        assert result.reward is not None
        reward, parts, failure = result.reward, dict(result.parts), None
        for name in self.models:
            score = scores[name]
            if not isinstance(score, CannotScore):
                parts[name] = score
                reward += self.section.models[name].weight * score
            elif self.section.on_error == "stop":
                raise RewardError(
                    f"reward model {name} {score}\n"
                    f"  sample:   {shown.name}\n"
                    f"  prompt:   {shorten(shown.prompt)!r}\n"
                    f"  response: {shorten(shown.response)!r}\n"
                    f"  → fix reward.models.{name}, or set reward.on_error: skip to leave such samples out."
                ) from score
            else:
                failure = failure or f"reward model {name} {score}"
        return RewardResult(reward, parts) if failure is None else RewardResult(None, parts, failure)

    def _judge_input(self, key: Key, prompt: Prompt, response: str) -> JudgeInput:
        task, messages = self.tasks[prompt.task], None
        if task.chat or not isinstance(prompt.content, str):
            chat = chat_messages(prompt.content, task.system)
            texts = ({"role": message["role"], "content": message_text(message)} for message in chat)
            messages = (*texts, {"role": "assistant", "content": response})
        try:
            answer = answer_text(prompt.answer)
        except DataError:  # no text to show
            answer = None
        return JudgeInput(str(key), prompt_text(prompt.content), response, answer, messages)

    def _sample(
        self, batch: BatchRef, columns: Columns, prompts: Mapping[Key, Prompt], rows: Sequence[int]
    ) -> RewardSample:
        response_ids, mask = columns.ragged("response_ids"), columns.ragged("response_mask")
        runs = [run for i in rows for run in sampled_runs(response_ids[i], mask[i])]
        texts = tuple(str(self.tokenizer.decode(run, skip_special_tokens=True)) for run in runs)
        key, prompt = batch.keys[rows[-1]], prompts[batch.keys[rows[-1]]]
        if prompt.uid not in self._prompt_texts:
            if len(self._prompt_texts) >= _TEXTS:
                self._prompt_texts.clear()
            text = self.tokenizer.decode(self.encoder(prompt).ids, skip_special_tokens=True)
            self._prompt_texts[prompt.uid] = str(text)
        return RewardSample(
            prompt_text=self._prompt_texts[prompt.uid],
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

    def _written(
        self,
        batch: BatchRef,
        columns: Columns,
        sessions: Sessions,
        results: Mapping[SessionName, RewardResult],
    ) -> dict[str, Column]:
        rewards_B, placed_B, tags = torch.zeros(len(batch)), torch.zeros(len(batch)), {}
        for name, rows in sessions.items():
            given = [batch.tags[i].loop_reward or 0.0 for i in rows]
            result = results.get(name) or RewardResult(sum(given), {LOOP: sum(given)})
            # A failed reward that is only logged does not exclude the row from distillation.
            failed = result.reward is None and self._learnt
            for i in rows:
                rewards_B[i] = torch.nan if result.reward is None else result.reward
                changed: dict[str, Any] = {"reward": result.reward, "reward_parts": result.parts}
                changed["trace"] = result.trace or batch.tags[i].trace
                if failed:
                    changed |= {"status": "failed", "failure": result.failure}
                tags[batch.keys[i]] = replace(batch.tags[i], **changed)
            last = next((i for i in reversed(rows) if batch.tags[i].sampled_tokens), None)
            if name not in results:
                placed_B[rows] = torch.tensor(given)
            elif last is not None and result.reward is not None:
                placed_B[last] = result.reward
        self.store.tag(batch.partition, tags)
        self.recorder.add("reward", replace(batch, tags=tuple(tags[key] for key in batch.keys)), {}, SCORED)
        reward_tokens = at_last_sampled(placed_B, columns.ragged("response_mask"))
        return {"reward": rewards_B, "reward_tokens": reward_tokens}


def sampled_runs(ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the student's turns in a response, as runs of sampled tokens."""
    runs, at = [], 0
    for sampled, run in groupby(mask.tolist()):
        length = len(list(run))
        if sampled:
            runs.append(ids[at : at + length])
        at += length
    return runs


def at_last_sampled(values_B: Tensor, mask: Ragged) -> Ragged:
    """Return each row's value at its last sampled token, 0 elsewhere."""
    row_N = torch.arange(len(mask)).repeat_interleave(torch.tensor(mask.lengths))
    last_B = torch.full((len(mask),), -1, dtype=torch.int64)
    sampled_M = torch.nonzero(mask.values).squeeze(1)
    last_B.scatter_reduce_(0, row_N[sampled_M], sampled_M, "amax")
    placed_N = torch.zeros(len(mask.values))
    has_B = last_B >= 0
    placed_N[last_B[has_B]] = values_B[has_B]
    return Ragged.packed(placed_N, mask.lengths)

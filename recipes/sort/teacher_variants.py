"""Published ways to learn from teachers that are functions of one's own rather than keys of the recipe."""

import zlib
from array import array
from typing import Any

import torch
from variants import largest

from practicum.parts import (
    AdvantageInputs,
    AdvantageResult,
    BatchRef,
    Columns,
    Counter,
    GenerateRequest,
    Ragged,
    RewardFunctions,
    RewardSample,
    Sampling,
    StepInfo,
    advantage,
    discounted_returns,
    stage,
    to_tokens,
)

TRIES, LEAST = 3, 2
"""Answers that the gate samples from a teacher to each prompt, and how many of them must be right."""
rates: dict[tuple[int, ...], int] = {}
"""Right answers of the teacher of each prompt, by the prompt's tokens."""


@stage(after="advantages", reads=["prompt_ids", "advantages"], writes=["advantages", "teacher_weight"])
def gate(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Distil prompts that their teacher solves, and learn the others from rewards (TGOPD).

    The teacher's answers depend on the seed and the prompt's tokens alone, so each prompt is tried once.
    """
    ids = [tuple(row.tolist()) for row in columns.ragged("prompt_ids").rows]
    new: dict[str, dict[tuple[int, ...], Any]] = {}
    for prompt_ids, key, tags in zip(ids, batch.keys, batch.tags, strict=True):
        if prompt_ids not in rates:
            new.setdefault(tags.teacher or "", {})[prompt_ids] = step.prompts[key]
    rollout, seed = rank.recipe.rollout, rank.recipe.seed
    sampling = Sampling(rollout.max_new_tokens, rank.stop, temperature=rollout.temperature)
    checker = RewardFunctions(rank.recipe.tasks, rank.recipe.reward)
    for teacher, prompts in new.items():
        tries = [(prompt_ids, n) for prompt_ids in prompts for n in range(TRIES)]
        numbers = {prompt_ids: zlib.crc32(array("q", prompt_ids).tobytes()) for prompt_ids in prompts}
        asked = [GenerateRequest(i, sampling, Counter(seed, numbers[i], n)) for i, n in tries]
        for (prompt_ids, _), tokens in zip(tries, rank.teachers.answers_by(teacher, asked), strict=True):
            text, prompt = rank.tokenizer.decode(tokens, skip_special_tokens=True), prompts[prompt_ids]
            known = (prompt.answer, prompt.row, prompt.task, prompt.domain)
            sample = RewardSample("", text, *known, finish="", key=str(prompt), response_tokens=len(tokens))
            rates[prompt_ids] = rates.get(prompt_ids, 0) + int(checker.check(sample) >= 1)
    advantages = columns.ragged("advantages")
    taught_B = torch.tensor([float(rates[one] >= LEAST) for one in ids])
    taught_N = taught_B.repeat_interleave(torch.tensor(advantages.lengths))
    written = {"advantages": advantages.values * (1 - taught_N), "teacher_weight": taught_N}
    taught = {"taught": float(taught_B.mean())} if len(taught_B) else {}
    return {name: Ragged.packed(x, advantages.lengths) for name, x in written.items()}, taught


@advantage(reads=["gamma"])
def discounted_credit(inputs: AdvantageInputs) -> AdvantageResult:
    """A_t = sum of gamma^(t' - t) (log teacher - log student) over the session's later tokens (gammaOPD).

    With `reward.log_only` it is squashed, and the checker's verdict of -1 or 1 is added, whose sign stays:
    A / (mean |A| + |A|) + R.
    """
    advantages_N = discounted_returns(inputs, inputs.gamma)
    if "checker" in inputs.parts_S:
        size_N = advantages_N.abs()
        mean = size_N[inputs.mask_N].mean() if inputs.mask_N.any() else 0.0
        squashed_N = advantages_N / (mean + size_N).clamp(min=1e-8)
        advantages_N = squashed_N + to_tokens(2 * inputs.parts_S["checker"] - 1, inputs)
    return AdvantageResult(advantages_N)


OPPOSES = 0.1
"""Log-ratio from which another teacher's opposition counts."""
_SCORED = ["prompt_ids", "response_ids", "response_mask", "old_logprobs", "teacher_logprobs"]


@stage(after="advantages", reads=_SCORED, writes=["advantages"])
def consensus(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Replace each token's advantage by the sign on which all teachers agree (C-MOPD).

    With x = log teacher - log student: 1 or -1 if all teachers have that sign; else the sign of the prompt's
    own teacher, unless another one opposes it by more than `OPPOSES`; then 0.
    """
    student = columns.ragged("old_logprobs")
    own_N = columns.ragged("teacher_logprobs").values - student.values
    scored = [rank.teachers.logprobs_by(name, batch, columns, step) for name in rank.recipe.teachers]
    x_KN = torch.stack([each.values - student.values for each in scored])
    opposed_N = (x_KN * own_N.sign() < -OPPOSES).any(0)
    signs_N = own_N.sign().masked_fill(opposed_N, 0.0)
    signs_N[(x_KN > 0).all(0)], signs_N[(x_KN < 0).all(0)] = 1.0, -1.0
    signs_N = signs_N.masked_fill(~columns.ragged("response_mask").values, 0.0)
    sampled = columns.ragged("response_mask").values
    metrics = {"conflicts": float(opposed_N[sampled].float().mean())} if sampled.any() else {}
    return {"advantages": Ragged.packed(signs_N, student.lengths)}, metrics


@stage(after="pad", reads=["rollout_logprobs", "response_mask", "teacher_logprobs"], writes=["token_weight"])
def teachable(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Learn from the fifth of the tokens at which student and teacher disagree most."""
    student, teacher = columns.ragged("rollout_logprobs"), columns.ragged("teacher_logprobs")
    apart = Ragged.packed((teacher.values - student.values).abs(), student.lengths)
    return {"token_weight": largest(rank, apart, columns.ragged("response_mask"))}

"""Published ways to learn from teachers that are functions of one's own rather than keys of the recipe."""

import zlib
from array import array
from typing import Any
from weakref import WeakKeyDictionary

import torch
from variants import largest

from practicum.parts import (
    AdvantageInputs,
    AdvantageResult,
    BatchRef,
    Columns,
    Counter,
    Draws,
    Example,
    GenerateRequest,
    Option,
    Procedural,
    Ragged,
    RewardFunctions,
    RewardSample,
    Sampling,
    Settings,
    StepInfo,
    advantage,
    discounted_returns,
    stage,
    to_tokens,
)

TRIES, LEAST = 3, 2
"""Answers that the gate samples from a teacher to each prompt, and how many of them must be right."""
Asked = tuple[str, str, tuple[int, ...]]
rates_of: WeakKeyDictionary[Any, dict[Asked, int]] = WeakKeyDictionary()
"""Right answers of each run's teachers, by teacher, task and the prompt's tokens."""


@stage(after="advantages", reads=["prompt_ids", "advantages"], writes=["advantages", "teacher_weight"])
def gate(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Distil prompts that their teacher solves, and learn the others from rewards (TGOPD).

    The teacher's answers depend on the seed and the prompt's tokens alone, so each prompt is tried once.
    """
    rates, new = rates_of.setdefault(rank, {}), dict[Asked, Any]()
    ids = [tuple(row.tolist()) for row in columns.ragged("prompt_ids").rows]
    tries = [(tags.teacher or "", tags.task, own) for tags, own in zip(batch.tags, ids, strict=True)]
    for one, key in zip(tries, batch.keys, strict=True):
        if one not in rates and key in step.prompts:  # padding has none
            new[one] = step.prompts[key]
    rollout, seed = rank.recipe.rollout, rank.recipe.seed
    sampling = Sampling(rollout.max_new_tokens, rank.stop, temperature=rollout.temperature)
    checker = RewardFunctions(rank.recipe.tasks, rank.recipe.reward)
    for teacher in dict.fromkeys(one[0] for one in new):
        asked = [(one, n) for one in new if one[0] == teacher for n in range(TRIES)]
        numbers = {one: zlib.crc32(array("q", one[2]).tobytes()) for one, _ in asked}
        requests = [GenerateRequest(one[2], sampling, Counter(seed, numbers[one], n)) for one, n in asked]
        for (one, _), tokens in zip(asked, rank.teachers.answers_by(teacher, requests), strict=True):
            text, prompt = rank.tokenizer.decode(tokens, skip_special_tokens=True), new[one]
            known = (prompt.answer, prompt.row, prompt.task, prompt.domain)
            sample = RewardSample("", text, *known, finish="", key=str(prompt), response_tokens=len(tokens))
            rates[one] = rates.get(one, 0) + (checker.check(sample) >= 1)
    advantages = columns.ragged("advantages")
    taught_B = torch.tensor([float(rates.get(one, 0) >= LEAST) for one in tries])
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


def make_told(draws: Draws, settings: Settings) -> Example:
    """Return a prompt of `sort` that says its answer first."""
    digits = draws.text("0123456789", draws.between(*settings.span("length")))
    answer = "".join(sorted(digits))
    return Example(TELL.format(answer) + f"sort:{digits}=", answer)


TELL = "{}>"
TOLD = Procedural("told", "Sort, told the answer.", {"length": Option((2, 3), 1, 9, "Digits.")}, make_told)


@stage(after="advantages", reads=_SCORED[:-1], writes=["advantages"])
def opsd(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """The student that is told the answer teaches the student that is not (OPSD).

    A token's advantage is log p(token | told) - log p(token), of the weights before the update. Zhao et al.
    2026, "Self-distilled reasoner", arXiv:2601.18734, whose teacher has the first weights.
    """
    student, prompts = columns.ragged("old_logprobs"), columns.ragged("prompt_ids").rows
    told = []
    for key, ids in zip(batch.keys, prompts, strict=True):
        known = TELL.format(step.prompts[key].answer) if key in step.prompts else ""  # padding has none
        told.append(torch.tensor([*rank.tokenizer.encode(known, add_special_tokens=False), *ids.tolist()]))
    scorer, at = rank.student.learner.scorer, rank.recipe.rollout.temperature
    teacher = scorer.logprobs(Ragged.from_rows(told), columns.ragged("response_ids"), temperature=at)
    apart_N = (teacher.values - student.values).masked_fill(~columns.ragged("response_mask").values, 0.0)
    return {"advantages": Ragged.packed(apart_N, student.lengths)}

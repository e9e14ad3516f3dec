"""The advantages role: turns rewards into an advantage for each sampled token."""

from __future__ import annotations

import torch
from torch import Tensor

from practicum.algorithms.advantages.registry import ADVANTAGES
from practicum.algorithms.advantages.types import AdvantageInputs
from practicum.algorithms.kl import AdaptiveKl, FixedKl, KlController, token_kl
from practicum.algorithms.mismatch import MismatchRules, MismatchWeights, mismatch_weights
from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Column, Columns, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.learning.update_trace import places_by_rule
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.derived import corrects_mismatch, has_advantage_estimator
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.recipe import Recipe
from practicum.records.recording_store import record_more, recorder_of
from practicum.roles.run_stage import StepInfo, stage
from practicum.roles.stage_table import student_source


def dense_ids(names: list) -> tuple[Tensor, int]:
    """Number names 0, 1, … in order of first appearance: ids as a tensor, and how many there are."""
    numbers: dict = {}
    ids = [numbers.setdefault(name, len(numbers)) for name in names]
    return torch.tensor(ids, dtype=torch.int64), len(numbers)


class AdvantageRole:
    """Advantages of a batch, and the KL penalty in the reward with its controller."""

    def __init__(self, recipe: Recipe, plan: Plan, store: Store, watch: Watch) -> None:
        self.recipe, self.plan, self.store, self.watch = recipe, plan, store, watch
        kl = recipe.algorithm.kl
        self.kl: KlController = (
            FixedKl(kl.coefficient)
            if kl.target is None
            else AdaptiveKl(kl.coefficient, target=kl.target, horizon=kl.horizon)
        )

    @stage("advantages")
    def advantages(
        self, batch: BatchRef, columns: Columns, step: StepInfo
    ) -> tuple[dict[str, Column], dict[str, float]]:
        """Advantage of every token; reports statistics."""
        mask = columns.ragged("response_mask")
        session_B, _ = dense_ids([key[:2] for key in batch.keys])
        session_N = session_B.repeat_interleave(torch.tensor(mask.lengths))
        prompts = [batch.keys[i].prompt for i in _first_rows(session_B)]
        advantages_N, returns_N, stats = self._estimate(columns, mask.values, session_N, prompts, step)
        if corrects_mismatch(self.recipe):
            weights = self._weights(columns, mask.values, session_N)
            advantages_N, stats = (
                weights.weights_N.to(advantages_N.dtype) * advantages_N,
                stats | weights.stats,
            )
            self._record(batch, mask.lengths, weights)
        written: dict[str, Column] = {"advantages": Ragged.packed(advantages_N, mask.lengths)}
        if returns_N is not None and "returns" in self.plan["advantages"].writes:
            written["returns"] = Ragged.packed(returns_N, mask.lengths)
        return written, stats

    def _record(self, batch: BatchRef, lengths: list[int], found: MismatchWeights) -> None:
        if recorder_of(self.store) is not None:
            weights = Ragged.packed(found.weights_N, lengths)
            rules = places_by_rule(found.held_N, lengths)
            record_more(self.store, "advantages", batch, {"mismatch_weight": weights, "rules": rules})

    def _estimate(
        self,
        columns: Columns,
        mask_N: Tensor,
        session_N: Tensor,
        prompts: list[int],
        step: StepInfo,
    ) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        """Advantages, returns if there is a critic, and counts; `prompts` are the sessions'."""
        algorithm, distill, weight = self.recipe.algorithm, self.recipe.distill, self.recipe.reward.weight
        taught_N, stats = self._taught(columns, mask_N)
        if not has_advantage_estimator(self.recipe):
            assert taught_N is not None
            return taught_N, None, stats
        in_reward = distill is not None and distill.through == "reward"
        # Among rewards the task's has its weight before they are added; else the advantage has it.
        before, after = (weight, 1.0) if in_reward else (1.0, weight)
        token_rewards_N = torch.zeros(len(mask_N))
        if "reward_tokens" in columns:
            token_rewards_N = before * columns.ragged("reward_tokens").values
        if algorithm.kl.place == "reward":
            token_rewards_N, more = self._penalise(columns, token_rewards_N, mask_N, len(prompts))
            stats |= more
        if in_reward:
            assert taught_N is not None
            token_rewards_N, taught_N = token_rewards_N + taught_N, None
        estimate = find_part("advantage", algorithm.advantage, ADVANTAGES)
        result = estimate(
            AdvantageInputs(
                token_rewards_N=token_rewards_N,
                mask_N=mask_N,
                session_N=session_N,
                group_S=dense_ids(prompts)[0],
                baseline_S=before * torch.tensor([step.baselines[p] for p in prompts])
                if step.baselines
                else None,
                values_N=columns.ragged("values").values if "values" in columns else None,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                whiten=algorithm.whiten,
            )
        )
        if algorithm.kl.place != "reward" and not in_reward:
            self._check(result.advantages_N, columns, step)
        advantages_N = result.advantages_N if after == 1.0 else after * result.advantages_N
        if taught_N is not None:
            advantages_N = advantages_N + taught_N
        returns_N = None if result.returns_N is None else result.returns_N.float()
        return advantages_N.float(), returns_N, stats | result.stats  # a user's may be of another type

    def _check(self, advantages_N: Tensor, columns: Columns, step: StepInfo) -> None:
        """Compare advantages that are of rewards alone with the rewards in the tags."""
        centred = estimator_traits(self.recipe.algorithm.advantage).centred
        if centred and self.watch.looks_at("advantages"):
            mask = columns.ragged("response_mask")
            values = Ragged.packed(advantages_N, mask.lengths)
            self.watch("advantages", invariants.advantages(step.batch.real(), values, mask))

    def _weights(self, columns: Columns, mask_N: Tensor, session_N: Tensor) -> MismatchWeights:
        """Weights against the mismatch, and their counts.

        A policy loss grows as its advantage does, so weighed advantages weigh the loss; what the critic
        learns from is not weighed.
        """
        old_N = columns.ragged(student_source(self.recipe)).values
        rollout_N = columns.ragged("rollout_logprobs").values
        mismatch = self.recipe.algorithm.mismatch
        reject = None if mismatch.reject is None else (mismatch.reject.low, mismatch.reject.high)
        rules = MismatchRules(mismatch.weights, mismatch.outside, mismatch.cap, mismatch.floor, reject)
        return mismatch_weights(old_N, rollout_N, mask_N, session_N, rules)

    def _taught(self, columns: Columns, mask_N: Tensor) -> tuple[Tensor | None, dict[str, float]]:
        """Weight × the negative estimate of KL(student || teacher) of each token, if it enters here."""
        distill = self.recipe.distill
        if distill is None or distill.through == "loss":
            return None, {}
        student_N = columns.ragged(student_source(self.recipe)).values
        teacher_N = columns.ragged("teacher_logprobs").values
        kind, part = distill.divergence, "sampled_divergence"
        terms = token_kl(kind, student_N, teacher_N, mask_N, distill.clamp, part=part)
        stats = {}
        if mask_N.any():
            stats["teacher_kl"] = float(terms.kl_N[mask_N].mean())
            if distill.clamp is not None:
                stats["teacher_clamped"] = float(terms.clamped_N[mask_N].float().mean())
        return -distill.weight * terms.kl_N, stats

    def _penalise(
        self, columns: Columns, token_rewards_N: Tensor, mask_N: Tensor, sessions: int
    ) -> tuple[Tensor, dict[str, float]]:
        kl = self.recipe.algorithm.kl
        student_N = columns.ragged(student_source(self.recipe)).values
        if not mask_N.any():
            return token_rewards_N, {}
        reference_N = columns.ragged("ref_logprobs").values
        terms = token_kl(kl.estimator, student_N, reference_N, mask_N, clamp=kl.clamp)
        observed = float(terms.kl_N[mask_N].mean())
        coefficient = self.kl.coefficient
        self.kl.update(observed, sessions)
        stats = {"kl_reward": observed, "kl_coefficient": coefficient}
        if kl.clamp is not None:
            stats["kl_clamped"] = float(terms.clamped_N[mask_N].float().mean())
        return token_rewards_N - coefficient * terms.kl_N, stats

    def session_means(self, batch: BatchRef) -> dict[tuple[int, ...], float]:
        """Each session's mean advantage over its sampled tokens; sessions without any are left out."""
        columns = Columns("records", self.store.get(batch, ("advantages", "response_mask")))
        sums: dict[tuple[int, ...], tuple[float, int]] = {}
        rows = zip(columns.ragged("advantages").rows, columns.ragged("response_mask").rows, strict=True)
        for key, (advantages, mask) in zip(batch.keys, rows, strict=True):
            total, count = sums.get(key[:2], (0.0, 0))
            sums[key[:2]] = total + float(advantages[mask].sum()), count + int(mask.sum())
        return {name: total / count for name, (total, count) in sums.items() if count}

    def state_dict(self) -> dict[str, float]:
        return self.kl.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.kl.load_state_dict(state)


def _first_rows(session_B: Tensor) -> list[int]:
    """The first row of each session."""
    first: dict[int, int] = {}
    for row, session in enumerate(session_B.tolist()):
        first.setdefault(session, row)
    return [first[s] for s in range(len(first))]

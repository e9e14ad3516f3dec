"""The advantages role: compute the advantage of each sampled token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from practicum.algorithms.advantages import ADVANTAGES, AdvantageInputs
from practicum.algorithms.kl import KlWeight, token_kl
from practicum.algorithms.mismatch import mismatch_weights
from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Column, Columns, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.learning.update_batch import places_by_rule
from practicum.observe.records.recorder import NOT_RECORDED, Recorder
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.algorithm_sections import KL_HORIZON, Algorithm
from practicum.recipe.schema.teacher_sections import Distill
from practicum.roles.run_stage import StepInfo, stage
from practicum.roles.stage_table import student_source


def dense_ids(names: list) -> tuple[Tensor, int]:
    """Number names 0, 1, … in order of first appearance. Return the ids and their count."""
    numbers: dict = {}
    ids = [numbers.setdefault(name, len(numbers)) for name in names]
    return torch.tensor(ids, dtype=torch.int64), len(numbers)


def reward_parts(batch: BatchRef) -> dict[str, Tensor]:
    """Return the scores of each reward function and model per session, NaN where it did not apply."""
    sessions = {key[:2]: tags.reward_parts or {} for key, tags in batch}.values()
    names = dict.fromkeys(name for parts in sessions for name in parts)
    return {name: torch.tensor([parts.get(name, math.nan) for parts in sessions]) for name in names}


class AdvantageRole:
    """Computes advantages, and the KL penalty in the reward with its controller."""

    def __init__(
        self,
        algorithm: Algorithm,
        distill: Distill | None,
        reward_weight: float,
        plan: Plan,
        store: Store,
        watch: Watch,
        recorder: Recorder = NOT_RECORDED,
    ) -> None:
        self.algorithm, self.distill, self.reward_weight = algorithm, distill, reward_weight
        self.plan, self.store, self.watch, self.recorder = plan, store, watch, recorder
        self.kl = KlWeight(algorithm.kl.coefficient, algorithm.kl.target, KL_HORIZON)

    @stage("advantages")
    def advantages(
        self, batch: BatchRef, columns: Columns, step: StepInfo
    ) -> tuple[dict[str, Column], dict[str, float]]:
        """Return the advantage of every token, and statistics."""
        mask = columns.ragged("response_mask")
        names = [key[:2] for key in batch.keys]
        session_N = dense_ids(names)[0].repeat_interleave(torch.tensor(mask.lengths))
        prompts = [prompt for prompt, _ in dict.fromkeys(names)]
        advantages_N, returns_N, stats = self._estimate(columns, mask.values, session_N, prompts, step)
        mismatch, cap = self.algorithm.mismatch, self.algorithm.mismatch_cap
        if mismatch != "off":
            # A policy loss is linear in the advantage, so weighting advantages weights the loss. The critic's
            # targets are not weighted.
            old_N = columns.ragged(student_source(self.algorithm)).values
            rollout_N = columns.ragged("rollout_logprobs").values
            found = mismatch_weights(old_N, rollout_N, mask.values, session_N, mismatch, cap)
            advantages_N = found.weights_N.to(advantages_N.dtype) * advantages_N
            stats |= found.stats
            if self.recorder.records:
                weights = Ragged.packed(found.weights_N, mask.lengths)
                rules = places_by_rule({"mismatch_truncate": found.capped_N}, mask.lengths)
                self.recorder.add("advantages", batch, {"mismatch_weight": weights, "rules": rules})
        written: dict[str, Column] = {"advantages": Ragged.packed(advantages_N, mask.lengths)}
        if returns_N is not None and "returns" in self.plan["advantages"].writes:
            written["returns"] = Ragged.packed(returns_N, mask.lengths)
        stats.pop("flat_groups", None)  # groups/zero_variance reports them, before any filter
        if (count := stats.pop("groups_of_one", None)) is not None:
            stats["groups/of_one"] = count
        return written, stats

    def _estimate(
        self, columns: Columns, mask_N: Tensor, session_N: Tensor, prompts: list[int], step: StepInfo
    ) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        """Return advantages, returns with a critic, and counts. `prompts` are those of the sessions."""
        algorithm, distill, weight = self.algorithm, self.distill, self.reward_weight
        taught_N, stats = self._taught(columns, mask_N)
        in_reward = distill is not None and distill.apply_as == "reward"
        if not weight and not in_reward:
            assert taught_N is not None
            return taught_N, None, stats
        # With distillation in the reward, the task's reward is weighted here, otherwise the advantage.
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
                parts_S=reward_parts(step.batch.real()),
            )
        )
        if algorithm.kl.place != "reward" and not in_reward:
            self._check(result.advantages_N, columns, step)
        advantages_N = result.advantages_N if after == 1.0 else after * result.advantages_N
        if taught_N is not None:
            advantages_N = advantages_N + taught_N
        returns_N = None if result.returns_N is None else result.returns_N.float()
        return (
            advantages_N.float(),
            returns_N,
            stats | result.stats,
        )  # a custom estimator may return another dtype

    def _check(self, advantages_N: Tensor, columns: Columns, step: StepInfo) -> None:
        """Check advantages that depend only on rewards against the rewards in the tags."""
        centred = estimator_traits(self.algorithm.advantage).centred
        if centred and self.watch.looks_at("advantages"):
            mask = columns.ragged("response_mask")
            values = Ragged.packed(advantages_N, mask.lengths)
            self.watch("advantages", invariants.advantages(step.batch.real(), values, mask))

    def _taught(self, columns: Columns, mask_N: Tensor) -> tuple[Tensor | None, dict[str, float]]:
        """Return -weight × the estimate of KL(student || teacher) of each token, or None if not used."""
        distill = self.distill
        if distill is None or distill.apply_as == "loss":
            return None, {}
        student_N = columns.ragged(student_source(self.algorithm)).values
        teacher_N = columns.ragged("teacher_logprobs").values
        kl_N = token_kl(distill.divergence, student_N, teacher_N, mask_N, part="sampled_divergence")
        stats = {"teacher_kl": float(kl_N[mask_N].mean())} if mask_N.any() else {}
        if "teacher_weight" in columns:
            kl_N = kl_N * columns.ragged("teacher_weight").values
        return -distill.weight * kl_N, stats

    def _penalise(
        self, columns: Columns, token_rewards_N: Tensor, mask_N: Tensor, sessions: int
    ) -> tuple[Tensor, dict[str, float]]:
        if not mask_N.any():
            return token_rewards_N, {}
        student_N = columns.ragged(student_source(self.algorithm)).values
        reference_N, kl = columns.ragged("ref_logprobs").values, self.algorithm.kl
        kl_N = token_kl(kl.estimator, student_N, reference_N, mask_N)
        observed = float(kl_N[mask_N].mean())
        coefficient = self.kl.coefficient
        self.kl.update(observed, sessions)
        return token_rewards_N - coefficient * kl_N, {"kl_reward": observed, "kl_coefficient": coefficient}

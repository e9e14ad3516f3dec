"""The credit role: turns rewards into an advantage for each sampled token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from practicum.algorithms.advantages.registry import ADVANTAGES
from practicum.algorithms.advantages.types import AdvantageInputs
from practicum.algorithms.kl import AdaptiveKl, FixedKl, KlController, token_kl
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.plan import Plan, old_source
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stage import Columns, stage
from practicum.dataplane.store import Store
from practicum.recipe.schema import Recipe
from practicum.recipe.ways import has_advantage_estimator


def dense_ids(names: list) -> tuple[Tensor, int]:
    """Number names 0, 1, … in order of first appearance: ids as a tensor, and how many there are."""
    numbers: dict = {}
    ids = [numbers.setdefault(name, len(numbers)) for name in names]
    return torch.tensor(ids, dtype=torch.int64), len(numbers)


class Credit:
    """Advantages of a batch, and the KL penalty in the reward with its controller."""

    def __init__(self, recipe: Recipe, plan: Plan, store: Store) -> None:
        self.recipe, self.plan, self.store = recipe, plan, store
        kl = recipe.algorithm.kl
        self.kl: KlController = (
            FixedKl(kl.coefficient)
            if kl.target is None
            else AdaptiveKl(kl.coefficient, target=kl.target, horizon=kl.horizon)
        )

    @stage("advantages")
    def advantages(
        self, batch: BatchRef, columns: Columns, *, baselines: Mapping[int, float]
    ) -> tuple[dict[str, Column], dict[str, float]]:
        """Advantage of every token; `baselines` are the greedy rewards of prompts, for ReMax."""
        algorithm = self.recipe.algorithm
        mask = columns.ragged("response_mask")
        session_B, sessions = dense_ids([key[:2] for key in batch.keys])
        session_N = session_B.repeat_interleave(torch.tensor(mask.lengths))
        first_rows = _first_rows(session_B, sessions)
        prompts = [batch.keys[i].prompt for i in first_rows]
        distill, weight = self.recipe.distill, self.recipe.reward.weight
        taught_N, stats = self._taught(columns, mask.values)
        if not has_advantage_estimator(self.recipe):
            assert taught_N is not None
            return {"advantages": Ragged.packed(taught_N, mask.lengths)}, stats
        in_reward = distill is not None and distill.through == "reward"
        # Among rewards the task's has its weight before they are added; else the advantage has it.
        before, after = (weight, 1.0) if in_reward else (1.0, weight)
        token_rewards_N = torch.zeros(len(mask.values))
        if "reward_tokens" in columns:
            token_rewards_N = before * columns.ragged("reward_tokens").values
        if algorithm.kl.place == "reward":
            token_rewards_N, more = self._penalise(columns, token_rewards_N, mask.values, sessions)
            stats |= more
        if in_reward:
            assert taught_N is not None
            token_rewards_N, taught_N = token_rewards_N + taught_N, None
        result = ADVANTAGES[algorithm.advantage](
            AdvantageInputs(
                token_rewards_N=token_rewards_N,
                mask_N=mask.values,
                session_N=session_N,
                group_S=dense_ids(prompts)[0],
                baseline_S=before * torch.tensor([baselines[p] for p in prompts]) if baselines else None,
                values_N=columns.ragged("values").values if "values" in columns else None,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                whiten=algorithm.whiten,
            )
        )
        advantages_N = result.advantages_N if after == 1.0 else after * result.advantages_N
        if taught_N is not None:
            advantages_N = advantages_N + taught_N
        written: dict[str, Column] = {"advantages": Ragged.packed(advantages_N, mask.lengths)}
        if result.returns_N is not None and "returns" in self.plan["advantages"].writes:
            written["returns"] = Ragged.packed(result.returns_N, mask.lengths)
        return written, stats | result.stats

    def _taught(self, columns: Columns, mask_N: Tensor) -> tuple[Tensor | None, dict[str, float]]:
        """Weight × the negative estimate of KL(student || teacher) of each token, if it enters here."""
        distill = self.recipe.distill
        if distill is None or distill.through == "loss":
            return None, {}
        student_N = columns.ragged(old_source(self.recipe)).values
        teacher_N = columns.ragged("teacher_logprobs").values
        terms = token_kl(distill.divergence, student_N, teacher_N, mask_N, clamp=distill.clamp)
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
        student_N = columns.ragged(old_source(self.recipe)).values
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

    def state_dict(self) -> dict[str, float]:
        return self.kl.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.kl.load_state_dict(state)


def _first_rows(session_B: Tensor, sessions: int) -> list[int]:
    first: dict[int, int] = {}
    for row, session in enumerate(session_B.tolist()):
        first.setdefault(session, row)
    return [first[s] for s in range(sessions)]

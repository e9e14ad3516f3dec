"""A reward replica: reads finished sessions from the store, scores them, and writes their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.stages import Plan, StepInfo
from practicum.models.load_model import load_tokenizer
from practicum.recipe.derived import evaluates, rollout_context
from practicum.roles.load_teachers import make_model_cache
from practicum.roles.reward import RewardParts, RewardRole
from practicum.roles.reward_models import RewardModelRole, RewardModels, load_reward_models
from practicum.roles.stage_table import evaluation_plan
from practicum.runtime.ray.reward_model_worker import RayRewardModel
from practicum.runtime.ray.worker import Worker
from practicum.sessions.chat import make_encoder
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions


class RewardWorker(Worker):
    """Scores whole sessions; several calls may be under way at once, if no colocated model takes part."""

    def begin(self, plan: Plan, replicas: Mapping[str, Sequence[Any]]) -> None:
        """Load what scores; `replicas` are those of the reward models with their own resources."""
        recipe = self.recipe
        encoder = make_encoder(recipe, load_tokenizer(recipe.model))
        functions, loaded = RewardFunctions(recipe.tasks, recipe.reward), RewardModels()
        if recipe.reward.models and ("reward" in plan or evaluates(recipe)):
            # Another tokenizer may need more tokens than the student's for the same text.
            elsewhere = {
                name: RayRewardModel(name, recipe.reward.models[name].deadline_s, actors)
                for name, actors in replicas.items()
            }
            loaded = load_reward_models(recipe, 2 * rollout_context(recipe, None), elsewhere)
        residency = make_model_cache(recipe, loaded.sleepers())

        def make_role(plan: Plan) -> RewardRole:
            asked = loaded.places and "reward" in plan
            models = RewardModelRole(recipe, loaded, residency) if asked else None
            return RewardRole(recipe, plan, self.store, encoder, functions, models)

        self._train, self._eval = make_role(plan), make_role(evaluation_plan())

    def reward(self, is_eval: bool, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> RewardParts:
        """Score these sessions, all of whose rows are in the batch; gives the scores of each function."""
        role = self._eval if is_eval else self._train
        return role.reward(StepInfo(batch, prompts=prompts)) or {}

"""A reward replica: reads finished sessions from the store, judges them, and writes what they earned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.plan import Plan, evaluation_plan
from practicum.models.load_model import load_tokenizer
from practicum.recipe.derived import evaluates, rollout_context
from practicum.roles.load_teachers import make_model_cache
from practicum.roles.reward import RewardRole
from practicum.roles.reward_models import RewardModelRole, RewardModels, load_reward_models
from practicum.runtime.ray.reward_model_worker import RayRewardModel
from practicum.runtime.ray.worker import NoEngine, Worker
from practicum.sessions.prompt_encoder import make_encoder
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions


class RewardWorker(Worker):
    """Judges whole sessions; several calls may be under way at once, if no colocated model judges."""

    def begin(self, plan: Plan, rewarders: Mapping[str, Sequence[Any]]) -> None:
        """Load what judges; `rewarders` are the replicas of reward models with resources of their own."""
        recipe = self.recipe
        tokenizer = load_tokenizer(recipe.model)
        self._encoder = make_encoder(recipe, tokenizer)
        judge, self._panel = RewardFunctions(recipe.tasks, recipe.reward), RewardModels()
        if recipe.reward.models and ("reward" in plan or evaluates(recipe)):
            # Another tokenizer may need more tokens than the student's for the same text.
            elsewhere = {
                name: RayRewardModel(name, recipe.reward.models[name].deadline_s, replicas)
                for name, replicas in rewarders.items()
            }
            self._panel = load_reward_models(recipe, 2 * rollout_context(recipe, None), elsewhere)
        residency = make_model_cache(recipe, self._panel.sleepers())
        self._prompts: dict[Key, Prompt] = {}
        self._openings: dict[int, list[int]] = {}

        def judging(plan: Plan) -> RewardRole:
            asked = self._panel.places and "reward" in plan
            jury = RewardModelRole(recipe, self._panel, residency, NoEngine()) if asked else None
            known = self._prompts, self._opening
            return RewardRole(recipe, plan, self.store, tokenizer, judge, jury, *known)

        self._train, self._exam = judging(plan), judging(evaluation_plan())

    def reward(self, exam: bool, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> dict[str, list[float]]:
        """Judge these sessions, all of whose rows are in the batch; gives the scores of each function."""
        self._prompts.update(prompts)
        asked = {id(prompt): prompt for prompt in prompts.values()}
        self._openings.update((name, self._encoder(prompt).ids) for name, prompt in asked.items())
        try:
            return (self._exam if exam else self._train).reward(batch) or {}
        finally:
            for key in prompts:
                self._prompts.pop(key, None)
            for name in asked:
                self._openings.pop(name, None)

    def _opening(self, prompt: Prompt) -> list[int]:
        """Its tokens; the sessions of a call share their prompt's object, which is encoded once."""
        return self._openings[id(prompt)]

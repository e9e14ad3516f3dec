"""Rewards on Ray: replicas that score finished sessions, and reward models with resources of their own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from practicum.concurrency.event_loop import run_async
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.stages import Plan
from practicum.models.load_model import load_tokenizer
from practicum.recipe.derived import evaluates, own_options, rollout_context
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.loaded_reward_model import ColocatedRewardModel, load_reward_model
from practicum.rewards.reward_place import CannotScore, JudgeInput, score_all
from practicum.roles.load_teachers import make_model_cache
from practicum.roles.reward import RewardRole
from practicum.roles.reward_models import RewardModelRole, RewardModels, load_reward_models
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import evaluation_plan
from practicum.roles.train_rank import set_threads
from practicum.runtime.ray.actor_calls import ask_async
from practicum.runtime.ray.init_ray import enter_folder
from practicum.runtime.ray.worker import Worker
from practicum.sessions.chat import make_encoder
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions


class RewardWorker(Worker):
    """Reads finished sessions from the store, scores them, and writes their rewards.

    Several calls may be under way at once, if no colocated model takes part.
    """

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
            has_models = loaded.places and "reward" in plan
            models = RewardModelRole(recipe, loaded, residency, self.store) if has_models else None
            return RewardRole(recipe, plan, self.store, encoder, functions, models)

        self._train, self._eval = make_role(plan), make_role(evaluation_plan())

    def reward(self, is_eval: bool, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Score these sessions, all of whose rows are in the batch."""
        role = self._eval if is_eval else self._train
        role.reward(StepInfo(batch, batch.tags[0].step, prompts=prompts))


class RewardModelWorker:
    """One replica. It holds no state, so Ray itself starts a dead one again and repeats its calls."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        enter_folder()
        self.name, self.spec = name, recipe.reward.models[name]
        set_threads(own_options(self.spec).threads)
        # Another tokenizer may need more tokens than the student's for the same text.
        self._room = 2 * rollout_context(recipe, None)
        self._place: ColocatedRewardModel | None = None
        self._loading = threading.Lock()

    def begin(self) -> None:
        """Load the model. Not in __init__: of an error there Ray keeps words only."""
        self._loaded()

    def judge(self, case: JudgeInput) -> float | CannotScore:
        """The model's score of a case; a replica that Ray started again loads the model first."""
        work = score_all(self._loaded(), [case])
        timeout, owner = self.spec.deadline_s, f"reward model {self.name}"
        return run_async(work, timeout=timeout, owner=owner)[0]

    def _loaded(self) -> ColocatedRewardModel:
        with self._loading:
            if self._place is None:
                local = load_reward_model(self.name, self.spec, self._room)
                self._place = ColocatedRewardModel(self.name, local)
            return self._place


class RayRewardModel:
    """A reward model's place in a reward worker: the replica with the fewest characters waiting is asked."""

    def __init__(self, name: str, deadline_s: float, replicas: Sequence[Any]) -> None:
        self.name, self.busy_s, self._deadline_s = name, 0.0, deadline_s
        self._replicas, self._waiting = list(replicas), [0] * len(replicas)

    async def judge(self, case: JudgeInput) -> float:
        """The score of a case; CannotScore if it has none."""
        number = self._waiting.index(min(self._waiting))
        size = len(case.prompt) + len(case.response)
        self._waiting[number] += size
        try:
            call = self._replicas[number].judge.remote(case)
            # The replica's own deadline comes first; this one is for a replica that can't answer at all.
            timeout, who = 2 * self._deadline_s, f"reward model {self.name}"
            score = await ask_async(call, timeout=timeout, owner=case.name, who=who)
        finally:
            self._waiting[number] -= size
        if isinstance(score, CannotScore):
            raise score
        return score

    def close(self) -> None:
        """The replicas are the cluster's to end."""

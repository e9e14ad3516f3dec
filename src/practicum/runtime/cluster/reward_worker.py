"""A reward replica: reads finished sessions from the store, judges them, and writes what they earned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.plan import Plan, evaluation_plan
from practicum.models.load import load_tokenizer
from practicum.recipe.ways import measures
from practicum.rollout.encoder import make_encoder
from practicum.runtime.cluster.rewarder_worker import RayRewarder
from practicum.runtime.cluster.worker import NoRest, Worker
from practicum.runtime.engines import rollout_context
from practicum.runtime.hiring import make_residency
from practicum.runtime.judging import Judging
from practicum.runtime.jury import Jury, Panel, seat
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import Judge


class RewardWorker(Worker):
    """Judges whole sessions; several calls may be under way at once, if no colocated model judges."""

    def begin(self, plan: Plan, rewarders: Mapping[str, Sequence[Any]]) -> None:
        """Load what judges; `rewarders` are the replicas of reward models with resources of their own."""
        recipe = self.recipe
        tokenizer = load_tokenizer(recipe.model)
        self._encoder = make_encoder(recipe, tokenizer)
        judge, self._panel = Judge(recipe.tasks, recipe.reward), Panel()
        if recipe.reward.models and ("reward" in plan or measures(recipe)):
            # Another tokenizer may need more tokens than the student's for the same text.
            elsewhere = {
                name: RayRewarder(name, recipe.reward.models[name].deadline_s, replicas)
                for name, replicas in rewarders.items()
            }
            self._panel = seat(recipe, 2 * rollout_context(recipe, None), elsewhere)
        residency = make_residency(recipe, self._panel.sleepers())
        self._prompts: dict[Key, Prompt] = {}
        self._openings: dict[int, list[int]] = {}

        def judging(plan: Plan) -> Judging:
            asked = self._panel.places and "reward" in plan
            jury = Jury(recipe, self._panel, residency, NoRest()) if asked else None
            known = self._prompts, self._opening
            return Judging(recipe, plan, self.store, tokenizer, judge, jury, *known)

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

"""A reward model in processes of its own: it judges an answer as soon as it is finished."""

from __future__ import annotations

from practicum.recipe.teaching import RewardModel
from practicum.recipe.ways import own_options
from practicum.teachers.processes import Processes
from practicum.teachers.rewarders.case import Case, Unjudged
from practicum.teachers.worker import RewarderSetup


class OwnRewarder(Processes):
    """A place with `placement.own.replicas` processes; see `Processes` for its life."""

    def __init__(self, name: str, spec: RewardModel, room: int) -> None:
        options = own_options(spec)
        super().__init__(
            f"reward model {name}",
            f"reward.models.{name}",
            RewarderSetup(name, spec, room, options.threads),
            replicas=options.replicas,
            deadline_s=spec.deadline_s,
        )
        self.name = name

    async def judge(self, case: Case) -> float:
        """The score of a case; a process without an answer at the deadline is killed."""
        # Characters stand for tokens: which process is busiest does not depend on the tokenizer.
        size = len(case.prompt) + len(case.response)
        score, failure = await self.ask("judge", (case,), case.name, size)
        if failure is not None:
            raise Unjudged(failure)
        return score

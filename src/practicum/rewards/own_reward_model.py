"""A reward model in processes of its own: it judges an answer as soon as it is finished."""

from __future__ import annotations

from practicum.places.model_worker import RewardModelSetup
from practicum.places.replica_processes import ReplicaProcesses
from practicum.recipe.derived import own_options
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.case import CannotScore, JudgeInput


class OwnRewardModel(ReplicaProcesses):
    """A place with `placement.own.replicas` processes; see `ReplicaProcesses` for its life."""

    def __init__(self, name: str, spec: RewardModel, room: int) -> None:
        options = own_options(spec)
        super().__init__(
            f"reward model {name}",
            f"reward.models.{name}",
            RewardModelSetup(name, spec, room, options.threads),
            replicas=options.replicas,
            deadline_s=spec.deadline_s,
        )
        self.name = name

    async def judge(self, case: JudgeInput) -> float:
        """The score of a case; a process without an answer at the deadline is killed."""
        # Characters stand for tokens: which process is busiest does not depend on the tokenizer.
        size = len(case.prompt) + len(case.response)
        score, failure = await self.ask("judge", (case,), case.name, size)
        if failure is not None:
            raise CannotScore(failure)
        return score

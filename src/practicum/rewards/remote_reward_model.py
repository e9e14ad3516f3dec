"""A reward model behind a URL: a judge by `/v1/completions`, a classifier by vLLM's `/classify`.

A classifier's score is the output for its label before any softmax or sigmoid, as in the other places.
Servers that do not know `use_activation` give probabilities instead; the probe says which.
"""

from __future__ import annotations

from typing import Any

from practicum.errors import TeacherError
from practicum.places.http_client import Access, Client, Refused
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.prompted_judge import question, read_score, require_finite
from practicum.rewards.reward_place import CannotScore, JudgeInput

_ABOUT_THE_CASE = (400, 413, 422)
"""Statuses of a server that does not want what it was sent, such as a text beyond its context."""


class Unreadable(ValueError):
    """An answer without what was asked for: says what is missing."""


class RemoteRewardModel(Client):
    """A place behind a URL; at most `concurrency` requests are open at once."""

    def __init__(self, name: str, spec: RewardModel) -> None:
        assert spec.url is not None
        access = Access(
            path=f"reward.models.{name}",
            url=spec.url,
            model=spec.model,
            deadline_s=spec.deadline_s,
            concurrency=spec.concurrency,
            retries=spec.retries,
            api_key_env=spec.api_key_env,
        )
        super().__init__(f"reward model {name}", access)
        self.name, self.spec = name, spec

    async def judge(self, case: JudgeInput) -> float:
        """The score of a case. A server that refuses just this case leaves it Unjudged."""
        try:
            if self.spec.kind == "judge":
                return read_score(self.spec, await self.reply(question(self.spec, case), case.name))
            outputs = await self.outputs(case, activation=False)
        except Refused as refusal:
            if refusal.status in _ABOUT_THE_CASE:
                raise CannotScore(f"refused with status {refusal.status}: {refusal.message}") from refusal
            raise
        except Unreadable as error:
            raise TeacherError(self.problem(case.name, str(error))) from error
        if self.spec.label >= len(outputs):
            why = f"{len(outputs)} outputs, and {self.path}.label is {self.spec.label}"
            raise TeacherError(self.problem(case.name, why))
        return require_finite(outputs[self.spec.label])

    async def reply(self, text: str, about: str) -> str:
        """What the model says after a text, greedily."""
        body = {
            "model": self.model,
            "prompt": text,
            "max_tokens": self.spec.max_new_tokens,
            "temperature": 0,
        }
        answer = await self.ask("POST", "/completions", body, about)
        try:
            return str(answer["choices"][0]["text"])
        except (KeyError, IndexError, TypeError) as error:
            raise Unreadable("its answer has no choices as /v1/completions gives them") from error

    async def outputs(self, case: JudgeInput, *, activation: bool) -> list[float]:
        """The classifier's output for each label, after its softmax or sigmoid if `activation`."""
        body: dict[str, Any] = {"model": self.model, "use_activation": activation}
        if case.messages is not None:
            body |= {"messages": list(case.messages), "add_generation_prompt": False}
        else:
            body["input"] = case.prompt + case.response
        # vLLM has /classify beside /v1, not below it.
        base = self.url.removesuffix("/v1")
        answer = await self.ask("POST", "/classify", body, case.name, base=base)
        try:
            return [float(x) for x in answer["data"][0]["probs"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unreadable("its answer has no data[0].probs as /classify gives them") from error

"""A reward model behind a URL: a judge by `/v1/completions`, a classifier by vLLM's `/classify`.

A classifier's score is the output for its label before any softmax or sigmoid, as in the other places.
Servers that do not know `use_activation` give probabilities instead; `probe_reward_model` says which.
"""

from __future__ import annotations

from typing import Any

from practicum.errors import TeacherError
from practicum.places.http_client import Client, Refused, Unusable
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.loaded_reward_model import check_label
from practicum.rewards.prompted_judge import question, read_score, require_finite
from practicum.rewards.reward_place import CannotScore, JudgeInput

_ABOUT_THE_CASE = (400, 413, 422)
"""Statuses of a server that refuses this request only, such as a text beyond its context."""


class RemoteRewardModel(Client):
    """A place behind a URL; at most `concurrency` requests are open at once."""

    def __init__(self, name: str, spec: RewardModel) -> None:
        super().__init__(f"reward model {name}", f"reward.models.{name}", spec)
        self.spec = spec
        if spec.kind == "classifier":
            self.expected = (
                "a server of a classification model with /v1/models and /classify, such as vllm serve"
            )
            self.advice = "a language model is asked with kind: judge"

    async def judge(self, case: JudgeInput) -> float:
        """The score of a case. CannotScore if the server refuses only this case."""
        try:
            if self.spec.kind == "judge":
                return read_score(self.spec, await self.reply(question(self.spec, case), case.name))
            outputs = await self.outputs(case, activation=False)
        except Refused as refusal:
            if refusal.status in _ABOUT_THE_CASE:
                raise CannotScore(f"refused with status {refusal.status}: {refusal.message}") from refusal
            raise
        except Unusable as error:
            raise TeacherError(self.problem(case.name, str(error))) from error
        if self.spec.label >= len(outputs):
            why = f"{len(outputs)} outputs, and {self.path}.label is {self.spec.label}"
            raise TeacherError(self.problem(case.name, why))
        return require_finite(outputs[self.spec.label])

    async def reply(self, text: str, about: str) -> str:
        """The model's greedy continuation of a text."""
        body = {
            "model": self.model,
            "prompt": text,
            "max_tokens": self.spec.max_new_tokens,
            "temperature": 0,
        }
        answer = await self.ask("POST", "/completions", body, about)
        try:
            text = answer["choices"][0]["text"]
        except (KeyError, IndexError, TypeError) as error:
            raise Unusable("its answer has no choices as /v1/completions gives them") from error
        if not isinstance(text, str):
            raise Unusable(f"the text of its answer is a {type(text).__name__}, expected text")
        return text

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
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise Unusable("its answer has no data[0].probs as /classify gives them") from error


async def probe_reward_model(place: RemoteRewardModel, *, chat: bool) -> str:
    """Ask for the server's models and about one answer; says what it gives. RecipeError if it can't.

    `chat`: cases will be conversations.
    """
    await place.check_model()
    messages = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})
    case = JudgeInput("the probe", "1+1=", "2", "2", messages if chat else None)
    if place.spec.kind == "judge":
        with place.recipe_errors("a question"):
            await place.reply(question(place.spec, case), case.name)
        return "answers questions"
    with place.recipe_errors("to classify"):
        plain = await place.outputs(case, activation=False)
        check_label(place.path, place.spec.label, len(plain))
        active = await place.outputs(case, activation=True)
    if plain != active:
        return f"gives {len(plain)} outputs as the model has them"
    likely = min(plain) >= 0 and max(plain) <= 1
    return f"gives {len(plain)} outputs, " + (
        "which look like probabilities: it does not know use_activation"
        if likely
        else "which its model has without softmax or sigmoid"
    )

"""A reward model behind a URL: a judge by `/v1/completions`, a classifier by vLLM's `/classify`.

A classifier's score is the output for its label before any softmax or sigmoid, as in other placements.
Servers that do not know `use_activation` return probabilities instead. `probe` reports which.
"""

from __future__ import annotations

from typing import Any

from practicum.errors import TeacherError
from practicum.processes.http_client import Client, Refused, Unusable
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.judge import (
    CannotScore,
    Judge,
    JudgeInput,
    check_label,
    question,
    read_score,
    require_finite,
)

_ABOUT_THE_CASE = (400, 413, 422)
"""Statuses that reject a single request, such as a text that exceeds the context."""


class RemoteJudge(Client, Judge):
    """A reward model on a server, with at most `concurrency` concurrent requests."""

    def __init__(self, name: str, spec: RewardModel) -> None:
        super().__init__(f"reward model {name}", f"reward.models.{name}", spec)
        self.spec = spec
        if spec.kind == "classifier":
            server = "a server of a classification model with /v1/models and /classify"
            self.expected = f"{server}, such as vllm serve"
            self.advice = "for a language model, set kind: judge"

    async def judge(self, case: JudgeInput) -> float:
        try:
            if self.spec.kind == "judge":
                return read_score(await self._reply(case))
            outputs = await self._outputs(case, activation=False)
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

    async def probe(self, *, chat: bool) -> str:
        """Score one response, of a conversation if `chat`. Raise RecipeError on failure."""
        await self.check_model()
        messages = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})
        case = JudgeInput("the probe", "1+1=", "2", "2", messages if chat else None)
        if self.spec.kind == "judge":
            with self.recipe_errors("a question"):
                await self._reply(case)
            return "replies to prompts"
        with self.recipe_errors("classification"):
            plain = await self._outputs(case, activation=False)
            check_label(self.path, self.spec.label, len(plain))
            active = await self._outputs(case, activation=True)
        kind = "without softmax or sigmoid"
        if plain != active:
            kind = "unchanged by activations"
        elif min(plain) >= 0 and max(plain) <= 1:
            kind = "which look like probabilities: it does not support use_activation"
        return f"returns {len(plain)} outputs, {kind}"

    async def _reply(self, case: JudgeInput) -> str:
        body = {"model": self.model, "prompt": question(self.spec, case)}
        body |= {"max_tokens": self.spec.max_new_tokens, "temperature": 0}
        response = await self.ask("POST", "/completions", body, case.name)
        try:
            text = response["choices"][0]["text"]
        except (KeyError, IndexError, TypeError) as error:
            raise Unusable("its response has no choices like /v1/completions") from error
        if not isinstance(text, str):
            raise Unusable(f"its reply is a {type(text).__name__}, expected text")
        return text

    async def _outputs(self, case: JudgeInput, *, activation: bool) -> list[float]:
        """Return the classifier's output for each label, after its softmax or sigmoid if `activation`."""
        body: dict[str, Any] = {"model": self.model, "use_activation": activation}
        if case.messages is not None:
            body |= {"messages": list(case.messages), "add_generation_prompt": False}
        else:
            body["input"] = case.prompt + case.response
        # In vLLM, /classify is next to /v1, not below it.
        response = await self.ask("POST", "/classify", body, case.name, base=self.url.removesuffix("/v1"))
        try:
            return [float(x) for x in response["data"][0]["probs"]]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise Unusable("its response has no data[0].probs like /classify") from error

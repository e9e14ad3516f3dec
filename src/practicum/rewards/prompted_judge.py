"""A prompted judge: a language model that is asked about an answer and whose first number is the score."""

from __future__ import annotations

import math
import re

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.engines.protocol import Counter, GenerateRequest, Sampling
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.recipe.checks.value_forms import fields_of, fill
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.reward_place import CannotScore, JudgeInput
from practicum.user_code import shorten, speakable

SLOTS = 16
"""Questions that a judge answers at once."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_SHOWN = 80
_LARGEST = 3.4e38


def question(model: RewardModel, case: JudgeInput) -> str:
    """The text that a judge is asked to continue."""
    if case.answer is None and "answer" in fields_of(model.prompt):
        raise CannotScore("has a prompt with {answer}, and this row has none")
    known = {"prompt": case.prompt, "response": case.response, "answer": case.answer or ""}
    return speakable(fill(model.prompt, known))


def read_score(model: RewardModel, reply: str) -> float:
    """The first number of a reply, times the recipe's scale."""
    number = _NUMBER.search(reply)
    if number is None:
        raise CannotScore(f"replied {shorten(reply, _SHOWN)!r}, which has no number")
    return require_finite(model.scale * float(number[0]))


def require_finite(score: float) -> float:
    """The score, if one can train on it: rewards are float32."""
    if not math.isfinite(score) or abs(score) > _LARGEST:
        raise CannotScore(f"gave the score {score}, expected a finite number")
    return score


class PromptedJudge:
    """A causal language model in this process, asked greedily through its own torch engine.

    Question and reply have room for `context` tokens. It is awake at first.
    """

    def __init__(
        self,
        spec: RewardModel,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop: frozenset[int],
        context: int,
    ) -> None:
        self.spec, self.model, self._tokenizer, self._context = spec, model, tokenizer, context
        self._sampling = Sampling(max_new_tokens=spec.max_new_tokens, stop=stop, greedy=True)
        self._engine = TorchEngine(
            model, slots=SLOTS, context=context, prefill_tokens=spec.batch_tokens, owns_weights=True
        )
        self.wake, self.sleep = self._engine.wake, self._engine.sleep
        self.offload, self.close = self._engine.offload, self._engine.close

    async def judge(self, case: JudgeInput) -> float:
        """The number in the model's reply about an answer."""
        ids = self._tokenizer.encode(question(self.spec, case))
        if len(ids) + self.spec.max_new_tokens > self._context:
            raise CannotScore(
                f"has a context of {self._context} tokens, and the question with the reply takes "
                f"{len(ids)} + {self.spec.max_new_tokens}"
            )
        made = await self._engine.generate(GenerateRequest(ids, self._sampling, Counter(0, 0)))
        return read_score(self.spec, str(self._tokenizer.decode(made.tokens, skip_special_tokens=True)))

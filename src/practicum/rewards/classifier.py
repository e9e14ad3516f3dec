"""A classifier: a sequence-classification model whose output for one label is the score of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.engines.torch.engine_thread import EngineThread, Job, Outcome
from practicum.errors import EngineError
from practicum.models.load_model import context_length
from practicum.models.offloaded_weights import OffloadedWeights, OffloadTarget, return_memory
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.reward_place import CannotScore, JudgeInput


@dataclass(eq=False, slots=True)
class _Job(Job):
    """One answer to score, as the classifier's tokens."""

    ids: list[int]


def encode_case(case: JudgeInput, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Prompt and answer as the classifier reads them: by its chat template if it has one and they are a chat.

    A text without a template gets the tokenizer's own special tokens.
    """
    if case.messages is not None and tokenizer.chat_template:
        ids: Any = tokenizer.apply_chat_template(list(case.messages), tokenize=True, return_dict=False)
    else:
        ids = tokenizer.encode(case.prompt + case.response)
    return [int(i) for i in ids]


class Classifier:
    """A classifier in this process. Rows that arrive together go in batches of up to `batch_tokens` tokens.

    A row's score does not depend on its batch beyond rounding. It is awake at first.
    """

    def __init__(self, spec: RewardModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.spec, self.model, self._tokenizer = spec, model, tokenizer
        self._context = context_length(model)
        text_config: Any = model.config.get_text_config()
        if text_config.pad_token_id is None:
            text_config.pad_token_id = tokenizer.pad_token_id
        pad: Any = text_config.pad_token_id
        self._pad: int | None = pad
        self._waiting: list[_Job] = []
        self._offloaded: OffloadedWeights | None = None
        self._awake = True
        self._thread = EngineThread(self._step, self._waiting.clear, "classifier")

    async def judge(self, case: JudgeInput) -> float:
        """The output for the recipe's label, before any softmax or sigmoid."""
        if not self._awake:
            raise EngineError("the classifier sleeps: call wake() first")
        ids = encode_case(case, self._tokenizer)
        if not ids:
            raise CannotScore("sees no tokens in prompt and answer")
        if self._context is not None and len(ids) > self._context:
            raise CannotScore(f"has a context of {self._context} tokens; prompt and answer take {len(ids)}")
        return await self._thread.submit(_Job(ids))

    @torch.no_grad()
    def _step(self, arrived: list[Job]) -> tuple[list[Outcome], bool]:
        """Judge one batch: outcomes, and whether work is left."""
        if not self._awake:
            raise EngineError("the classifier sleeps: call wake() first")
        self._waiting += [job for job in arrived if isinstance(job, _Job)]
        # Rows of similar lengths go together, so that there is little padding.
        self._waiting[:] = sorted((j for j in self._waiting if not j.abandoned), key=lambda j: len(j.ids))
        count = fitting([len(job.ids) for job in self._waiting], self.spec.batch_tokens)
        # Without a padding token the model can't tell where a row of a batch ends.
        count = min(count, 1) if self._pad is None else count
        jobs, self._waiting[:] = self._waiting[:count], self._waiting[count:]
        if not jobs:
            return [], False
        scores_B = self._scores([job.ids for job in jobs])
        return list(zip(jobs, map(_finite_score, scores_B.tolist()), strict=True)), bool(self._waiting)

    def _scores(self, rows: Sequence[list[int]]) -> Tensor:
        width = max(map(len, rows))
        fill = 0 if self._pad is None else self._pad
        ids_BT = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
        mask_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self.model.device
        output = self.model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device))
        return output.logits[:, self.spec.label].float().cpu()

    def wake(self) -> None:
        """Be ready, with the weights on the device."""
        with self._thread.take_turn("wake"):
            if self._offloaded is not None:
                self._offloaded.restore()
                self._offloaded = None
            self._awake = True

    def sleep(self) -> None:
        """Judge no more until `wake`; a batch under way is waited for."""
        with self._thread.take_turn("go to sleep"):
            self._awake = False
            return_memory(self.model.device)

    def offload(self, where: OffloadTarget) -> None:
        """Move the weights away while it sleeps."""
        assert not self._awake
        if self._offloaded is None:
            self._offloaded = OffloadedWeights(self.model, where)
        else:
            self._offloaded.move(where)
        return_memory(self.model.device)

    def close(self) -> None:
        """Stop; cases under way fail."""
        self._thread.close()
        if self._offloaded is not None:
            self._offloaded.drop()


def fitting(lengths: Sequence[int], budget: int) -> int:
    """How many rows, shortest first, fit into a padded batch of `budget` tokens; one in any case."""
    count = 0
    for number, length in enumerate(lengths, start=1):
        if number > 1 and number * length > budget:
            break
        count = number
    return count


def _finite_score(score: float) -> float | CannotScore:
    return score if math.isfinite(score) else CannotScore(f"gave the score {score}, expected a finite number")

"""A classifier: a sequence-classification model whose output for one label is the score of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as count_from
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.engines.torch.engine_thread import EngineThread, Job, Outcome
from practicum.errors import EngineError
from practicum.models.batch_invariance import mlp_width, padded_keys, padded_tokens
from practicum.models.fingerprint import fingerprint_ids
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

    A row's score is the same, bit for bit, in any batch (`models/batch_invariance.py`): which rows arrive
    together is a matter of timing. Where a probe finds that it is not, rows go one by one. Awake at first.
    """

    def __init__(self, spec: RewardModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.spec, self.model, self._tokenizer = spec, model, tokenizer
        self._context, self._mlp = context_length(model), mlp_width(model)
        text_config: Any = model.config.get_text_config()
        if text_config.pad_token_id is None:
            text_config.pad_token_id = tokenizer.pad_token_id
        pad: Any = text_config.pad_token_id
        self._pad: int | None = pad
        self._waiting: list[_Job] = []
        self._offloaded: OffloadedWeights | None = None
        self._awake = True
        self._thread = EngineThread(self._step, self._waiting.clear, "classifier")
        self._alone = self._pad is None or not self._is_invariant()
        """Whether a batch has one row."""

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
        self._waiting[:] = sorted((j for j in self._waiting if not j.abandoned), key=lambda j: len(j.ids))
        jobs = self._next_batch()
        self._waiting[:] = self._waiting[len(jobs) :]
        if not jobs:
            return [], False
        scores_B = self._scores([job.ids for job in jobs])
        return list(zip(jobs, map(_finite_score, scores_B.tolist()), strict=True)), bool(self._waiting)

    def _next_batch(self) -> list[_Job]:
        """The shortest rows that wait: those that are padded to the same width, as far as they fit."""
        if self._alone:  # without a padding token, the model can't tell where a row of a batch ends
            return self._waiting[:1]
        alike = [j for j in self._waiting if self._shape(j.ids) == self._shape(self._waiting[0].ids)]
        return alike[: max(1, self.spec.batch_tokens // self._width(alike[0].ids))] if alike else []

    @torch.no_grad()
    def _is_invariant(self) -> bool:
        """Whether rows have the same scores alone and among others."""
        one = fingerprint_ids(self.model.get_input_embeddings().weight.shape[0])  # pyright: ignore
        for row in (one[:3], one, one * 3):
            if self._context is not None and len(row) > self._context:
                continue
            others = [row[::-1]] * 2
            if not torch.equal(self._scores([row]), self._scores([*others, row, *others])[2:3]):
                return False
        return True

    def _width(self, ids: Sequence[int]) -> int:
        """The width that a row is padded to, by its own length alone."""
        width = padded_keys(len(ids) + 1)
        return width if self._context is None else min(width, self._context)

    def _shape(self, ids: Sequence[int]) -> tuple[int, bool]:
        """What rows of a batch have in common; one without padding takes another way through attention."""
        width = self._width(ids)
        return width, len(ids) == width

    def _scores(self, rows: Sequence[list[int]]) -> Tensor:
        if self._pad is None:
            padded, width = [*rows], len(rows[0])
        else:
            width = self._width(rows[0])
            count = next(n for n in count_from(len(rows)) if padded_tokens(n * width, self._mlp) == n * width)
            padded = [*rows, *[rows[0]] * (count - len(rows))]
        fill = 0 if self._pad is None else self._pad
        ids_BT = torch.tensor([[*row, *[fill] * (width - len(row))] for row in padded])
        mask_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in padded])
        device = self.model.device
        output = self.model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device))
        return output.logits[: len(rows), self.spec.label].float().cpu()

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


def _finite_score(score: float) -> float | CannotScore:
    return score if math.isfinite(score) else CannotScore(f"gave the score {score}, expected a finite number")

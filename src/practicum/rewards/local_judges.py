"""Reward models in this process: a classifier's output for one label, or the number in a judge's reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as count_from
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from practicum.cpu.batch_invariance import is_even, mlp_width, padded_keys
from practicum.devices import pick_device
from practicum.engines.protocol import Counter, GenerateRequest, Sampling, Sleeper
from practicum.engines.torch.engine_thread import EngineThread, Job, Outcome
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError, RecipeError
from practicum.models.fingerprint import fingerprint_ids
from practicum.models.load_model import context_length, load_model, stop_ids
from practicum.models.model_files import must_read, read_tokenizer, require_model_folder
from practicum.models.offloaded_weights import (
    OffloadedWeights,
    OffloadTarget,
    distinct_tensors,
    return_memory,
)
from practicum.recipe.schema.recipe import Model
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

SLOTS = 16
"""Maximum concurrent requests of a judge."""


@dataclass(eq=False, slots=True)
class _Job(Job):
    """One response to score, as the classifier's tokens."""

    ids: list[int]


def encode_case(case: JudgeInput, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Encode prompt and response, for chats with the classifier's chat template if it has one."""
    if case.messages is not None and tokenizer.chat_template:
        ids: Any = tokenizer.apply_chat_template(list(case.messages), tokenize=True, return_dict=False)
    else:
        ids = tokenizer.encode(case.prompt + case.response)
    return [int(i) for i in ids]


class Classifier(Judge, Sleeper):
    """A classifier that batches concurrent rows up to `batch_tokens` tokens.

    A row's score is bit-identical in any batch (`cpu/batch_invariance.py`), because timing determines which
    rows arrive together. If a probe finds a difference, rows are scored one by one. It starts awake.
    """

    def __init__(self, spec: RewardModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.spec, self.model, self._tokenizer, self.sleeper = spec, model, tokenizer, self
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
        # Without a padding token, the model can't find the end of a row in a batch.
        self._is_batched = self._pad is not None and self._is_invariant()

    @property
    def on_cpu(self) -> bool:
        return self.model.device.type == "cpu"

    @property
    def own_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in distinct_tensors(self.model))

    @property
    def step_s(self) -> float:
        return self._thread.step_s

    async def judge(self, case: JudgeInput) -> float:
        """Return the output for the recipe's label, before any softmax or sigmoid."""
        ids = encode_case(case, self._tokenizer)
        if not ids:
            raise CannotScore("sees no tokens in prompt and answer")
        if self._context is not None and len(ids) > self._context:
            raise CannotScore(f"has a context of {self._context} tokens; prompt and answer take {len(ids)}")
        return require_finite(await self._thread.submit(_Job(ids)))

    @torch.no_grad()
    def _step(self, arrived: list[Job]) -> tuple[list[Outcome], bool]:
        """Score one batch. Return outcomes, and True if work remains."""
        if not self._awake:
            raise EngineError("the classifier sleeps: call wake() first")
        self._waiting += [job for job in arrived if isinstance(job, _Job)]
        self._waiting[:] = sorted((j for j in self._waiting if not j.abandoned), key=lambda j: len(j.ids))
        jobs = self._next_batch()
        self._waiting[:] = self._waiting[len(jobs) :]
        scores = self._scores([job.ids for job in jobs]).tolist() if jobs else []
        return list(zip(jobs, scores, strict=True)), bool(self._waiting)

    def _next_batch(self) -> list[_Job]:
        """Return the shortest waiting rows with one padded width, up to the token limit."""
        if not self._is_batched or not self._waiting:
            return self._waiting[:1]

        def shape(job: _Job) -> tuple[int, bool]:  # a row without padding takes another way through attention
            width = self._width(job.ids)
            return width, len(job.ids) == width

        alike = [job for job in self._waiting if shape(job) == shape(self._waiting[0])]
        return alike[: max(1, self.spec.batch_tokens // self._width(alike[0].ids))]

    @torch.no_grad()
    def _is_invariant(self) -> bool:
        one = fingerprint_ids(self.model.get_input_embeddings().weight.shape[0])  # pyright: ignore
        for row in (one[:3], one, one * 3):
            others = [row[::-1]] * 2
            fits = self._context is None or len(row) <= self._context
            if fits and not torch.equal(self._scores([row]), self._scores([*others, row, *others])[2:3]):
                return False
        return True

    def _width(self, ids: Sequence[int]) -> int:
        """Return the padded width of a row, which depends only on its length."""
        width = padded_keys(len(ids) + 1)
        return width if self._context is None else min(width, self._context)

    def _scores(self, rows: Sequence[list[int]]) -> Tensor:
        padded, width = [*rows], len(rows[0])
        if self._pad is not None:
            width = self._width(rows[0])
            count = next(n for n in count_from(len(rows)) if is_even(n * width, self._mlp))
            padded += [rows[0]] * (count - len(rows))
        ids_BT = torch.tensor([[*row, *[self._pad or 0] * (width - len(row))] for row in padded])
        mask_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in padded])
        device = self.model.device
        output = self.model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device))
        return output.logits[: len(rows), self.spec.label].float().cpu()

    def wake(self) -> None:
        with self._thread.take_turn("wake"):
            if self._offloaded is not None:
                self._offloaded.restore()
                self._offloaded = None
            self._awake = True

    def sleep(self) -> None:
        with self._thread.take_turn("go to sleep"):
            self._awake = False
            return_memory(self.model.device)

    def offload(self, where: OffloadTarget) -> None:
        assert not self._awake
        if self._offloaded is None:
            self._offloaded = OffloadedWeights(self.model, where)
        else:
            self._offloaded.move(where)
        return_memory(self.model.device)

    def close(self) -> None:
        self._thread.close()
        if self._offloaded is not None:
            self._offloaded.drop()


class PromptedJudge(Judge):
    """A causal language model that replies greedily within `context` tokens. It starts awake."""

    def __init__(
        self, spec: RewardModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: int
    ) -> None:
        self.spec, self._tokenizer, self._context = spec, tokenizer, context
        stop = stop_ids(getattr(model, "generation_config", None), tokenizer)
        self._sampling = Sampling(max_new_tokens=spec.max_new_tokens, stop=stop, greedy=True)
        self._engine = TorchEngine(
            model, slots=SLOTS, context=context, prefill_tokens=spec.batch_tokens, owns_weights=True
        )
        self.sleeper, self.close = self._engine, self._engine.close

    @property
    def step_s(self) -> float:
        return self._engine.step_s

    async def judge(self, case: JudgeInput) -> float:
        ids, new_tokens = self._tokenizer.encode(question(self.spec, case)), self.spec.max_new_tokens
        if len(ids) + new_tokens > self._context:
            needed = f"the question with the reply takes {len(ids)} + {new_tokens}"
            raise CannotScore(f"has a context of {self._context} tokens, and {needed}")
        reply = await self._engine.generate(GenerateRequest(ids, self._sampling, Counter(0, 0)))
        return read_score(str(self._tokenizer.decode(reply.tokens, skip_special_tokens=True)))


def load_judge(name: str, spec: RewardModel, room: int) -> Classifier | PromptedJudge:
    """Load the model on its device, with memory for texts of `room` tokens plus a judge's prompt."""
    path = f"reward.models.{name}"
    tokenizer = load_tokenizer(spec.model, path)
    if spec.kind == "judge":
        source = Model(path=spec.model, dtype=spec.dtype, device=spec.device)
        model = load_model(source, 0, key=f"{path}.model")
        needed = room + len(tokenizer.encode(spec.prompt)) + spec.max_new_tokens
        return PromptedJudge(spec, model, tokenizer, min(needed, context_length(model) or needed))
    with must_read(spec.model, f"{path}.model", "a sequence-classification model in HuggingFace format"):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            spec.model, dtype=getattr(torch, spec.dtype), output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):  # transformers initialises them randomly
        found = f"{spec.model} without the weights {', '.join(missing[:3])}"
        advice = "a language model has no such output: use a reward model, or set kind: judge"
        raise RecipeError(f"{path}.model", found, "a trained sequence-classification model", advice)
    check_label(path, spec.label, model.config.num_labels or 0)
    return Classifier(spec, model.to(pick_device(spec.device, f"{path}.device")).eval(), tokenizer)


def load_tokenizer(source: str, path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer from the reward model's folder. `path` is the model's recipe key."""
    require_model_folder(source, f"{path}.model")
    with must_read(source, f"{path}.model", "a model with its tokenizer"):
        return read_tokenizer(source)

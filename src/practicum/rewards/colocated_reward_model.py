"""Reward models in this process: loaded by kind, and asleep until the rollout is done where colocated."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from practicum.errors import EngineError, RecipeError, TeacherError
from practicum.models.load_model import (
    context_length,
    load_model,
    pick_device,
    require_model_folder,
    stop_ids,
)
from practicum.models.model_files import read_tokenizer
from practicum.models.offloaded_weights import OffloadTarget, distinct_tensors
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.case import JudgeInput
from practicum.rewards.classifier import Classifier
from practicum.rewards.prompted_judge import PromptedJudge


class LoadedRewardModel(Protocol):
    """A reward model in this process, awake at first."""

    model: PreTrainedModel

    async def judge(self, case: JudgeInput) -> float: ...

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def put_aside(self, where: OffloadTarget) -> None: ...

    def close(self) -> None: ...


def load_reward_model(name: str, spec: RewardModel, room: int) -> LoadedRewardModel:
    """The model on its device; a judge gets memory for texts of `room` tokens beside its own prompt's."""
    path = f"reward.models.{name}"
    tokenizer = load_tokenizer(spec.model, path)
    if spec.kind == "classifier":
        model = _load_classifier(spec, path)
        check_label(path, spec.label, model.config.num_labels or 0)
        return Classifier(spec, model, tokenizer)
    source = Model(path=spec.model, dtype=spec.dtype, device=spec.device)
    model = load_model(source, 0, key=f"{path}.model")
    needed = room + len(tokenizer.encode(spec.prompt)) + spec.max_new_tokens
    context = min(needed, context_length(model) or needed)
    return PromptedJudge(spec, model, tokenizer, stop=stop_ids(model, tokenizer), context=context)


def load_tokenizer(source: str, path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the reward model's own folder; `path` is the model's key in the recipe."""
    require_model_folder(source, f"{path}.model")
    try:
        return read_tokenizer(source)
    except (OSError, ValueError) as error:
        expected = "a model with its tokenizer"
        raise RecipeError(f"{path}.model", source, expected, str(error).splitlines()[0]) from error


def check_label(path: str, label: int, count: int) -> None:
    """A RecipeError if the classifier has no such output."""
    if label >= count:
        expected = "0, its only output" if count == 1 else f"0 to {count - 1}: it has {count} outputs"
        raise RecipeError(f"{path}.label", f"{label}", expected)


def _load_classifier(spec: RewardModel, path: str) -> PreTrainedModel:
    require_model_folder(spec.model, f"{path}.model")
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            spec.model, dtype=getattr(torch, spec.dtype), output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        expected = "a sequence-classification model in HuggingFace format"
        raise RecipeError(f"{path}.model", spec.model, expected, str(error).splitlines()[0]) from error
    require_trained(path, spec.model, info)
    return model.to(pick_device(spec.device)).eval()


def require_trained(path: str, source: str, info: Any) -> None:
    """A RecipeError if parts of the model were not in its folder and so are random numbers."""
    if missing := sorted(info["missing_keys"]):
        raise RecipeError(
            f"{path}.model",
            f"{source} without the weights {', '.join(missing[:3])}",
            "a trained sequence-classification model",
            "a language model has no such output: use a reward model, or ask it with kind: judge",
        )


class ColocatedRewardModel:
    """A reward model that judges between `wake` and `sleep`; `Residency` says when, by `resident.name`."""

    def __init__(self, name: str, local: LoadedRewardModel) -> None:
        self.name, self.local, self.busy_s = name, local, 0.0
        self.resident = _Resident(self)

    async def judge(self, case: JudgeInput) -> float:
        """The model's score; it must be awake."""
        try:
            return await self.local.judge(case)
        except EngineError as error:
            raise TeacherError(f"reward model {self.name} failed in {case.name}: {error}") from error

    def close(self) -> None:
        """Stop."""
        self.local.close()


class _Resident:
    """A colocated reward model as `Residency` sees it, under a name that no teacher can have."""

    def __init__(self, rewarder: ColocatedRewardModel) -> None:
        model = rewarder.local.model
        self.name = f"reward.models.{rewarder.name}"
        self.nbytes = sum(tensor.nbytes for tensor in distinct_tensors(model))
        self.on_cpu = model.device.type == "cpu"
        self._rewarder, self._woken = rewarder, time.perf_counter()

    def wake(self) -> None:
        self._woken = time.perf_counter()
        self._rewarder.local.wake()

    def sleep(self) -> None:
        self._rewarder.local.sleep()
        self._rewarder.busy_s += time.perf_counter() - self._woken

    def put_aside(self, where: OffloadTarget) -> None:
        self._rewarder.local.put_aside(where)

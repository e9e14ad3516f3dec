"""Reward models that are loaded: in this process, or in their own processes."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from practicum.devices import pick_device
from practicum.errors import RecipeError
from practicum.models.load_model import (
    context_length,
    load_model,
    require_model_folder,
    stop_ids,
)
from practicum.models.model_files import must_read, read_tokenizer
from practicum.places.model_cache import ColocatedModel, SleepableEngine
from practicum.places.model_processes import ModelProcesses
from practicum.processes.child_main import ChildRequest, Served
from practicum.recipe.derived import own_options
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.rewards.classifier import Classifier
from practicum.rewards.prompted_judge import PromptedJudge
from practicum.rewards.reward_place import CannotScore, JudgeInput


class LoadedRewardModel(SleepableEngine, Protocol):
    """A reward model in this process, awake at first."""

    model: PreTrainedModel

    async def judge(self, case: JudgeInput) -> float:
        """The model's score of an answer."""
        ...


class ColocatedRewardModel(ColocatedModel):
    """A reward model that works between `wake` and `sleep`; `ModelCache` says when.

    Its name is its key in the recipe, which no teacher can have.
    """

    def __init__(self, name: str, engine: LoadedRewardModel) -> None:
        super().__init__(f"reward.models.{name}", f"reward model {name}", engine.model, engine)
        self.engine = engine

    async def judge(self, case: JudgeInput) -> float:
        """The model's score; it must be awake."""
        with self.named_errors(case.name):
            return await self.engine.judge(case)


class OwnRewardModel(ModelProcesses):
    """A reward model in `placement.own.replicas` processes: it scores an answer as soon as it is finished."""

    def __init__(self, name: str, spec: RewardModel, room: int) -> None:
        load = partial(_load_served, name, spec, room)
        path = f"reward.models.{name}"
        super().__init__(f"reward model {name}", path, load, own_options(spec), deadline_s=spec.deadline_s)

    async def judge(self, case: JudgeInput) -> float:
        """The score of a case; a process without an answer at the deadline is killed."""
        # Characters stand for tokens: which process is busiest does not depend on the tokenizer.
        size = len(case.prompt) + len(case.response)
        score, failure = await self.ask("judge", (case,), case.name, size)
        if failure is not None:
            raise CannotScore(failure)
        return score


class _ServedRewardModel:
    """The child's side of OwnRewardModel: a case's score, or why it has none."""

    WORK: ClassVar[frozenset[str]] = frozenset({"judge"})

    def __init__(self, engine: LoadedRewardModel) -> None:
        self._engine, self.close = engine, engine.close

    async def answer(self, request: ChildRequest) -> Any:
        """The score and None, or None and why there is no score."""
        try:
            return await self._engine.judge(*request.args), None
        except CannotScore as failure:
            return None, str(failure)


def _load_served(name: str, spec: RewardModel, room: int) -> tuple[Served, int | None]:
    engine = load_reward_model(name, spec, room)
    return _ServedRewardModel(engine), context_length(engine.model)


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
    stop = stop_ids(getattr(model, "generation_config", None), tokenizer)
    return PromptedJudge(spec, model, tokenizer, stop=stop, context=context)


def load_tokenizer(source: str, path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the reward model's own folder; `path` is the model's key in the recipe."""
    require_model_folder(source, f"{path}.model")
    with must_read(source, f"{path}.model", "a model with its tokenizer"):
        return read_tokenizer(source)


def check_label(path: str, label: int, count: int) -> None:
    """A RecipeError if the classifier has no such output."""
    if label >= count:
        expected = "0, its only output" if count == 1 else f"0 to {count - 1}: it has {count} outputs"
        raise RecipeError(f"{path}.label", f"{label}", expected)


def _load_classifier(spec: RewardModel, path: str) -> PreTrainedModel:
    require_model_folder(spec.model, f"{path}.model")
    expected = "a sequence-classification model in HuggingFace format"
    with must_read(spec.model, f"{path}.model", expected):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            spec.model, dtype=getattr(torch, spec.dtype), output_loading_info=True
        )
    require_trained(path, spec.model, info)
    return model.to(pick_device(spec.device, f"{path}.device")).eval()


def require_trained(path: str, source: str, info: Any) -> None:
    """A RecipeError if parts of the model were not in its folder and so are random numbers."""
    if missing := sorted(info["missing_keys"]):
        raise RecipeError(
            f"{path}.model",
            f"{source} without the weights {', '.join(missing[:3])}",
            "a trained sequence-classification model",
            "a language model has no such output: use a reward model, or ask it with kind: judge",
        )

"""A teacher's or reward model's process: loads it, then answers what comes through a pipe until that closes.

Nothing here imports torch before `main` runs, because the number of threads is read when torch is loaded.
Tensors travel as safetensors bytes: torch's own pickling would share memory with a process that may die.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ClassVar, cast

from practicum.processes.child_main import ChildRequest, Served, serve
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import RewardModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from practicum.engines.torch.torch_engine import TorchEngine
    from practicum.rewards.colocated_reward_model import LoadedRewardModel


@dataclass(frozen=True, slots=True)
class TeacherSetup:
    """What a process needs to know to become a teacher."""

    model: Model
    seed: int
    key: str
    """The recipe's key of the model, for errors."""
    threads: int
    batch_tokens: int
    context: int | None


@dataclass(frozen=True, slots=True)
class RewardModelSetup:
    """What a process needs to know to become a reward model; see `rewarders.local.load_reward_model`."""

    name: str
    model: RewardModel
    room: int
    threads: int


@dataclass(frozen=True, slots=True)
class LoadedModelFacts:
    """What a teacher's or reward model is like."""

    vocab: int
    hidden: int
    context: int | None
    """Longest sequence it may score; None if neither recipe nor model say."""
    threads: int


def main(pipe: Connection, setup: TeacherSetup | RewardModelSetup) -> None:
    """Run the process from its start to its end.

    It answers `score`: (ids, start, top_k, temperature, hidden, vocab, pictures as safetensors); `load`:
    (path, version); `head`: (); `judge`: (case,).
    """
    os.environ["OMP_NUM_THREADS"] = str(setup.threads)
    serve(pipe, lambda: _load(setup))


def _load(setup: TeacherSetup | RewardModelSetup) -> tuple[Served, LoadedModelFacts]:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(setup.threads)
    disable_progress_bar()  # bars of several processes would draw over each other
    return _load_rewarder(setup) if isinstance(setup, RewardModelSetup) else _load_teacher(setup)


def _load_teacher(setup: TeacherSetup) -> tuple[Served, LoadedModelFacts]:
    from practicum.engines.torch.torch_engine import TorchEngine
    from practicum.models.load_model import context_length, load_model
    from practicum.places.place import UNDECLARED

    model = load_model(setup.model, setup.seed, key=setup.key)
    longest = context_length(model)
    # Scoring needs no KV memory, so as little as there can be is set aside.
    context = min(2, longest) if longest is not None else setup.context or UNDECLARED
    engine = TorchEngine(model, slots=1, context=context, score_tokens=setup.batch_tokens)
    limits = [n for n in (setup.context, longest) if n is not None]
    return _Teacher(engine, model), _facts(model, min(limits, default=None))


def _load_rewarder(setup: RewardModelSetup) -> tuple[Served, LoadedModelFacts]:
    from practicum.models.load_model import context_length
    from practicum.rewards.colocated_reward_model import load_reward_model

    local = load_reward_model(setup.name, setup.model, setup.room)
    return _Rewarder(local), _facts(local.model, context_length(local.model))


def _facts(model: PreTrainedModel, context: int | None) -> LoadedModelFacts:
    import torch

    vocab, hidden = tuple(cast("torch.Tensor", model.get_input_embeddings().weight).shape)
    return LoadedModelFacts(vocab, hidden, context, torch.get_num_threads())


class _Rewarder:
    """A reward model: a case's score, or why it has none."""

    WORK: ClassVar[frozenset[str]] = frozenset({"judge"})

    def __init__(self, local: LoadedRewardModel) -> None:
        self._local, self.close = local, local.close

    async def answer(self, request: ChildRequest) -> Any:
        from practicum.rewards.case import CannotScore

        try:
            return await self._local.judge(*request.args), None
        except CannotScore as failure:
            return None, str(failure)


class _Teacher:
    """A teacher's engine: scores, its output head, other weights."""

    WORK: ClassVar[frozenset[str]] = frozenset({"score"})

    def __init__(self, engine: TorchEngine, model: PreTrainedModel) -> None:
        self._engine, self._model, self.close = engine, model, engine.close

    async def answer(self, request: ChildRequest) -> Any:
        if request.what == "score":
            return await self._score(*request.args)
        if request.what == "load":
            return self._take_weights(*request.args)
        return self._head()

    async def _score(
        self,
        ids: list[int],
        start: int,
        top_k: int,
        temperature: float,
        hidden: bool,
        vocab: int | None,
        pictures: bytes | None,
    ) -> Any:
        from safetensors.torch import load, save

        from practicum.models.images import Images

        images = None if pictures is None else Images.from_inputs(load(pictures))
        scores = await self._engine.score(
            ids, start, top_k, temperature=temperature, hidden=hidden, vocab=vocab, images=images
        )
        tensors = {
            "logprobs": scores.logprobs,
            "topk_ids": scores.topk_ids,
            "topk_logprobs": scores.topk_logprobs,
            "hidden": scores.hidden,
        }
        return save({k: t.contiguous() for k, t in tensors.items() if t is not None}), scores.version

    def _take_weights(self, path: str, version: int) -> None:
        from safetensors.torch import load_file

        self._engine.load_weights(load_file(path).items(), version)

    def _head(self) -> Any:
        from safetensors.torch import save

        from practicum.models.output_head import OutputHead

        head = OutputHead.of(self._model)
        tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
        return save({k: t.cpu().contiguous() for k, t in tensors.items()}), astuple(head.scalings)

"""Reward models: loaded, asked for scores of answers, and their scores added to the functions' rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.keys import Key
from practicum.dataplane.store import Store
from practicum.errors import DataError, RewardError
from practicum.places.model_cache import ModelCache, Sleepable
from practicum.recipe.derived import has_own_process, own_options, scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.records.recording_store import stage_span
from practicum.rewards.loaded_reward_model import ColocatedRewardModel, OwnRewardModel, load_reward_model
from practicum.rewards.remote_reward_model import RemoteRewardModel, probe_reward_model
from practicum.rewards.reward_place import CannotScore, JudgeInput, RewardPlace, score_all
from practicum.tasks.messages import message_text
from practicum.tasks.prompts import Prompt, answer_text, chat_messages, prompt_text
from practicum.tasks.rewards import RewardResult
from practicum.user_code import shorten

_LATER_S = 5.0

Score = float | CannotScore
ModelScores = dict[str, Score]
"""The scores of one answer, by model."""


@dataclass(slots=True)
class RewardModels:
    """The reward models of a run, for training and evaluations alike."""

    places: dict[str, RewardPlace] = field(default_factory=dict)

    def sleepers(self) -> list[Sleepable]:
        """Colocated ones, for the cache that wakes them."""
        return [place for place in self.places.values() if isinstance(place, ColocatedRewardModel)]

    def close(self) -> None:
        """Stop all of them, even if one can't be."""
        with ExitStack() as stack:
            for place in self.places.values():
                stack.callback(place.close)


def load_reward_models(
    recipe: Recipe, room: int, elsewhere: Mapping[str, RewardPlace] | None = None
) -> RewardModels:
    """All reward models of the recipe, ready; if one can't be had, none stays behind.

    `room` is the tokens of the longest prompt and answer, in the model's own tokenizer. Servers are taken as
    probed (`probe_reward_servers`), and those `elsewhere` as they are.
    """
    models = RewardModels()
    with ExitStack() as undo:
        undo.callback(models.close)
        for name, spec in recipe.reward.models.items():
            if elsewhere is not None and name in elsewhere:
                models.places[name] = elsewhere[name]
            elif spec.url is not None:
                models.places[name] = RemoteRewardModel(name, spec)
            elif has_own_process(spec.placement):
                models.places[name] = own = OwnRewardModel(name, spec, room)
                own.start()
            else:
                models.places[name] = ColocatedRewardModel(name, load_reward_model(name, spec, room))
        for name, place in models.places.items():
            if isinstance(place, OwnRewardModel):
                place.ready(own_options(recipe.reward.models[name]).start_s)
        undo.pop_all()
    return models


def probe_reward_servers(recipe: Recipe, *, chat: bool) -> list[str]:
    """Whether reward models behind URLs can judge; `chat`: some prompts are conversations."""
    findings = []
    for name, spec in recipe.reward.models.items():
        if spec.url is None:
            continue
        with closing(RemoteRewardModel(name, spec)) as place:
            owner = f"the probe of reward model {name} at {spec.url}"
            finding = run_async(probe_reward_model(place, chat=chat), timeout=spec.deadline_s, owner=owner)
        findings.append(f"reward model {name}: {spec.url} {finding}")
    return findings


class RewardModelRole:
    """Adds the scores of the reward models to the functions' rewards."""

    def __init__(self, recipe: Recipe, loaded: RewardModels, residency: ModelCache, store: Store) -> None:
        """Their time is noted in the record of the store, if it has one."""
        self.recipe, self.loaded, self.residency, self.store = recipe, loaded, residency, store
        self.models = recipe.reward.models
        self._streamed = [name for name, spec in self.models.items() if scores_during_rollout(spec)]
        self._colocated = [name for name, spec in self.models.items() if not scores_during_rollout(spec)]

    def model_input(self, key: Key, prompt: Prompt, response: str) -> JudgeInput:
        """What the models are shown of an answer."""
        task = self.recipe.tasks[prompt.task]
        messages = None
        if task.chat or not isinstance(prompt.content, str):
            messages = _conversation(prompt, task.system, response)
        return JudgeInput(str(key), prompt_text(prompt.content), response, _answer(prompt), messages)

    def add(
        self, results: Sequence[RewardResult], inputs: Sequence[JudgeInput], step: int = 0
    ) -> list[RewardResult]:
        """The functions' results with the models' scores; those without a reward stay as they are.

        An answer that a model can't score is a RewardError, or failed, as reward.on_error says. The student's
        engines must sleep if there are colocated models: each is woken once.
        """
        shown = [inputs[i] for i in _open(results)]
        scores: list[ModelScores] = [{} for _ in shown]
        if self._streamed and shown:
            owner = f"reward models ({len(shown)} answers)"
            # The deadline of each model comes first, twice of it for one that Ray restarts, and names it.
            timeout = 2 * max(self.models[name].deadline_s for name in self._streamed) + _LATER_S
            scores = run_async(self._stream(shown, step), timeout=timeout, owner=owner)
        for name in self._colocated if shown else ():
            for of_answer, score in zip(scores, self._woken(name, shown, step), strict=True):
                of_answer[name] = score
        return self._joined(results, inputs, scores)

    async def add_streamed(
        self, results: Sequence[RewardResult], inputs: Sequence[JudgeInput], step: int = 0
    ) -> list[RewardResult]:
        """As `add`, on the event loop, where all models have their own resources."""
        return self._joined(results, inputs, await self._stream([inputs[i] for i in _open(results)], step))

    async def _stream(self, inputs: Sequence[JudgeInput], step: int) -> list[ModelScores]:
        """The scores of each answer by the models with their own resources, all at once."""

        async def ask(name: str, answer: JudgeInput) -> Score:
            with stage_span(self.store, "reward", step, name, 1):
                return (await score_all(self.loaded.places[name], [answer]))[0]

        scores = await gather_all(ask(name, answer) for answer in inputs for name in self._streamed)
        size = len(self._streamed)
        return [
            dict(zip(self._streamed, scores[i * size : (i + 1) * size], strict=True))
            for i in range(len(inputs))
        ]

    def _woken(self, name: str, inputs: Sequence[JudgeInput], step: int) -> list[Score]:
        place, deadline = self.loaded.places[name], self.models[name].deadline_s
        assert isinstance(place, ColocatedRewardModel)
        with stage_span(self.store, "reward", step, name, len(inputs)), self.residency.awake(place.name):
            owner = f"reward model {name} ({len(inputs)} answers)"
            return run_async(score_all(place, inputs), timeout=deadline, owner=owner)

    def _joined(
        self, results: Sequence[RewardResult], inputs: Sequence[JudgeInput], scores: Sequence[ModelScores]
    ) -> list[RewardResult]:
        joined = list(results)
        for i, of_answer in zip(_open(results), scores, strict=True):
            joined[i] = self._with_models(results[i], inputs[i], of_answer)
        return joined

    def _with_models(self, result: RewardResult, shown: JudgeInput, scores: ModelScores) -> RewardResult:
        assert result.reward is not None
        reward, parts, failure = result.reward, dict(result.parts), None
        for name in self.models:
            score = scores[name]
            if isinstance(score, CannotScore):
                failure = failure or f"reward model {name} {score}"
                if self.recipe.reward.on_error == "stop":
                    raise RewardError(_describe(name, score, shown)) from score
                continue
            parts[name] = score
            reward += self.models[name].weight * score
        return RewardResult(reward, parts) if failure is None else RewardResult(None, parts, failure)


def _open(results: Sequence[RewardResult]) -> list[int]:
    """Those that the functions gave a reward."""
    return [i for i, result in enumerate(results) if result.reward is not None]


def _conversation(prompt: Prompt, system: str | None, response: str) -> tuple[dict[str, str], ...]:
    messages = chat_messages(prompt.content, system)
    texts = ({"role": message["role"], "content": message_text(message)} for message in messages)
    return (*texts, {"role": "assistant", "content": response})


def _answer(prompt: Prompt) -> str | None:
    try:
        return answer_text(prompt.answer)
    except DataError:  # nothing that a text could show
        return None


def _describe(name: str, failure: CannotScore, shown: JudgeInput) -> str:
    return "\n".join(
        [
            f"reward model {name} {failure}",
            f"  sample:   {shown.name}",
            f"  prompt:   {shorten(shown.prompt)!r}",
            f"  response: {shorten(shown.response)!r}",
            f"  → mend reward.models.{name}, or set reward.on_error: skip to leave such samples out.",
        ]
    )

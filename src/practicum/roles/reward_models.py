"""The reward models' role: answers are judged by models, and their scores join the functions' rewards.

Models with resources of their own judge an answer as soon as its session is finished (`stream`). Colocated
ones wait until the rollout is done (`add`): the student's engine sleeps, each is woken once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.keys import Key
from practicum.engines.protocol import Rests
from practicum.errors import DataError, RewardError
from practicum.places.model_cache import ModelCache, Sleepable
from practicum.recipe.derived import has_own_process, own_options, scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.loaded_reward_model import ColocatedRewardModel, OwnRewardModel, load_reward_model
from practicum.rewards.remote_reward_model import RemoteRewardModel, probe_reward_model
from practicum.rewards.reward_place import CannotScore, JudgeInput, RewardPlace, score_all
from practicum.tasks.messages import message_text
from practicum.tasks.prompts import Prompt, answer_text, prompt_text
from practicum.tasks.rewards import RewardResult
from practicum.user_code import shorten

Score = float | CannotScore


@dataclass(slots=True)
class RewardModels:
    """The reward models of a run, shared by all juries."""

    places: dict[str, RewardPlace] = field(default_factory=dict)

    def sleepers(self) -> list[Sleepable]:
        """Colocated ones, for the residency that wakes them."""
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

    `room` is the tokens of the longest prompt and answer, as a judge may count them. Servers are taken as
    probed (`probe_judges`), and those `elsewhere` as they are.
    """
    panel = RewardModels()
    with ExitStack() as undo:
        undo.callback(panel.close)
        for name, spec in recipe.reward.models.items():
            if elsewhere is not None and name in elsewhere:
                panel.places[name] = elsewhere[name]
            elif spec.url is not None:
                panel.places[name] = RemoteRewardModel(name, spec)
            elif has_own_process(spec.placement):
                panel.places[name] = own = OwnRewardModel(name, spec, room)
                own.start()
            else:
                panel.places[name] = ColocatedRewardModel(name, load_reward_model(name, spec, room))
        for name, place in panel.places.items():
            if isinstance(place, OwnRewardModel):
                place.ready(own_options(recipe.reward.models[name]).start_s)
        undo.pop_all()
    return panel


def probe_reward_servers(recipe: Recipe, *, chat: bool) -> list[str]:
    """Whether reward models behind URLs can judge; `chat`: some prompts are conversations."""
    findings = []
    for name, spec in recipe.reward.models.items():
        if spec.url is None:
            continue
        with closing(RemoteRewardModel(name, spec)) as place:
            owner = f"the probe of reward model {name} at {spec.url}"
            said = run_async(probe_reward_model(place, chat=chat), timeout=spec.deadline_s, owner=owner)
        findings.append(f"reward model {name}: {spec.url} {said}")
    return findings


class RewardModelRole:
    """Judges the answers of one practice; works for one rollout at a time."""

    def __init__(self, recipe: Recipe, panel: RewardModels, residency: ModelCache, engine: Rests) -> None:
        self.recipe, self.panel, self.residency, self.engine = recipe, panel, residency, engine
        self.models = recipe.reward.models
        self._streamed = [name for name, spec in self.models.items() if scores_during_rollout(spec)]
        self._colocated = [name for name, spec in self.models.items() if not scores_during_rollout(spec)]
        self._said: dict[str, dict[str, Score]] = {}
        """What streamed models said of each case that the reward stage has not asked for yet."""

    @property
    def streams(self) -> bool:
        """Whether some model judges while the student still rolls out."""
        return bool(self._streamed)

    def case(self, key: Key, prompt: Prompt, response: str) -> JudgeInput:
        """What the models are shown of an answer."""
        task = self.recipe.tasks[prompt.task]
        messages = None
        if task.chat or not isinstance(prompt.content, str):
            messages = _conversation(prompt, task.system, response)
        return JudgeInput(str(key), prompt_text(prompt.content), response, _answer(prompt), messages)

    async def stream(self, case: JudgeInput) -> None:
        """Have a finished answer judged by the models with resources of their own."""
        said = await gather_all([score_all(self.panel.places[name], [case]) for name in self._streamed])
        self._said[case.name] = {name: one[0] for name, one in zip(self._streamed, said, strict=True)}

    def add(self, judged: Sequence[RewardResult], cases: Sequence[JudgeInput]) -> list[RewardResult]:
        """The functions' verdicts with the models' scores; those without a reward stay as they are.

        A case that a model can't judge is a RewardError, or failed, as reward.on_error says.
        """
        open_ = [i for i, verdict in enumerate(judged) if verdict.reward is not None]
        said = self._collect([cases[i] for i in open_])
        out = list(judged)
        for i, verdicts in zip(open_, said, strict=True):
            out[i] = self._joined(judged[i], cases[i], verdicts)
        self.forget(case.name for case in cases)
        return out

    def forget(self, names: Iterable[object]) -> None:
        """Drop what was said of cases that nobody will ask for."""
        for name in names:
            self._said.pop(str(name), None)

    def _collect(self, cases: Sequence[JudgeInput]) -> list[dict[str, Score]]:
        """What each model says of each case: kept from the rollout, or asked for now."""
        late = [case for case in cases if case.name not in self._said] if self._streamed else []
        if late:
            owner = f"reward models ({len(late)} answers)"
            timeout = max(self.models[name].deadline_s for name in self._streamed)
            run_async(gather_all(self.stream(case) for case in late), timeout=timeout, owner=owner)
        said: list[dict[str, Score]] = [dict(self._said.get(case.name, {})) for case in cases]
        if not self._colocated or not cases:
            return said
        self.engine.sleep()
        try:
            for name in self._colocated:
                for verdicts, verdict in zip(said, self._woken(name, cases), strict=True):
                    verdicts[name] = verdict
        finally:
            self.engine.wake()
        return said

    def _woken(self, name: str, cases: Sequence[JudgeInput]) -> list[Score]:
        place, deadline = self.panel.places[name], self.models[name].deadline_s
        assert isinstance(place, ColocatedRewardModel)
        with self.residency.awake(place.name):
            owner = f"reward model {name} ({len(cases)} answers)"
            return run_async(score_all(place, cases), timeout=deadline, owner=owner)

    def _joined(self, judged: RewardResult, case: JudgeInput, verdicts: Mapping[str, Score]) -> RewardResult:
        assert judged.reward is not None
        reward, parts, failure = judged.reward, dict(judged.parts), None
        for name in self.models:
            verdict = verdicts[name]
            if isinstance(verdict, CannotScore):
                failure = failure or f"reward model {name} {verdict}"
                if self.recipe.reward.on_error == "stop":
                    raise RewardError(_describe(name, verdict, case)) from verdict
                continue
            parts[name] = verdict
            reward += self.models[name].weight * verdict
        return RewardResult(reward, parts) if failure is None else RewardResult(None, parts, failure)


def _conversation(prompt: Prompt, system: str | None, response: str) -> tuple[dict[str, str], ...]:
    content = prompt.content
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    messages = [{"role": m["role"], "content": message_text(m)} for m in messages]
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return (*messages, {"role": "assistant", "content": response})


def _answer(prompt: Prompt) -> str | None:
    try:
        return answer_text(prompt.answer)
    except DataError:  # nothing that a text could show
        return None


def _describe(name: str, failure: CannotScore, case: JudgeInput) -> str:
    return "\n".join(
        [
            f"reward model {name} {failure}",
            f"  sample:   {case.name}",
            f"  prompt:   {shorten(case.prompt)!r}",
            f"  response: {shorten(case.response)!r}",
            f"  → mend reward.models.{name}, or set reward.on_error: skip to leave such samples out.",
        ]
    )

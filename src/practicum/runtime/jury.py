"""The reward models' role: answers are judged by models, and their scores join the functions' rewards.

Models with resources of their own judge an answer as soon as its session is finished (`stream`). Colocated
ones wait until the rollout is done (`add`): the student's engine sleeps, each is woken once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from practicum.dataplane.keys import Key
from practicum.errors import DataError, RewardError
from practicum.recipe.schema import Recipe
from practicum.recipe.ways import is_own, own_options, streams
from practicum.rollout.protocol import Rests
from practicum.rollout.together import together
from practicum.runtime.events import run_async
from practicum.tasks.messages import message_text
from practicum.tasks.prompts import Prompt, answer_text, prompt_text
from practicum.tasks.rewards import Judged
from practicum.teachers.residency import Residency, Sleeper
from practicum.teachers.rewarders.case import Case, RewardPlace, Unjudged, judge_all
from practicum.teachers.rewarders.local import ColocatedRewarder, load_rewarder
from practicum.teachers.rewarders.own import OwnRewarder
from practicum.teachers.rewarders.probe import probe_rewarder
from practicum.teachers.rewarders.remote import RemoteRewarder
from practicum.user_code import shorten

Verdict = float | Unjudged


@dataclass(slots=True)
class Panel:
    """The reward models of a run, shared by all juries."""

    places: dict[str, RewardPlace] = field(default_factory=dict)

    def sleepers(self) -> list[Sleeper]:
        """Colocated ones, for the residency that wakes them."""
        return [place.resident for place in self.places.values() if isinstance(place, ColocatedRewarder)]

    def close(self) -> None:
        """Stop all of them, even if one can't be."""
        with ExitStack() as stack:
            for place in self.places.values():
                stack.callback(place.close)


def seat(recipe: Recipe, room: int, elsewhere: Mapping[str, RewardPlace] | None = None) -> Panel:
    """All reward models of the recipe, ready; if one can't be had, none stays behind.

    `room` is the tokens of the longest prompt and answer, as a judge may count them. Servers are taken as
    probed (`probe_judges`), and those `elsewhere` as they are.
    """
    panel = Panel()
    with ExitStack() as undo:
        undo.callback(panel.close)
        for name, spec in recipe.reward.models.items():
            if elsewhere is not None and name in elsewhere:
                panel.places[name] = elsewhere[name]
            elif spec.url is not None:
                panel.places[name] = RemoteRewarder(name, spec)
            elif is_own(spec.placement):
                panel.places[name] = own = OwnRewarder(name, spec, room)
                own.start()
            else:
                panel.places[name] = ColocatedRewarder(name, load_rewarder(name, spec, room))
        for name, place in panel.places.items():
            if isinstance(place, OwnRewarder):
                place.ready(own_options(recipe.reward.models[name]).start_s)
        undo.pop_all()
    return panel


def probe_judges(recipe: Recipe, *, chat: bool) -> list[str]:
    """Whether reward models behind URLs can judge; `chat`: some prompts are conversations."""
    findings = []
    for name, spec in recipe.reward.models.items():
        if spec.url is None:
            continue
        with closing(RemoteRewarder(name, spec)) as place:
            owner = f"the probe of reward model {name} at {spec.url}"
            said = run_async(probe_rewarder(place, chat=chat), timeout=spec.deadline_s, owner=owner)
        findings.append(f"reward model {name}: {spec.url} {said}")
    return findings


class Jury:
    """Judges the answers of one practice; works for one rollout at a time."""

    def __init__(self, recipe: Recipe, panel: Panel, residency: Residency, engine: Rests) -> None:
        self.recipe, self.panel, self.residency, self.engine = recipe, panel, residency, engine
        self.models = recipe.reward.models
        self._streamed = [name for name, spec in self.models.items() if streams(spec)]
        self._colocated = [name for name, spec in self.models.items() if not streams(spec)]
        self._said: dict[str, dict[str, Verdict]] = {}
        """What streamed models said of each case that the reward stage has not asked for yet."""

    @property
    def streams(self) -> bool:
        """Whether some model judges while the student still rolls out."""
        return bool(self._streamed)

    def case(self, key: Key, prompt: Prompt, response: str) -> Case:
        """What the models are shown of an answer."""
        task = self.recipe.tasks[prompt.task]
        messages = None
        if task.chat or not isinstance(prompt.content, str):
            messages = _conversation(prompt, task.system, response)
        return Case(str(key), prompt_text(prompt.content), response, _answer(prompt), messages)

    async def stream(self, case: Case) -> None:
        """Have a finished answer judged by the models with resources of their own."""
        said = await together([judge_all(self.panel.places[name], [case]) for name in self._streamed])
        self._said[case.name] = {name: one[0] for name, one in zip(self._streamed, said, strict=True)}

    def add(self, judged: Sequence[Judged], cases: Sequence[Case]) -> list[Judged]:
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

    def _collect(self, cases: Sequence[Case]) -> list[dict[str, Verdict]]:
        """What each model says of each case: kept from the rollout, or asked for now."""
        late = [case for case in cases if case.name not in self._said] if self._streamed else []
        if late:
            owner = f"reward models ({len(late)} answers)"
            timeout = max(self.models[name].deadline_s for name in self._streamed)
            run_async(together(self.stream(case) for case in late), timeout=timeout, owner=owner)
        said: list[dict[str, Verdict]] = [dict(self._said.get(case.name, {})) for case in cases]
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

    def _woken(self, name: str, cases: Sequence[Case]) -> list[Verdict]:
        place, deadline = self.panel.places[name], self.models[name].deadline_s
        assert isinstance(place, ColocatedRewarder)
        with self.residency.awake(place.resident.name):
            owner = f"reward model {name} ({len(cases)} answers)"
            return run_async(judge_all(place, cases), timeout=deadline, owner=owner)

    def _joined(self, judged: Judged, case: Case, verdicts: Mapping[str, Verdict]) -> Judged:
        assert judged.reward is not None
        reward, parts, failure = judged.reward, dict(judged.parts), None
        for name in self.models:
            verdict = verdicts[name]
            if isinstance(verdict, Unjudged):
                failure = failure or f"reward model {name} {verdict}"
                if self.recipe.reward.on_error == "stop":
                    raise RewardError(_describe(name, verdict, case)) from verdict
                continue
            parts[name] = verdict
            reward += self.models[name].weight * verdict
        return Judged(reward, parts) if failure is None else Judged(None, parts, failure)


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


def _describe(name: str, failure: Unjudged, case: Case) -> str:
    return "\n".join(
        [
            f"reward model {name} {failure}",
            f"  sample:   {case.name}",
            f"  prompt:   {shorten(case.prompt)!r}",
            f"  response: {shorten(case.response)!r}",
            f"  → mend reward.models.{name}, or set reward.on_error: skip to leave such samples out.",
        ]
    )

"""The sampling side of a step: prompts, sessions and rewards, until there are enough groups to learn from.

Which finished groups these are is the replay buffer's. Sampling needs the weights that sample and nothing of
the learner, so it may run while an earlier step is learnt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from practicum.dataplane.batch import BatchRef, Group, groups_of, session_tags
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.stages import Plan
from practicum.engines.protocol import Sampling
from practicum.errors import PracticumError
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.derived import recorded_groups
from practicum.recipe.schema.recipe import Buffer, Recipe
from practicum.recipe.schema.rollout_sections import OnFailure
from practicum.records.recorder import Recorder
from practicum.runtime.start_roles import Roles
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import PromptStream
from practicum.trainer.samples import choose_prompts

TRAIN = "train"
T = TypeVar("T")
Metrics = dict[str, float]


class StageTimer:
    """Runs stages of one step that the plan has, and keeps their seconds."""

    def __init__(
        self, plan: Plan, number: int, recorder: Recorder | None, on_stage: Callable[[str], None]
    ) -> None:
        self.plan, self.number, self.recorder, self.on_stage = plan, number, recorder, on_stage
        self.seconds: Metrics = {}
        self.stage = ""
        """The last one that began."""

    def run(self, name: str, work: Callable[[], T]) -> T | None:
        """Run a stage if the plan has it, and keep its time."""
        if name not in self.plan:
            return None
        self.stage = name
        self.on_stage(name)
        began = time.perf_counter()
        try:
            with nullcontext() if self.recorder is None else self.recorder.span(name, self.number):
                return work()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass(slots=True)
class SampledStep:
    """A step on its sampling side: its first prompts are drawn, `StepSampler.sample` fills in the rest."""

    number: int
    copy: int
    """Which of `Roles.rollouts` samples it."""
    weights: int
    """The weights that sample it, by the step that they are after."""
    timer: StageTimer
    stream: dict[str, int]
    """The prompt stream's state before it."""
    prompts: list[Prompt]
    recorded: int = 0
    """Prompts whose rows are recorded."""
    rolled: list[BatchRef] = field(default_factory=list)
    """All its rollouts, with the rows that nothing is learnt from."""
    batch: BatchRef = field(default_factory=lambda: BatchRef(TRAIN, (), ()))
    baselines: dict[int, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    def rows(self) -> list[Key]:
        """Everything that the store holds of it."""
        return [key for batch in self.rolled for key in batch.keys]


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """What a step trains on, and the rewards of greedy sessions by prompt."""

    batch: BatchRef
    baselines: dict[int, float]


class ReplayBuffer:
    """Complete prompt groups, oldest first."""

    def __init__(self, rules: Buffer, partition: str, on_failure: OnFailure = "keep_rest") -> None:
        self.rules, self.partition, self.on_failure = rules, partition, on_failure
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        """Take in finished groups, but those without a signal or with a failed session, as the rules say."""
        self._groups += [group for group in groups if not self._leaves_out(group)]
        self._groups.sort(key=lambda group: group.prompt)

    def _leaves_out(self, group: Group) -> bool:
        dropped = self.on_failure == "drop_group" and group.has_failed
        return dropped or (self.rules.filter_flat_groups and group.is_flat)

    def take(self, count: int) -> TakenGroups:
        """The oldest `count` groups, or all if there are fewer.

        The batch has the rows to train on: ready, and not a baseline.
        """
        chosen, self._groups = self._groups[:count], self._groups[count:]
        rows = [row for group in chosen for row in group.rows]
        kept = [(k, t) for k, t in rows if t.status == "ready" and not t.is_baseline]
        baselines = {k.prompt: t.reward for k, t in rows if t.is_baseline and t.reward is not None}
        batch = BatchRef(self.partition, tuple(k for k, _ in kept), tuple(t for _, t in kept))
        return TakenGroups(batch, baselines)


class StepSampler:
    """Samples steps over a set of roles. Its state is the prompt stream."""

    def __init__(
        self, recipe: Recipe, plan: Plan, roles: Roles, stream: PromptStream, recorder: Recorder | None = None
    ) -> None:
        self.recipe, self.plan, self.roles, self.stream = recipe, plan, roles, stream
        self.recorder = recorder

    def begin(
        self,
        number: int,
        copy: int = 0,
        weights: int | None = None,
        on_stage: Callable[[str], None] = lambda name: None,
    ) -> SampledStep:
        """Draw a step's first prompts; steps are begun in order. `weights`: by default the newest."""
        timer = StageTimer(self.plan, number, self.recorder, on_stage)
        sampled_by = number - 1 if weights is None else weights
        step = SampledStep(number, copy, sampled_by, timer, self.stream.state_dict(), [])
        step.prompts = self._take(step, self.recipe.train.prompts)
        return step

    def sample(self, step: SampledStep) -> None:
        """Roll out and score until there is a batch to learn from."""
        if "demonstrate" in self.plan:
            self._demonstrate(step)
        else:
            self._roll_out_and_reward(step)

    def _take(self, step: SampledStep, count: int) -> list[Prompt]:
        """The next prompts of the stream; each knows its step, and whether its rows are recorded."""
        prompts = self.stream.take(count)
        most = recorded_groups(self.recipe)
        left = None if most is None else max(most - step.recorded, 0)
        chosen = choose_prompts({prompt.uid: prompt.task for prompt in prompts}, left, turn=step.number)
        step.recorded += len(chosen)
        return [replace(p, step=step.number, recorded=p.uid in chosen) for p in prompts]

    def _demonstrate(self, step: SampledStep) -> None:
        rollout = self.roles.rollouts[step.copy]
        batch = step.timer.run("demonstrate", lambda: rollout.demonstrate(step.prompts, TRAIN))
        assert batch is not None
        step.rolled, step.batch, step.metrics = [batch], batch, {"epoch": step.prompts[0].epoch}

    def _roll_out_and_reward(self, step: SampledStep) -> None:
        """Roll out and score until enough complete groups are there, and take the oldest."""
        recipe, needed, refills = self.recipe, self.recipe.train.prompts, 0
        buffer = ReplayBuffer(recipe.buffer, TRAIN, recipe.agent.on_failure)
        groups = self._roll_out(step, step.prompts)
        buffer.add(groups)
        while recipe.buffer.filter_flat_groups and len(buffer) < needed:
            if refills == recipe.buffer.max_refills:
                break
            refills += 1
            new = self._roll_out(step, self._take(step, needed - len(buffer)))
            groups += new
            buffer.add(new)
        taken = buffer.take(needed)
        step.batch, lost = self._with_baseline(taken)
        step.baselines = taken.baselines
        if not step.batch:
            raise PracticumError(nothing_left(groups, refills))
        if not any(tags.sampled_tokens for tags in step.batch.tags):
            raise PracticumError("the student sampled no token in this step: the loop adds only given ones")
        step.metrics = self._metrics(step, groups) | {"epoch": step.prompts[0].epoch}
        if recipe.buffer.filter_flat_groups:
            short = needed - len({key.prompt for key in step.batch.keys})
            step.metrics |= {"groups/refills": refills, "groups/short": short}
        step.metrics |= lost

    def _roll_out(self, step: SampledStep, prompts: list[Prompt]) -> list[Group]:
        """Rollout and reward of these prompts; gives the groups, with their rewards in the tags."""
        rollout, recipe = self.roles.rollouts[step.copy], self.recipe
        attempts = training_attempts(recipe, prompts, self.roles.stop)
        rolled = step.timer.run("rollout", lambda: rollout.rollout(attempts, TRAIN, seed=recipe.seed))
        assert rolled is not None
        done = rolled.where(lambda _, tags: tags.status == "ready")
        step.timer.run("reward", lambda: rollout.reward(done))
        step.rolled.append(self.roles.store.batch(TRAIN, rolled.keys))
        return groups_of(step.rolled[-1])

    def _metrics(self, step: SampledStep, groups: Sequence[Group]) -> Metrics:
        metrics = rollout_metrics([tags for batch in step.rolled for tags in session_tags(batch)], groups)
        left = trajectories(BatchRef.concat(step.rolled))
        if left is not None and left != 1:
            metrics["rollout/trajectories"] = left
        if self.recipe.agent.on_failure == "drop_group":
            metrics["groups/dropped"] = sum(group.has_failed for group in groups)
        return metrics

    def _with_baseline(self, taken: TakenGroups) -> tuple[BatchRef, Metrics]:
        """Leave out and count the groups whose greedy session failed, if the estimator needs it."""
        if not estimator_traits(self.recipe.algorithm.advantage).greedy_baseline:
            return taken.batch, {}
        batch = taken.batch.where(lambda key, _: key.prompt in taken.baselines)
        lost = {key.prompt for key in taken.batch.keys} - set(taken.baselines)
        return batch, {"groups/without_baseline": len(lost)}


def training_attempts(recipe: Recipe, prompts: list[Prompt], stop: frozenset[int]) -> list[Attempt]:
    """The sessions of each prompt, and a greedy one if the advantage estimator needs a baseline."""
    rollout = recipe.rollout
    drawn = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop=stop,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )
    attempts = [Attempt(p, i, drawn) for p in prompts for i in range(rollout.samples)]
    if estimator_traits(recipe.algorithm.advantage).greedy_baseline:
        greedy = Sampling(max_new_tokens=rollout.max_new_tokens, stop=stop, greedy=True)
        attempts += [Attempt(p, rollout.samples, greedy, is_baseline=True) for p in prompts]
    return attempts


def rollout_metrics(tags: Iterable[Tags], groups: Iterable[Group]) -> dict[str, float]:
    """What a step's rollouts say, from tags alone. `tags` has one entry per session."""
    tags, groups = list(tags), list(groups)
    ready = [t for t in tags if t.status == "ready"]
    out: dict[str, float] = {
        "rollout/sessions": len(tags),
        "rollout/failed": len(tags) - len(ready),
        "rollout/tokens": sum(t.sampled_tokens for t in tags),
    }
    if ready:
        rewards = [t.reward for t in ready if t.reward is not None]
        if rewards:
            out["reward/mean"] = statistics.fmean(rewards)
            out["reward/std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        out["rollout/response_tokens"] = statistics.fmean(t.response_tokens for t in ready)
        out["rollout/truncated"] = statistics.fmean(t.finish in ("length", "context") for t in ready)
        out |= _agent_metrics(tags, ready)
        out |= by_domain("reward/mean", ready)
        out |= _reward_parts(ready)
    judged = [group for group in groups if group.rewards()]
    if judged:
        out["groups/flat"] = statistics.fmean(group.is_flat for group in judged)
    return out


def _agent_metrics(tags: Sequence[Tags], ready: Sequence[Tags]) -> dict[str, float]:
    """What sessions of several turns did; nothing for answers in one turn."""
    out: dict[str, float] = {}
    if retries := sum(t.retries for t in tags):
        out["rollout/retries"] = retries
    turns, calls = (sum(getattr(t, name) for t in ready) for name in ("turns", "tool_calls"))
    if turns > len(ready):
        out["rollout/turns"] = turns / len(ready)
        out["rollout/breaks"] = sum(t.breaks for t in ready)
    if calls:
        out["rollout/tool_calls"] = calls / len(ready)
        out["rollout/tool_errors"] = sum(t.tool_errors for t in ready) / calls
    return out


def _reward_parts(ready: Sequence[Tags]) -> dict[str, float]:
    """Mean of each reward function and model over the sessions that have a reward."""
    parts: dict[str, list[float]] = {}
    for tags in ready:
        for name, value in (tags.reward_parts or {}).items() if tags.reward is not None else ():
            parts.setdefault(name, []).append(value)
    return {f"reward/part/{name}": statistics.fmean(values) for name, values in parts.items()}


def by_domain(name: str, tags: Iterable[Tags]) -> dict[str, float]:
    """Mean reward of each domain."""
    rewards: dict[str, list[float]] = {}
    for tag in tags:
        if tag.reward is not None:
            rewards.setdefault(tag.domain, []).append(tag.reward)
    return {f"{name}/{domain}": statistics.fmean(r) for domain, r in sorted(rewards.items())}


def trajectories(batch: BatchRef) -> float | None:
    """Mean number of trajectories of the sessions that have any."""
    rows = [
        key[:2] for key, tags in batch if tags.prompt_tokens and not (tags.is_baseline or tags.is_padding)
    ]
    return len(rows) / len(set(rows)) if rows else None


def nothing_left(groups: Sequence[Group], refills: int) -> str:
    """Why a step has nothing to learn from."""
    failures = [tags.failure for group in groups for _, tags in group.rows if tags.failure]
    again = f" after {refills} refills" if refills else ""
    if failures:
        failed = f"{len(failures)} sessions failed, the first: {failures[0]}"
        return f"no group to learn from is left{again}: {failed}"
    return (
        f"no group to learn from is left{again}: rewards are all equal (the task is "
        "too easy or too hard for this model); see samples.jsonl"
    )

"""The sampling side of a step: prompts, sessions and rewards, until enough groups can be trained on.

Sampling needs weights but not the learner, so it may run while an earlier step trains.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from practicum.dataplane.batch import BatchRef, Group, groups_of, session_tags
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.stages import Plan
from practicum.engines.protocol import Sampling
from practicum.errors import PracticumError
from practicum.observe.records.recorder import Recorder
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.rollout_sections import OnFailure
from practicum.roles.rollout import RolloutRole
from practicum.runtime.start_roles import Roles
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import PromptStream
from practicum.trainer.samples import choose_prompts, mean_by_name

TRAIN = "train"
PASS_REWARD = 1.0
"""Minimum reward of a correct session."""
Metrics = dict[str, float]


class StageTimer:
    """Reports the stages of a step, and sums their seconds."""

    def __init__(self, number: int, recorder: Recorder | None, on_stage: Callable[[str], None]) -> None:
        self.number, self.recorder, self.on_stage = number, recorder, on_stage
        self.seconds: Metrics = {}
        self.stage = ""
        """The stage that started last."""

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        self.stage = name
        self.on_stage(name)
        began = time.perf_counter()
        try:
            with nullcontext() if self.recorder is None else self.recorder.span(name, self.number):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass(slots=True)
class SampledStep:
    """A step on its sampling side, with its first prompts. `StepSampler.sample` adds the rest."""

    number: int
    rollout: RolloutRole
    """Roles that sample it, with the prompts of its rows."""
    version: int
    """Version of the weights that sample it."""
    timer: StageTimer
    stream: dict[str, int]
    """The prompt stream's state before it."""
    prompts: list[Prompt]
    recorded: int = 0
    """Prompts whose rows are recorded."""
    rolled: list[BatchRef] = field(default_factory=list)
    """All rollouts, including rows that are not trained on."""
    batch: BatchRef = field(default_factory=lambda: BatchRef(TRAIN, (), ()))
    baselines: dict[int, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    def rows(self) -> list[Key]:
        """All keys of the step in the store."""
        return [key for batch in self.rolled for key in batch.keys]


def keep_groups(groups: Sequence[Group], filters: bool, on_failure: OnFailure = "keep_rest") -> list[Group]:
    """Return the groups to train on: of unequal rewards if `filters`, without failures if required."""
    drops = on_failure == "drop_group"
    return [g for g in groups if not (drops and g.has_failed) and not (filters and g.is_flat)]


def take_groups(groups: Sequence[Group], count: int, partition: str) -> tuple[BatchRef, dict[int, float]]:
    """Return the complete rows of the oldest `count` groups, and the greedy sessions' rewards by prompt."""
    oldest = sorted(groups, key=lambda group: group.prompt)[:count]
    rows = [row for group in oldest for row in group.rows]
    kept = [(k, t) for k, t in rows if t.status == "ready" and not t.is_baseline]
    baselines = {k.prompt: t.reward for k, t in rows if t.is_baseline and t.reward is not None}
    return BatchRef(partition, tuple(k for k, _ in kept), tuple(t for _, t in kept)), baselines


def keep_right(step: SampledStep) -> Metrics:
    """Keep the teachers' responses that the task's rewards accept, and count them by teacher."""
    answers, right = step.batch, step.batch.where(lambda _, tags: (tags.reward or 0.0) >= PASS_REWARD)
    kept, found = {key[:2] for key in right.keys}, Counter[str]()
    for name, teacher in {key[:2]: tags.teacher for key, tags in answers}.items():
        found[f"answers/{'accepted' if name in kept else 'rejected'}/{teacher}"] += 1
    if not right:
        raise PracticumError(
            f"none of the teachers' {sum(found.values())} responses in this step has a reward of at least "
            f"{PASS_REWARD:g}: check the teachers on these tasks, or raise rollout.samples"
        )
    step.batch = right
    return {"answers/accepted": len(kept), "answers/rejected": sum(found.values()) - len(kept), **found}


class StepSampler:
    """Samples steps with a set of roles. Its state is the prompt stream."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        roles: Roles,
        stream: PromptStream,
        recorder: Recorder | None = None,
        on_stage: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.recipe, self.plan, self.roles, self.stream = recipe, plan, roles, stream
        self.recorder, self.on_stage = recorder, on_stage

    def begin(
        self, number: int, rollout: RolloutRole | None = None, version: int | None = None
    ) -> SampledStep:
        """Draw a step's first prompts. Steps start in order. By default, the newest weights sample them."""
        timer = StageTimer(number, self.recorder, self.on_stage)
        version = self.roles.version if version is None else version
        step = SampledStep(
            number, rollout or self.roles.rollouts[0], version, timer, self.stream.state_dict(), []
        )
        step.prompts = self._take(step, self.recipe.train.prompts)
        return step

    def stream_state(self, number: int) -> dict[str, int]:
        return self.stream.state_dict()

    def move(self, trained: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _take(self, step: SampledStep, count: int) -> list[Prompt]:
        """Return the next prompts of the stream, marked with their step and if they are recorded."""
        prompts = self.stream.take(count)
        most = self.recipe.recorded_groups
        left = None if most is None else max(most - step.recorded, 0)
        chosen = choose_prompts({prompt.uid: prompt.task for prompt in prompts}, left, turn=step.number)
        step.recorded += len(chosen)
        return [replace(p, step=step.number, recorded=p.uid in chosen) for p in prompts]

    def sample(self, step: SampledStep) -> None:
        """Roll out and score until enough groups are complete, and take the oldest."""
        recipe, needed, refills = self.recipe, self.recipe.train.prompts, 0
        step.metrics = {"epoch": step.prompts[0].epoch}
        if "demonstrate" in self.plan:
            with step.timer.run("demonstrate"):
                step.batch = step.rollout.demonstrate(step.prompts, TRAIN)
            step.rolled = [step.batch]
            return
        filters, on_failure = recipe.refills > 0, recipe.agent.on_failure
        groups = self._roll_out(step, step.prompts)
        kept = keep_groups(groups, filters, on_failure)
        while len(kept) < needed and refills < recipe.refills:
            refills += 1
            new = self._roll_out(step, self._take(step, needed - len(kept)))
            groups += new
            kept += keep_groups(new, filters, on_failure)
        step.batch, step.baselines = take_groups(kept, needed, TRAIN)
        later: Metrics = {"groups/refills": refills} if filters else {}
        if recipe.teachers_answer:
            later |= keep_right(step)
        if estimator_traits(recipe.algorithm.advantage).greedy_baseline:
            # Groups with a failed greedy session are left out and counted.
            lost = {key.prompt for key in step.batch.keys} - set(step.baselines)
            step.batch = step.batch.where(lambda key, _: key.prompt in step.baselines)
            later["groups/without_baseline"] = len(lost)
        if not step.batch:
            raise PracticumError(nothing_left(groups, refills))
        if not any(tags.sampled_tokens for tags in step.batch.tags):
            raise PracticumError(
                "the student sampled no tokens in this step: the agent loop only inserted text"
            )
        if filters:
            later["groups/short"] = needed - len({key.prompt for key in step.batch.keys})
        step.metrics = self._metrics(step, groups) | step.metrics | later
        if "teachers" in self.plan and (hidden := step.rollout.hidden.take()) is not None:
            step.metrics["teachers/overlap_fraction"] = hidden

    def _roll_out(self, step: SampledStep, prompts: list[Prompt]) -> list[Group]:
        """Roll out and score these prompts. Return the groups, with rewards in the tags."""
        attempts = training_attempts(self.recipe, prompts, self.roles.stop)
        with step.timer.run("rollout"):
            rolled = step.rollout.rollout(attempts, TRAIN, seed=self.recipe.seed)
        if "reward" in self.plan:
            with step.timer.run("reward"):
                step.rollout.reward(rolled.where(lambda _, tags: tags.status == "ready"))
        step.rolled.append(self.roles.store.batch(TRAIN, rolled.keys))
        return groups_of(step.rolled[-1])

    def _metrics(self, step: SampledStep, groups: Sequence[Group]) -> Metrics:
        metrics = rollout_metrics([tags for batch in step.rolled for tags in session_tags(batch)], groups)
        whole = BatchRef.concat(step.rolled).where(lambda _, t: t.prompt_tokens > 0 and not t.is_baseline)
        sessions = {key[:2] for key in whole.keys}
        if len(whole) > len(sessions):
            metrics["rollout/trajectories"] = len(whole) / len(sessions)
        if self.recipe.agent.on_failure == "drop_group":
            metrics["groups/dropped"] = sum(group.has_failed for group in groups)
        return metrics


def training_attempts(recipe: Recipe, prompts: list[Prompt], stop: frozenset[int]) -> list[Attempt]:
    """Return the sessions of each prompt, plus a greedy one if the advantage estimator needs a baseline."""
    rollout, distill = recipe.rollout, recipe.distill
    report = distill.top_k if distill is not None and distill.of_student else 0
    drawn = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop=stop,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        report=report,
    )
    attempts = [Attempt(p, i, drawn) for p in prompts for i in range(rollout.samples)]
    if estimator_traits(recipe.algorithm.advantage).greedy_baseline:
        greedy = Sampling(max_new_tokens=rollout.max_new_tokens, stop=stop, greedy=True, report=report)
        attempts += [Attempt(p, rollout.samples, greedy, is_baseline=True) for p in prompts]
    return attempts


def rollout_metrics(tags: Iterable[Tags], groups: Iterable[Group]) -> dict[str, float]:
    """Compute the metrics of a step's rollouts from tags. `tags` has one entry per session."""
    tags = list(tags)
    ready = [t for t in tags if t.status == "ready"]
    judged = [(t, t.reward) for t in ready if t.reward is not None]
    out: dict[str, float] = {
        "rollout/sessions": len(tags),
        "rollout/failed": len(tags) - len(ready),
        "rollout/tokens": sum(t.sampled_tokens for t in tags),
    }
    if shared := sum(t.shared_tokens for t in tags):
        out["shared/decode"] = shared / out["rollout/tokens"]
    if judged:
        rewards = [reward for _, reward in judged]
        out["reward/mean"] = statistics.fmean(rewards)
        out["reward/std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    if ready:
        out["rollout/response_tokens"] = statistics.fmean(t.response_tokens for t in ready)
        out["rollout/repetition"] = statistics.fmean(t.repetition for t in ready)
        out["rollout/truncated"] = statistics.fmean(t.finish in ("length", "context") for t in ready)
        if full := sum(t.finish == "context" for t in ready):
            out["rollout/context_full"] = full / len(ready)
        turns, calls = sum(t.turns for t in ready), sum(t.tool_calls for t in ready)
        if retries := sum(t.retries for t in tags):
            out["rollout/retries"] = retries
        if turns > len(ready):
            out["rollout/turns"] = turns / len(ready)
            out["rollout/breaks"] = sum(t.breaks for t in ready)
        if calls:
            out["rollout/tool_calls"] = calls / len(ready)
            out["rollout/tool_errors"] = sum(t.tool_errors for t in ready) / calls
    for t in ready:
        for name, number in (t.requests or {}).items():
            out[f"agent/{name}"] = out.get(f"agent/{name}", 0) + number
    out |= mean_by_name(sorted((f"reward/mean/{t.domain}", reward) for t, reward in judged))
    parts = ((name, x) for t, _ in judged for name, x in (t.reward_parts or {}).items())
    out |= mean_by_name((f"reward/part/{name}", x) for name, x in parts)
    if flat := [group.is_flat for group in groups if group.rewards()]:
        out["groups/zero_variance"] = statistics.fmean(flat)
    return out


def nothing_left(groups: Sequence[Group], refills: int) -> str:
    failures = [tags.failure for group in groups for _, tags in group.rows if tags.failure]
    why = "every group has equal rewards (too easy or too hard for this model); see samples.jsonl"
    if failures:
        why = f"{len(failures)} sessions failed, the first: {failures[0]}"
    return f"no group to train on{f' after {refills} refills' if refills else ''}: {why}"

"""The metrics of a step: their names, and those that come from tags. Padding and failed rows never count."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Tags
from practicum.trainer.buffer import Group

METRICS: dict[str, str] = {
    "step": "Number of the step, from 1.",
    "epoch": "Epoch of the prompt stream that the step's first prompt came from, from 0.",
    "reward/mean": "Mean reward of the rolled-out sessions, each counted once.",
    "reward/std": "Standard deviation of those rewards.",
    "reward/mean/<domain>": "Mean reward of one domain.",
    "reward/part/<name>": "Mean of one reward function or model, before its weight.",
    "rollout/sessions": "Sessions rolled out, failed ones included.",
    "rollout/failed": "Sessions that failed (their reasons are in log.txt).",
    "rollout/retries": "Further tries of sessions that failed (agent.on_failure).",
    "rollout/trajectories": "Mean number of trajectories that a session left.",
    "rollout/turns": "Mean number of turns of a session.",
    "rollout/tool_calls": "Mean number of tool calls of a session, if the agent has tools.",
    "rollout/tool_errors": "Share of tool calls that gave the model an error.",
    "rollout/breaks": "New trajectories opened because the chat template rewrote earlier turns.",
    "rollout/tokens": "Tokens sampled.",
    "rollout/tokens_per_second": "Tokens sampled per second of the rollout stage.",
    "rollout/response_tokens": "Mean length of a response in tokens.",
    "rollout/truncated": "Share of sessions cut off at max_new_tokens.",
    "groups/dropped": "Groups left out for a failed session (agent.on_failure: drop_group).",
    "groups/flat": "Share of rolled-out groups whose rewards are all equal.",
    "groups/of_one": "Groups with one session left, which have no relative signal.",
    "groups/without_baseline": "Groups left out because their greedy baseline failed (remax).",
    "groups/refills": "Further rollouts made to refill filtered groups.",
    "groups/short": "Groups that are still missing after all refills.",
    "padding/rows": "Rows that do nothing, added so that ranks and mini-batches are cut evenly.",
    "padding/share": "Their share of the batch's rows.",
    "balance/before": "Tokens of the fullest rank over the mean one, by rows in order; several ranks only.",
    "balance/after": "The same as rows are given to ranks.",
    "advantage/kl_reward": "KL to the reference in the reward, mean over sampled tokens.",
    "advantage/kl_coefficient": "Weight of that KL.",
    "advantage/kl_clamped": "Share of sampled tokens whose log-ratio to the reference was clamped.",
    "advantage/teacher_kl": "KL(student || teacher) by distill.divergence, where teachers enter here.",
    "advantage/teacher_clamped": "Share of sampled tokens whose log-ratio to the teacher was clamped.",
    "advantage/mismatch_weight": "Mean weight of a sampled token, with algorithm.mismatch.",
    "advantage/mismatch_truncated": "Share of sampled tokens whose ratio was above its cap.",
    "advantage/mismatch_masked": "Share of sampled tokens whose ratio was outside of floor to cap.",
    "advantage/mismatch_rejected": "Share of sessions left out by algorithm.mismatch.reject.",
    "advantage/<name>": "Other counts of the advantage estimator.",
    "async/staleness": "Steps from the weights of a row's oldest token to those it trains; mean of rows.",
    "async/staleness_max": "The largest of them: async.lag, or less in the first steps.",
    "train/loss": "The aggregated loss that was minimised.",
    "train/<name>": "Other numbers of the student's update; `learning/update_metrics.py` lists them.",
    "train/sample_size": "Effective sample size of stale rows, as a fraction of their tokens (async.lag).",
    "train/gap_mean": "Mean |rollout - learner| logprob on fresh sampled tokens, in nats.",
    "train/gap_max": "Largest such difference.",
    "train/gap_k3": "k3 estimate of KL(rollout || learner) on them.",
    "teachers/hidden": "Share of streamed teachers' and reward models' time that the rollout hid.",
    "teacher/<teacher>/prompts": "Prompts of the batch that one teacher corrects.",
    "teacher/<teacher>/prompts_share": "Its share of the prompts.",
    "teacher/<teacher>/tokens": "Sampled tokens that it corrects.",
    "teacher/<teacher>/tokens_share": "Its share of them.",
    "teacher/<teacher>/loss": "Loss of its tokens, weighted as in the loss.",
    "teacher/<teacher>/loss_share": "Its share of the weights of the loss; route.shares sets it.",
    "teacher/<teacher>/gradient_share": "Norm of its rows' gradient as a fraction of the sum, if measured.",
    "teacher/<teacher>/kl": "k1 estimate of KL(student || teacher), mean over its tokens.",
    "teacher/<teacher>/overlap": "Share of its top-k that is in the student's own top-k.",
    "teacher/<teacher>/reward": "Mean reward of its sessions, if answers are judged.",
    "teacher/<teacher>/entropy": "Entropy of the student on its tokens.",
    "teacher/<teacher>/entropy_gap": "Entropy of the student minus the teacher's.",
    "teacher/<teacher>/seconds": "Seconds it was scoring (colocated: awake).",
    "teacher/<teacher>/wakes": "How often it was woken (colocated).",
    "domain/<domain>/<name>": "The same numbers by domain, without seconds and wakes.",
    "critic/<name>": "Numbers of the critic's update.",
    "checks/<name>": "How often a check set to `warn` has fired in this step.",
    "eval/greedy": "Mean reward of greedy answers over the evaluation prompts.",
    "eval/greedy/<domain>": "The same for one domain.",
    "eval/failed": "Evaluation sessions without a reward, left out of the scores; absent if none.",
    "eval/mean@<k>": "Mean reward over k samples per evaluation prompt.",
    "eval/mean@<k>/<domain>": "The same for one domain.",
    "eval/pass@<k>": "Share of evaluation prompts with a passing answer among k samples.",
    "eval/pass@<k>/<domain>": "The same for one domain.",
    "cluster/deaths": "Workers that died in the step and were started again (runtime.kind ray).",
    "cluster/reruns": "Pieces of work that were done again because of it.",
    "time/step": "Seconds of the whole step.",
    "time/waited": "Seconds that the learner waited for its batch (async.lag).",
    "time/publish_lag": "Seconds until engines had the weights that sampled the batch (async.lag).",
    "time/<stage>": "Seconds of one stage, or of the evaluation.",
}
"""Every name that may stand in metrics.jsonl; <…> stands for any word. A test holds runs to this list."""


_SUMMED = ("response_tokens", "sampled_tokens", "turns", "tool_calls", "tool_errors", "breaks")


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


def session_tags(batch: BatchRef) -> list[Tags]:
    """One Tags per session: its last trajectory's, with the tokens of all. No baselines, no padding."""
    tags_of_session: dict[tuple[int, ...], Tags] = {}
    for key, last in batch:
        if last.is_baseline or last.is_padding:
            continue
        before = tags_of_session.get(key[:2], Tags())
        sums = {name: getattr(before, name) + getattr(last, name) for name in _SUMMED}
        tags_of_session[key[:2]] = replace(last, **sums)
    return list(tags_of_session.values())


def trajectories(batch: BatchRef) -> float | None:
    """Mean number of trajectories of the sessions that have any."""
    rows = [
        key[:2] for key, tags in batch if tags.prompt_tokens and not (tags.is_baseline or tags.is_padding)
    ]
    return len(rows) / len(set(rows)) if rows else None


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The same numbers under `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}

"""Sampled trajectories as people read them, for samples.jsonl."""

from __future__ import annotations

from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.runtime.start_roles import Roles


def sample_rows(roles: Roles, batch: BatchRef, count: int) -> list[dict[str, Any]]:
    """All trajectories of the first sessions of distinct prompts, and of the first that failed."""
    firsts: dict[int, tuple[int, ...]] = {}
    failed: list[tuple[int, ...]] = []
    for key, tags in batch:
        if tags.failure is None:
            firsts.setdefault(key.prompt, key[:2])
        else:
            failed.append(key[:2])
    chosen = {*list(firsts.values())[:count], *failed[:count]}
    part = batch.where(lambda key, _: key[:2] in chosen)
    return [_described(part.take([i]), *texts) for i, texts in enumerate(roles.texts(part))]


def _described(row: BatchRef, prompt: str, response: str) -> dict[str, Any]:
    """Texts, reward, versions and failure of one row."""
    key, tags = row.keys[0], row.tags[0]
    return {
        "prompt_uid": key.prompt,
        "session": key.session,
        "trajectory": key.trajectory,
        "task": tags.task,
        "domain": tags.domain,
        "teacher": tags.teacher,
        "response_tokens": tags.response_tokens,
        "prompt": prompt,
        "response": response,
        "reward": tags.reward,
        "finish": tags.finish,
        "turns": tags.turns,
        "tool_calls": tags.tool_calls,
        "version": [tags.version_min, tags.version_max],
        "failure": tags.failure,
    }

"""Sampled trajectories as people read them, for samples.jsonl."""

from __future__ import annotations

from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.stage import Columns
from practicum.runtime.local import Roles


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
    return [_described(roles, part.take([i])) for i in range(len(part))]


def _described(roles: Roles, row: BatchRef) -> dict[str, Any]:
    """Texts, reward, versions and failure of one row; a failed session may have left no tokens."""
    key, tags = row.keys[0], row.tags[0]
    texts = {"prompt": "", "response": ""}
    if tags.prompt_tokens:
        columns = Columns("samples", roles.store.get(row, ["prompt_ids", "response_ids"]))
        for name in texts:
            texts[name] = str(roles.tokenizer.decode(columns.ragged(f"{name}_ids")[0]))
    return {
        "prompt_uid": key.prompt,
        "session": key.session,
        "trajectory": key.trajectory,
        "domain": tags.domain,
        **texts,
        "reward": tags.reward,
        "finish": tags.finish,
        "turns": tags.turns,
        "tool_calls": tags.tool_calls,
        "version": [tags.version_min, tags.version_max],
        "failure": tags.failure,
    }

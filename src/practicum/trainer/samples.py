"""Sampled trajectories as people read them, for samples.jsonl."""

from __future__ import annotations

from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.stage import Columns
from practicum.runtime.local import Roles


def sample_rows(roles: Roles, batch: BatchRef, count: int) -> list[dict[str, Any]]:
    """The first rows of distinct prompts: texts, tokens' count, reward, versions, failure."""
    firsts: dict[int, int] = {}
    for i, key in enumerate(batch.keys):
        firsts.setdefault(key.prompt, i)
    part = batch.take(list(firsts.values())[:count])
    columns = Columns("samples", roles.store.get(part, ["prompt_ids", "response_ids"]))
    prompts, responses = columns.ragged("prompt_ids"), columns.ragged("response_ids")
    rows = zip(part, prompts.rows, responses.rows, strict=True)
    return [
        {
            "prompt_uid": key.prompt,
            "session": key.session,
            "trajectory": key.trajectory,
            "domain": tags.domain,
            "prompt": roles.tokenizer.decode(prompt_ids),
            "response": roles.tokenizer.decode(response_ids),
            "reward": tags.reward,
            "finish": tags.finish,
            "version": [tags.version_min, tags.version_max],
            "failure": tags.failure,
        }
        for (key, tags), prompt_ids, response_ids in rows
    ]

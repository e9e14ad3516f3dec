"""How a step's batch is cut into optimizer mini-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split_groups(prompts: Sequence[int], parts: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Row indices of each mini-batch: whole prompt groups, shuffled by (seed, step, epoch).

    Mini-batches differ by at most one group; with fewer groups than parts, the empty ones are left out.
    """
    rows: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    groups = list(rows.values())
    if parts == 1:
        return [[row for group in groups for row in group]] if groups else []
    random = np.random.Generator(np.random.Philox(key=[seed, step * 1_000_003 + epoch]))
    order = random.permutation(len(groups))
    cuts = np.array_split(order, min(parts, len(groups)) or 1)
    return [[row for g in cut for row in groups[g]] for cut in cuts if len(cut)]

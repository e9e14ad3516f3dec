"""Bytes that a step moves: through the controller, through the data plane, and as weights."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS, field_bytes
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.stages import Plan
from practicum.forecast.model_sizes import BYTES, Models
from practicum.forecast.workload import Workload
from practicum.recipe.schema.recipe import Recipe

ALL_RANKS = ("update_student", "update_critic")
"""Stages in which each rank gets the metadata of the whole batch, not only of its rows."""


class StageBytes(NamedTuple):
    """Bytes that a stage reads from the data plane and writes to it."""

    read: float
    written: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """`controller` is keys and tags; `sync` is one version of the weights for each engine.

    `uncounted` are fields whose size can't be known beforehand.
    """

    controller: float
    plane: Mapping[str, StageBytes]
    sync: float
    uncounted: tuple[str, ...] = ()

    @property
    def plane_bytes(self) -> float:
        return sum(map(sum, self.plane.values()))


def traffic(recipe: Recipe, plan: Plan, models: Models, work: Workload, ranks: int, replicas: int) -> Traffic:
    """What a step of this plan moves."""
    student = models.student
    widths = {"D": 3, "E": student.experts_per_token, "L": student.layers, "H": models.teacher_width}
    widths["K"] = recipe.distill.top_k if recipe.distill is not None else 0
    prompt, response = work.prompt_tokens, work.response_tokens
    tokens = {"scalar": 1.0, "prompt": prompt, "response": response, "sequence": prompt + response}
    plane, controller = {}, 0.0
    for stage in plan:
        if not (stage.reads or stage.writes):
            continue
        rows = work.rows if stage.name in ("rollout", "reward") else work.sessions
        read, written = (rows * field_bytes(names, tokens, widths) for names in (stage.reads, stage.writes))
        plane[stage.name] = StageBytes(read, written)
        # Sent as the stage's argument, and returned with new tags where rows are made or scored.
        returns = stage.name in ("rollout", "demonstrate", "reward")
        copies = 2 if returns else ranks if stage.name in ALL_RANKS else 1
        controller += copies * rows * metadata_bytes()
    sync = float(student.parameters * BYTES[recipe.model.dtype] * replicas)
    objects = [name for stage in plan for name in stage.writes if FIELDS[name].extent == "object"]
    return Traffic(controller, plane, sync, tuple(dict.fromkeys(objects)))


@lru_cache(1)
def metadata_bytes(rows: int = 256) -> float:
    """Bytes of one row's key and tags on the way to another process."""
    keys = tuple(Key(1000 + i // 8, i % 8) for i in range(rows))
    tags = tuple(
        Tags(prompt_tokens=300 + i, response_tokens=500 + i, sampled_tokens=500 + i, reward=i / 7)
        for i in range(rows)
    )
    return len(pickle.dumps(BatchRef("train", keys, tags), protocol=5)) / rows

"""Bytes of a step: through the controller, through the data plane, and of the weights."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.plan import Plan
from practicum.forecast.model_sizes import BYTES, Sizes
from practicum.forecast.workload import Workload
from practicum.recipe.schema.recipe import Recipe

EVERY_RANK = ("update_student", "update_critic")
"""Stages whose ranks all get the metadata of the whole batch; of the others each gets its rows'."""
SAMPLE_ROWS = 256


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes that a stage reads from the data plane and writes to it."""

    read: float
    written: float

    @property
    def both(self) -> float:
        return self.read + self.written


@dataclass(frozen=True, slots=True)
class Traffic:
    """`controller` are keys and tags; `sync` is one version of the weights, once for each engine."""

    controller: float
    plane: Mapping[str, MovedBytes]
    sync: float
    uncounted: tuple[str, ...] = ()
    """Fields whose size can't be told beforehand."""

    @property
    def plane_bytes(self) -> float:
        return sum(moved.both for moved in self.plane.values())


def traffic(
    recipe: Recipe,
    plan: Plan,
    sizes: Sizes,
    work: Workload,
    *,
    ranks: int,
    replicas: int,
    teacher_width: int,
) -> Traffic:
    """What a step of this plan moves."""
    widths = {"D": 3, "E": sizes.experts_per_token, "L": sizes.layers, "H": teacher_width}
    if recipe.distill is not None:
        widths["K"] = recipe.distill.top_k
    tokens = {
        "scalar": 1.0,
        "prompt": work.prompt_tokens,
        "response": work.response_tokens,
        "sequence": work.prompt_tokens + work.response_tokens,
        "object": 0.0,
    }

    def moved(names: tuple[str, ...], rows: int) -> float:
        total = 0.0
        for name in names:
            field = FIELDS[name]
            width = 1
            for axis in field.trailing:
                width *= widths[axis]
            total += rows * tokens[field.extent] * width * BYTES.get(field.dtype, 0)
        return total

    plane, controller = {}, 0.0
    for stage in plan:
        rows = work.rows if stage.name in ("rollout", "reward") else work.sessions
        if stage.reads or stage.writes:
            plane[stage.name] = MovedBytes(moved(stage.reads, rows), moved(stage.writes, rows))
            copies = ranks if stage.name in EVERY_RANK else 1
            # There as the stage's argument, and back with new tags where rows were made or judged.
            ways = 2 if stage.name in ("rollout", "demonstrate", "reward") else copies
            controller += ways * rows * row_bytes()
    sync = sizes.parameters * BYTES[recipe.model.dtype] * replicas
    uncounted = [n for stage in plan for n in stage.writes if FIELDS[n].extent == "object"]
    return Traffic(controller, plane, float(sync), tuple(dict.fromkeys(uncounted)))


@lru_cache(1)
def row_bytes() -> float:
    """Bytes of one row's key and tags on the way to another process."""
    keys = tuple(Key(1000 + i // 8, i % 8) for i in range(SAMPLE_ROWS))
    tags = tuple(
        Tags(prompt_tokens=300 + i, response_tokens=500 + i, sampled_tokens=500 + i, reward=i / 7)
        for i in range(SAMPLE_ROWS)
    )
    return len(pickle.dumps(BatchRef("train", keys, tags), protocol=5)) / SAMPLE_ROWS

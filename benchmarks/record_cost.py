"""What recording costs: whole steps with nothing, the default and everything recorded, in turn.

The GRPO step and the distillation step of the other benchmarks, one thread. Processor time counts: the files
are small, and a neighbour's load is not ours.
"""

from __future__ import annotations

from typing import Any

from benchmarks import harness
from benchmarks.harness import Channel, Contender
from benchmarks.model import DIGITS, model_folder
from benchmarks.stepping import Steps, make_distillation, make_recipe, mean
from practicum.recipe.schema.recipe import Recipe, Track

SIZES: dict[str, Any] = {"prompts": 32, "samples": 8, "max_new_tokens": 32, "digits": DIGITS, "lr": 1e-5}
RECORDS: dict[str, int | str] = {"none": "none", "default": Track().record, "all": "all"}
ROUNDS, BLOCK = 9, 2
"""Rounds, and the steps that a contender takes in one turn."""
GOAL = 0.02
"""Share of a step that recording at the default may cost."""


def step(channel: Channel, kind: str, record: int | str) -> None:
    """Steps of one kind with so much recorded."""
    recipe = _recipe(kind)
    track = recipe.track.model_copy(update={"record": record})
    with Steps(recipe.model_copy(update={"track": track, "name": f"record-{kind}-{record}"})) as steps:
        channel.serve(lambda turn: mean([steps.step() for _ in range(BLOCK)]))


def _recipe(kind: str) -> Recipe:
    if kind == "GRPO":
        return make_recipe("record", **SIZES, threads=1)
    teachers = {"sort": {"model": str(model_folder())}}
    return make_distillation("record", teachers, **SIZES)


def main() -> None:
    """Race the three for both kinds of step, and write the results."""
    model_folder()
    raced = {}
    for kind in ("GRPO", "distillation"):
        print(f"recording in a {kind} step")
        contenders = [
            Contender(name, "benchmarks.record_cost:step", {"kind": kind, "record": record})
            for name, record in RECORDS.items()
        ]
        raced[kind] = harness.race(contenders, ROUNDS)
    settings = {**SIZES, "rounds": ROUNDS, "steps_per_round": BLOCK, "goal": GOAL}
    harness.write_results("record_cost", {"settings": settings, "raced": raced})


if __name__ == "__main__":
    main()

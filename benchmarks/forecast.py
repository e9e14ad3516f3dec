"""Whether `practicum plan` is right: ×4 batch and two learner ranks on Ray, forecast from one rank's steps.

Each shape is stepped as it is, with four times the prompts, and on Ray with two ranks and two engines; all in
turn, one thread each. The forecast knows the first run alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, Stopwatch, medians
from benchmarks.model import DIGITS, model_folder, random_folder
from benchmarks.stepping import Steps, make_recipe
from practicum.forecast.cluster_spec import this_machine
from practicum.forecast.forecast import forecast
from practicum.forecast.workload import WARM_UP, mean_prompt_tokens, summarise
from practicum.recipe.schema.recipe import Recipe

ROUNDS = 4
GOAL = 0.3
"""Most that a forecast of a step may be off, as a fraction of what was measured."""
BASE, LARGER, RANKS = "base", "batch ×4", "2 ranks on Ray"
SHAPES: dict[str, dict[str, Any]] = {
    "GRPO, 4M parameters": {"prompts": 16, "samples": 8, "critic": False},
    "PPO, 0.8M parameters": {"prompts": 32, "samples": 2, "critic": True},
}
"""One whose time is arithmetic, and one with much of its time in fixed costs."""
CONTENDERS: dict[str, dict[str, Any]] = {
    BASE: {"times": 1, "ranks": 1},
    LARGER: {"times": 4, "ranks": 1},
    RANKS: {"times": 1, "ranks": 2},
}
LOOKED_AT = ("time/", "rollout/response_tokens", "rollout/truncated", "train/idle_tokens")


def recipe_of(shape: Mapping[str, Any], times: int, ranks: int) -> Recipe:
    """Sorting with so many times the prompts; several ranks are on Ray, with CPUs to spare."""
    recipe = make_recipe(
        f"forecast-{'ppo' if shape['critic'] else 'grpo'}-{times}-{ranks}",
        prompts=shape["prompts"] * times,
        samples=shape["samples"],
        max_new_tokens=24,
        digits=DIGITS,
        lr=1e-5,
        threads=1,
    )
    written = recipe.model_dump(mode="json")
    if shape["critic"]:
        written["model"]["path"] = str(random_folder(128, 4))
        written["algorithm"]["advantage"] = "gae"
        written["critic"] = {}
    if ranks > 1:
        written["runtime"] |= {"kind": "ray", "cpus": 4 * ranks}
        written["pools"] = {"train": {"devices": ranks}}
    return Recipe.model_validate(written)


def stepper(channel: Channel, shape: str, times: int, ranks: int) -> None:
    """Steps of one contender; it tells the metrics that a forecast reads."""
    with Steps(recipe_of(SHAPES[shape], times, ranks)) as steps:

        def turn(number: int) -> Measured:
            watch = Stopwatch()
            metrics = steps.run.runner.step(number + 1)
            return watch.read() | {n: v for n, v in metrics.items() if n.startswith(LOOKED_AT)}

        channel.serve(turn)


def predict(shape: str, raced: Mapping[str, Sequence[Measured]]) -> dict[str, dict[str, Any]]:
    """For each contender the forecast from the base's steps, beside what was measured."""
    base = recipe_of(SHAPES[shape], **CONTENDERS[BASE])
    # Warm-up rounds were left out already: the ones that a run would leave out are put back.
    run = summarise(base, [*list(raced[BASE])[:WARM_UP], *raced[BASE]])
    found = {}
    for name in raced:
        recipe = recipe_of(SHAPES[shape], **CONTENDERS[name])
        told = forecast(recipe, this_machine(), mean_prompt_tokens, run)
        mid = medians(raced[name])
        stages = {
            stage: {"forecast": cost.seconds, "measured": mid.get(f"time/{stage}", 0.0)}
            for stage, cost in told.stages.items()
        }
        found[name] = {"forecast": told.seconds, "measured": mid["time/step"], "stages": stages}
    return found


def main(rounds: int = ROUNDS) -> None:
    """Step all shapes, compare, and write the results."""
    model_folder()
    names = list(CONTENDERS)
    if importlib.util.find_spec("ray") is None:
        print("ray is not installed: two ranks are left out")
        names.remove(RANKS)
    content: dict[str, Any] = {"goal": GOAL, "rounds": rounds, "shapes": {}}
    for shape in SHAPES:
        print(f"{shape}, 1 thread for each rank")
        contenders = [
            Contender(name, "benchmarks.forecast:stepper", {"shape": shape, **CONTENDERS[name]})
            for name in names
        ]
        raced = harness.race(contenders, rounds, warmup=WARM_UP)
        content["shapes"][shape] = predict(shape, raced)
        for name, one in content["shapes"][shape].items():
            off = one["forecast"] / one["measured"] - 1
            print(f"  {name}: forecast {one['forecast']:.3f} s, took {one['measured']:.3f} s ({off:+.0%})")
            for stage, both in one["stages"].items():
                print(f"      {stage:<15} {both['forecast']:8.4f} {both['measured']:8.4f}")
    harness.write_results("forecast", content)


if __name__ == "__main__":
    main()
